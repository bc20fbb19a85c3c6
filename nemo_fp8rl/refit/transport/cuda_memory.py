"""GPU memory for the buckets of links, from CUDA's own allocator.

Torch's allocator is not suited. It may use growing segments (`expandable_segments`, a frequent setting of trainers),
which no NIC registers and UCX moves through TCP (ai-dynamo/nixl, issue 1754). And memory of torch that another process
maps must be freed by torch's rules (CUDA's programming guide, "Interprocess Communication").
"""

import ctypes
import importlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from nemo_fp8rl.refit.transport.link import BUFFERS, GRACE

DEVICE_TYPE = "cuda"
"""Tests on a machine without a GPU set this to "cpu"."""
ALIGNMENT, GRANULE = 512, 2 << 20
"""Bytes. A bucket begins at a multiple of ALIGNMENT. An allocation smaller than GRANULE would share its page with
others."""
HANDLE = 64
"""Bytes of a handle, CUDA_IPC_HANDLE_SIZE."""


class Buckets(list[Tensor]):
    """Two buckets at an address of a GPU. The memory is freed with this list: the user of a view must keep the list."""

    def __init__(self, address: int, capacity: int, device: torch.device) -> None:
        self.address = address
        # torch receives the device: if it asked CUDA, the answer could be a device that this process does not see
        storage = torch._C._construct_storage_from_data_pointer(address, device, BUFFERS * _stride(capacity))
        memory = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        super().__init__(bucket[:capacity] for bucket in memory.chunk(BUFFERS))


Memory = TypeVar("Memory", Buckets, Tensor)


class CudaMemory:
    """CUDA's runtime, through a package that comes with torch's builds for CUDA.

    Every method raises RuntimeError with the runtime's message, and makes the device the calling thread's current one.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != DEVICE_TYPE:
            raise RuntimeError(f"weights are on the {device.type}")
        self.device = torch.empty(0, device=device).device  # with its number
        try:
            self.runtime: Any = importlib.import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise RuntimeError(f"pip install cuda-bindings: {error}") from None
        self._set_device()

    def allocate(self, capacity: int, collector: "Collector") -> Buckets:
        """Allocate two buckets, which `collector` frees when nothing refers to them any more."""
        nbytes = -(-BUFFERS * _stride(capacity) // GRANULE) * GRANULE
        try:
            address = self._check(self.runtime.cudaMalloc(nbytes))
        except RuntimeError:
            torch.cuda.empty_cache()  # returns memory that torch caches in this process
            address = self._check(self.runtime.cudaMalloc(nbytes))
        return self._free_with(collector, Buckets(address, capacity, self.device), address, self.runtime.cudaFree)

    def export_handle(self, buckets: Buckets) -> bytes:
        """Return the buckets' handle, for `map_handle` in another process."""
        handle = self._check(self.runtime.cudaIpcGetMemHandle(buckets.address))
        return ctypes.string_at(handle.getPtr(), HANDLE)

    def map_handle(self, handle: bytes, capacity: int) -> Buckets:
        """Map the buckets of another process, until nothing refers to them any more."""
        address = self._open(handle)
        buckets = Buckets(address, capacity, self.device)
        return self._free_with(FREE_AT_ONCE, buckets, address, self.runtime.cudaIpcCloseMemHandle)

    def export_allocation(self, address: int) -> tuple[range, dict[str, Any]]:
        """Return the addresses of the allocation that has this address, and what `map_allocation` needs, for JSON.

        CUDA refuses memory of its virtual memory management, as vLLM's sleep mode and torch's growing segments use it.
        """
        driver = importlib.import_module("cuda.bindings.driver")
        error, base, nbytes = driver.cuMemGetAddressRange(address)
        if int(error):
            raise RuntimeError(f"CUDA knows no allocation at {address:#x} (error {int(error)})")
        handle = self._check(self.runtime.cudaIpcGetMemHandle(int(base)))
        content = ctypes.string_at(handle.getPtr(), HANDLE)
        return range(int(base), int(base) + int(nbytes)), {
            "gpu": self._gpu,
            "handle": content.hex(),
            "nbytes": int(nbytes),
        }

    def map_allocation(self, fields: Mapping[str, Any]) -> Tensor | None:
        """Map an allocation of another process, uint8 [nbytes], until nothing refers to this tensor itself any more.

        None for the memory of another GPU: a source would have to read back what it wrote there, to take its digest.
        """
        if fields["gpu"] != self._gpu:
            return None
        self._set_device()  # of a thread that may have another one
        address, nbytes = self._open(bytes.fromhex(fields["handle"])), int(fields["nbytes"])
        storage = torch._C._construct_storage_from_data_pointer(address, self.device, nbytes)
        memory = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        return self._free_with(FREE_AT_ONCE, memory, address, self.runtime.cudaIpcCloseMemHandle)

    @property
    def _gpu(self) -> str:
        """The name of the device that it has in all processes."""
        is_gpu = self.device.type == "cuda"
        return str(torch.cuda.get_device_properties(self.device).uuid) if is_gpu else self.device.type

    def _open(self, handle: bytes) -> int:
        cuda_handle = self.runtime.cudaIpcMemHandle_t()
        ctypes.memmove(cuda_handle.getPtr(), handle, HANDLE)
        flag = self.runtime.cudaIpcMemLazyEnablePeerAccess
        address: int = self._check(self.runtime.cudaIpcOpenMemHandle(cuda_handle, flag))
        return address

    def _free_with(self, collector: "Collector", memory: Memory, address: int, free: Any) -> Memory:
        collector.start()
        weakref.finalize(memory, collector.add, self._free, free, address).atexit = False
        return memory

    def _free(self, free: Any, address: int) -> None:
        self._set_device()
        self._check(self.runtime.cudaDeviceSynchronize())  # work in the GPU's queue may still read it
        self._check(free(address))

    def _set_device(self) -> None:
        self._check(self.runtime.cudaSetDevice(self.device.index or 0))

    def _check(self, answer: tuple[Any, ...]) -> Any:
        """Return the value of a call, if it has one. Raises RuntimeError if the call failed."""
        if answer[0] != self.runtime.cudaError_t.cudaSuccess:
            raise RuntimeError(self.runtime.cudaGetErrorString(answer[0])[1].decode())
        return answer[1] if len(answer) > 1 else None


class Collector:
    """A thread that frees memory some seconds after it was added, and does nothing else.

    Python's own finalizers run in any thread at any moment: with another current device, while CUDA records a graph.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds
        self._calls: SimpleQueue[tuple[float, Callable[..., None], tuple[Any, ...]]] = SimpleQueue()
        self._start_lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        with self._start_lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._collect, name=self.name, daemon=True)
                self._thread.start()

    def add(self, call: Callable[..., None], *arguments: Any) -> None:
        """Add a call. Finalizers may use this: it takes no lock."""
        self._calls.put((time.monotonic(), call, arguments))

    def _collect(self) -> None:
        while True:
            start, call, arguments = self._calls.get()
            time.sleep(max(0.0, start + self.seconds - time.monotonic()))
            try:
                call(*arguments)
            except RuntimeError as error:
                logging.getLogger(__name__).warning("a link's memory on a GPU was not freed: %s", error)


FREE_AT_ONCE = Collector("refit free", 0.0)
FREE_AFTER_GRACE = Collector("refit free later", GRACE)
"""For memory that another process may map."""


def _stride(capacity: int) -> int:
    return -(-capacity // ALIGNMENT) * ALIGNMENT
