"""Implementations of the contract; `reference` is the specification, every other one must equal it to the bit.

reference   torch, on any device: the formula, line by line
cpu         numba, memory speed on a CPU
triton      one pass over a GPU's memory
te          Transformer Engine's own quantizer, on a GPU: to hold the contract against the real thing
auto        triton on CUDA, cpu on a CPU; reference where the library for those is not installed

A kernel module has two functions, both for contiguous outputs and x [E, N, K] of any strides; the first takes a
scale_inv of any strides, too:

quantize(x, block, scale_format, data, scale_inv)                       fills data and scale_inv
quantize_delta(x, block, scale_format, base, data, scale_inv)           and returns what differs from base,
                                                                        which may be data; `comparing` makes it

and marks a block that holds a value that is not finite by a scale_inv of NaN. What the emulated matmuls multiply,
quantized and dequantized in one go, comes from `cpu`, or from `emulate` where that cannot run.
"""

import functools
import importlib
import logging
from collections.abc import Callable
from importlib import metadata
from typing import Protocol, cast, get_args

import torch
from torch import Tensor

from nemo_fp8rl.fp8.delta import Delta
from nemo_fp8rl.fp8.names import Block, KernelName, ScaleFormat

logger = logging.getLogger(__name__)

_MODULE = {"reference": "reference", "cpu": "on_cpu.numba_kernel", "triton": "triton_kernels", "te": "te"}
_LIBRARY = {"cpu": "numba", "triton": "triton", "te": "transformer_engine"}
_DEVICES = {"reference": ("cpu", "cuda"), "cpu": ("cpu",), "triton": ("cuda",), "te": ("cuda",)}


class KernelError(RuntimeError):
    """The kernel asked for by name cannot run here."""


class Kernel(Protocol):
    def quantize(self, x: Tensor, block: Block, scale_format: ScaleFormat, data: Tensor, scale_inv: Tensor) -> None: ...

    def quantize_delta(
        self, x: Tensor, block: Block, scale_format: ScaleFormat, base: Tensor, data: Tensor, scale_inv: Tensor
    ) -> Delta | None: ...


@functools.cache
def resolve(name: KernelName, device: str) -> str:
    """The kernel that `name` means on a device type ("cpu", "cuda"); says so once, in the log.

    Raises KernelError if a kernel asked for by name cannot run there. Only `auto` chooses.
    """
    if name not in get_args(KernelName):
        raise KernelError(f"there is no FP8 kernel {name!r}; there are {', '.join(get_args(KernelName))}")
    if name == "auto":
        wanted = "triton" if device == "cuda" else "cpu"
        reason = why_not(wanted, device)
        chosen = "reference" if reason else wanted
        logger.info("FP8 quantizer on %s: %s", device, f"{chosen}, as {reason}" if reason else describe(chosen))
        return chosen
    if reason := why_not(name, device):
        raise KernelError(f"FP8 kernel {name} cannot run: {reason}; take another, or auto")
    logger.info("FP8 quantizer on %s: %s, as asked for", device, describe(name))
    return name


def load(name: KernelName, device: str) -> Kernel:
    """The module of the kernel that `name` means on a device type."""
    return _module(resolve(name, device))


@functools.cache
def _module(kernel: str) -> Kernel:
    return cast(Kernel, importlib.import_module(f"{__name__}.{_MODULE[kernel]}"))


@functools.cache
def load_emulation(device: str) -> Callable[[Tensor, Block, ScaleFormat, torch.dtype], Tensor]:
    """quantize_dequantize(x, block, scale_format, dtype): the cpu kernel's where that runs, else `emulate`'s."""
    if resolve("auto", device) == "cpu":
        return importlib.import_module(f"{__name__}.on_cpu.numba_kernel").quantize_dequantize
    return importlib.import_module(f"{__name__}.emulate").quantize_dequantize


def describe(kernel: str) -> str:
    """A resolved kernel with the version of the library that it comes from."""
    library = _LIBRARY.get(kernel)
    return f"{kernel} ({library} {metadata.version(library)})" if library else kernel


def why_not(kernel: str, device: str) -> str:
    """Why a kernel cannot run on a device type; empty if it can."""
    if device not in _DEVICES[kernel] and not (kernel == "triton" and _interpreted()):
        return f"{kernel} runs on {' and '.join(_DEVICES[kernel])}, not on {device}"
    try:
        importlib.import_module(f"{__name__}.{_MODULE[kernel]}")
    except (ImportError, OSError) as error:
        return f"{_LIBRARY[kernel]} cannot be imported ({error})"
    except RuntimeError as error:  # numba, where neither the package nor the user's cache folder can be written
        return f"{_LIBRARY[kernel]} cannot be used ({error})"
    return ""


def _interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU, value by value (TRITON_INTERPRET=1 when they are imported)."""
    try:
        from nemo_fp8rl.fp8.kernels import triton_kernels
    except ImportError:
        return False
    return triton_kernels.INTERPRETED
