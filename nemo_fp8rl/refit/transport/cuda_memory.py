"""Memory of a GPU that belongs to links alone, from CUDA's own allocator.

Torch's is not for others: it hands out segments that grow where it is told to (`expandable_segments`, as trainers
often are), which no NIC registers and UCX moves through TCP (ai-dynamo/nixl, issue 1754), and what another process maps
of it is kept on its terms (CUDA's programming guide, "Interprocess Communication").
"""

import ctypes
import importlib
import logging
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.refit.transport.link import BUFFERS, GRACE

DEVICE_TYPE = "cuda"
"""Tests on a machine without a GPU say "cpu"."""
ALIGNMENT, GRANULE = 512, 2 << 20
"""Bytes: a bucket begins at a multiple of the one; an allocation below the other would share its page with others'."""
HANDLE = 64
"""Bytes of a handle, CUDA_IPC_HANDLE_SIZE."""


class Buckets(list[Tensor]):
    """Two buckets at an address of a GPU, whose memory goes with this list: whoever has a view keeps its end."""

    def __init__(self, address: int, capacity: int, device: torch.device) -> None:
        self.address = address
        # torch is told the device: asked of CUDA it could be one that this process does not see
        storage = torch._C._construct_storage_from_data_pointer(address, device, BUFFERS * _stride(capacity))
        memory = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        super().__init__(bucket[:capacity] for bucket in memory.chunk(BUFFERS))


class CudaMemory:
    """CUDA's runtime, by a package that torch's builds for CUDA bring. Everything raises RuntimeError in its words.

    The device becomes the current one of the calling thread.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != DEVICE_TYPE:
            raise RuntimeError(f"weights are on the {device.type}")
        self.device = torch.empty(0, device=device).device  # with its number
        try:
            self.runtime: Any = importlib.import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise RuntimeError(f"pip install cuda-bindings: {error}") from None
        self._enter()

    def allocated(self, capacity: int, freed: "Collector") -> Buckets:
        """Two buckets, let go of by `freed` when nothing refers to them any more."""
        nbytes = -(-BUFFERS * _stride(capacity) // GRANULE) * GRANULE
        try:
            address = self._done(self.runtime.cudaMalloc(nbytes))
        except RuntimeError:
            torch.cuda.empty_cache()  # of this process, where torch keeps what it no longer uses
            address = self._done(self.runtime.cudaMalloc(nbytes))
        return self._held(Buckets(address, capacity, self.device), freed, self.runtime.cudaFree)

    def handle(self, buckets: Buckets) -> bytes:
        """The buckets' handle, for `mapped` in another process."""
        handle = self._done(self.runtime.cudaIpcGetMemHandle(buckets.address))
        return ctypes.string_at(handle.getPtr(), HANDLE)

    def mapped(self, handle: bytes, capacity: int) -> Buckets:
        """The buckets of another process, let go of when nothing refers to them any more."""
        theirs = self.runtime.cudaIpcMemHandle_t()
        ctypes.memmove(theirs.getPtr(), handle, HANDLE)
        flag = self.runtime.cudaIpcMemLazyEnablePeerAccess
        address = self._done(self.runtime.cudaIpcOpenMemHandle(theirs, flag))
        return self._held(Buckets(address, capacity, self.device), AT_ONCE, self.runtime.cudaIpcCloseMemHandle)

    def _held(self, buckets: Buckets, collector: "Collector", free: Any) -> Buckets:
        collector.start()
        weakref.finalize(buckets, collector.add, self._end, free, buckets.address).atexit = False
        return buckets

    def _end(self, free: Any, address: int) -> None:
        self._enter()
        self._done(self.runtime.cudaDeviceSynchronize())  # what was queued may read it yet
        self._done(free(address))

    def _enter(self) -> None:
        self._done(self.runtime.cudaSetDevice(self.device.index or 0))

    def _done(self, answer: tuple[Any, ...]) -> Any:
        """The value of a call, if it has one."""
        if answer[0] != self.runtime.cudaError_t.cudaSuccess:
            raise RuntimeError(self.runtime.cudaGetErrorString(answer[0])[1].decode())
        return answer[1] if len(answer) > 1 else None


class Collector:
    """A thread that lets go of memory some seconds after it was added, and does nothing else.

    What Python collects it collects in any thread, at any moment: on another device, while CUDA records a graph.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds
        self._added: SimpleQueue[tuple[float, Callable[..., None], tuple[Any, ...]]] = SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._collect, name=self.name, daemon=True)
                self._thread.start()

    def add(self, call: Callable[..., None], *arguments: Any) -> None:
        """Add a call, from a finalizer, too: takes no lock."""
        self._added.put((time.monotonic(), call, arguments))

    def _collect(self) -> None:
        while True:
            added, call, arguments = self._added.get()
            time.sleep(max(0.0, added + self.seconds - time.monotonic()))
            try:
                call(*arguments)
            except RuntimeError as error:
                logging.getLogger(__name__).warning("a link's memory on a GPU was not let go of: %s", error)


AT_ONCE, LATER = Collector("refit free", 0.0), Collector("refit free later", GRACE)
"""LATER: for memory that another process may map."""


def _stride(capacity: int) -> int:
    return -(-capacity // ALIGNMENT) * ALIGNMENT
