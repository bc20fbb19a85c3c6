"""A link between processes of one host: both map memory of the source's GPU, and no byte of a payload visits the host.

Source and sink may share a GPU or have two that reach each other's memory, whether or not either sees the other's. The
two buckets are an allocation of the link's own (CUDA's IPC, "Interprocess Communication" in its programming guide): a
handle of torch's would be on its allocator's terms, which keeps memory for every process that was killed.
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

from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.refit.transport.control import Control
from nemo_fp8rl.refit.transport.ends import Receiver, Sender
from nemo_fp8rl.refit.transport.link import BUFFERS, GRACE, LinkError, ReceivingEnd, SendingEnd

DEVICE_TYPE = "cuda"
"""Of the weights that can be carried; tests on a machine without a GPU say "cpu"."""
ALIGNMENT, GRANULE = 512, 2 << 20
"""Bytes: a bucket begins at a multiple of the one; an allocation below the other would share its page with others'."""
HANDLE = 64
"""Bytes of a handle, CUDA_IPC_HANDLE_SIZE."""
ELSE = "set nemo_fp8rl.refit.transport=shared_memory, or collective where the run has several machines"


class Unmapped(LinkError):
    """The sink said that it cannot map the source's memory. The connection stands: both may try another way."""


def offer(control: Control, capacity: int, device: torch.device) -> SendingEnd:
    """The source's end; the buckets are on its device. Raises RefitError where CUDA cannot share such memory, Unmapped
    where the sink cannot map it.
    """
    try:
        cuda = _Cuda(device)
        buckets = cuda.allocated(capacity)
        handle = cuda.handle(buckets)
    except RuntimeError as error:
        raise RefitError(
            f"no two buckets of {capacity / 2**20:.1f} MiB on {device} for another process to map ({error}): {ELSE}, "
            "or a smaller nemo_fp8rl.refit.bucket_bytes where memory is short"
        ) from None
    control.say(handle=handle.hex())
    answer = control.hear(mapped=bool, why=str)
    if not answer["mapped"]:
        raise Unmapped(f"{control.other} cannot map this rank's GPU memory ({answer['why']})")
    return Sender(control, buckets)


def take(control: Control, capacity: int, device: torch.device) -> ReceivingEnd | None:
    """The sink's end. device: where its weights are. None where that cannot map the source's memory: the source has
    heard why, and offers another way or ends the link.
    """
    said = control.hear(handle=str)["handle"]
    try:
        handle = bytes.fromhex(said)
    except ValueError:
        handle = b""
    if len(handle) != HANDLE:
        raise LinkError(f"{control.other} offers {said[:80]!r}, which is no handle of a GPU's memory")
    try:
        buckets = _Cuda(device).mapped(handle, capacity)
    except RuntimeError as error:
        control.say(mapped=False, why=f"on {device}: {error}")
        return None
    control.say(mapped=True, why="")
    return Receiver(control, buckets)


class _Buckets(list[Tensor]):
    """Of memory at an address of a GPU, which goes with this list: whoever has a view keeps the end that it is of."""

    def __init__(self, address: int, capacity: int, device: torch.device) -> None:
        self.address = address
        # torch is told the device: asked of CUDA it could be one that this process does not see
        storage = torch._C._construct_storage_from_data_pointer(address, device, BUFFERS * _stride(capacity))
        memory = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        super().__init__(bucket[:capacity] for bucket in memory.chunk(BUFFERS))


class _Cuda:
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

    def allocated(self, capacity: int) -> _Buckets:
        """Freed some time after nothing refers to them any more: another process may map them that long."""
        nbytes = -(-BUFFERS * _stride(capacity) // GRANULE) * GRANULE
        try:
            address = self._done(self.runtime.cudaMalloc(nbytes))
        except RuntimeError:
            torch.cuda.empty_cache()  # of this process, where torch keeps what it no longer uses
            address = self._done(self.runtime.cudaMalloc(nbytes))
        return self._held(_Buckets(address, capacity, self.device), _freeing, self.runtime.cudaFree)

    def handle(self, buckets: _Buckets) -> bytes:
        """For `mapped` in another process."""
        handle = self._done(self.runtime.cudaIpcGetMemHandle(buckets.address))
        return ctypes.string_at(handle.getPtr(), HANDLE)

    def mapped(self, handle: bytes, capacity: int) -> _Buckets:
        """Let go of when nothing refers to them any more."""
        theirs = self.runtime.cudaIpcMemHandle_t()
        ctypes.memmove(theirs.getPtr(), handle, HANDLE)
        flag = self.runtime.cudaIpcMemLazyEnablePeerAccess
        address = self._done(self.runtime.cudaIpcOpenMemHandle(theirs, flag))
        return self._held(_Buckets(address, capacity, self.device), _closing, self.runtime.cudaIpcCloseMemHandle)

    def _held(self, buckets: _Buckets, collector: "_Collector", free: Any) -> _Buckets:
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


class _Collector:
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
        """From a finalizer: takes no lock."""
        self._added.put((time.monotonic(), call, arguments))

    def _collect(self) -> None:
        while True:
            added, call, arguments = self._added.get()
            time.sleep(max(0.0, added + self.seconds - time.monotonic()))
            try:
                call(*arguments)
            except RuntimeError as error:
                logging.getLogger(__name__).warning("a link's memory on a GPU was not let go of: %s", error)


def _stride(capacity: int) -> int:
    return -(-capacity // ALIGNMENT) * ALIGNMENT


_closing, _freeing = _Collector("refit close", 0.0), _Collector("refit free", GRACE)
