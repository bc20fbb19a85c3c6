"""A fake of `cuda.bindings.runtime` for a machine without a GPU: memory is files without names, which processes map.

It has the functions that `cuda_memory` calls, also that of `cuda.bindings.driver`, with the signatures of cuda-bindings
13. It returns an error where CUDA's behaviour is undefined: if memory is freed by another function than the one that
belongs to it, with another current device, or while the device may have work to do. An allocation of more than
`capacity` bytes fails. Unlike CUDA it lets a process map its own memory, so that both ends of a link may be in a test.
"""

import ctypes
import mmap
import os
import sys
import threading
from enum import IntEnum
from typing import Any

from nemo_fp8rl.refit.transport import cuda_memory

NAME, DRIVER = "cuda.bindings.runtime", "cuda.bindings.driver"
cudaIpcMemLazyEnablePeerAccess = 1
capacity = 1 << 30
allocations: dict[int, mmap.mmap] = {}
mappings: dict[int, mmap.mmap] = {}
_files: dict[int, int] = {}
_thread = threading.local()


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorMapBufferObjectFailed = 205


class cudaIpcMemHandle_t:
    def __init__(self) -> None:
        self.content = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self.content)


def cudaGetErrorString(error: cudaError_t) -> tuple[cudaError_t, bytes]:
    words = {1: b"invalid argument", 2: b"out of memory", 205: b"mapping of buffer object failed"}
    return cudaError_t.cudaSuccess, words[error]


def cudaSetDevice(device: int) -> tuple[cudaError_t]:
    _thread.device = device
    return (cudaError_t.cudaSuccess,)


def cudaDeviceSynchronize() -> tuple[cudaError_t]:
    _thread.idle = True
    return (_on_device(),)


def cudaMalloc(size: int) -> tuple[cudaError_t, int | None]:
    if size > capacity:
        return cudaError_t.cudaErrorMemoryAllocation, None
    file = os.memfd_create("fake GPU memory")
    os.ftruncate(file, size)
    return _on_device(), _map(file, size, allocations)


def cuMemGetAddressRange(address: int) -> tuple[int, int, int]:
    for base, mapping in allocations.items():
        if base <= address < base + len(mapping):
            return 0, base, len(mapping)
    return 1, 0, 0


def cudaIpcGetMemHandle(address: int) -> tuple[cudaError_t, cudaIpcMemHandle_t]:
    handle = cudaIpcMemHandle_t()
    handle.content.value = f"{os.getpid()} {_files[address]} {len(allocations[address])}".encode()
    return _on_device(), handle


def cudaIpcOpenMemHandle(handle: cudaIpcMemHandle_t, flags: int) -> tuple[cudaError_t, int | None]:
    assert flags == cudaIpcMemLazyEnablePeerAccess
    try:
        process, file, size = handle.content.value.decode().split()
        descriptor = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
    except (OSError, ValueError):
        return cudaError_t.cudaErrorMapBufferObjectFailed, None
    return _on_device(), _map(descriptor, int(size), mappings)


def cudaFree(address: int) -> tuple[cudaError_t]:
    return (_release(address, allocations),)


def cudaIpcCloseMemHandle(address: int) -> tuple[cudaError_t]:
    return (_release(address, mappings),)


def _on_device() -> cudaError_t:
    return cudaError_t.cudaSuccess if getattr(_thread, "device", None) == 0 else cudaError_t.cudaErrorInvalidValue


def _map(file: int, size: int, kind: dict[int, mmap.mmap]) -> int:
    mapping = mmap.mmap(file, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    kind[address], _files[address] = mapping, file
    return address


def _release(address: int, kind: dict[int, mmap.mmap]) -> cudaError_t:
    idle, _thread.idle = getattr(_thread, "idle", False), False
    if address not in kind or not idle:
        return cudaError_t.cudaErrorInvalidValue
    os.close(_files.pop(address))
    del kind[address]
    return _on_device()


def install() -> None:
    this: Any = sys.modules[__name__]
    sys.modules[NAME] = sys.modules[DRIVER] = this
    cuda_memory.DEVICE_TYPE = "cpu"
