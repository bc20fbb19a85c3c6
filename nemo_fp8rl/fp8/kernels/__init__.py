"""Implementations of the FP8 contract; `reference` specifies it, and every other one must equal it to the bit.

reference   torch, on any device: the formula, line by line
cpu         numba, at memory speed on a CPU
triton      one pass over a GPU's memory
te          Transformer Engine's own quantizer, on a GPU: to check the contract against it
auto        triton on CUDA, cpu on a CPU; reference where the library of that kernel is not installed

A kernel is a module with the two functions of `Kernel`. Both mark a block that holds a value that is not finite by a
scale_inv of NaN. The operands of the emulated matmuls, quantized and dequantized in one pass, come from `cpu`, or from
`emulate` where `cpu` cannot run.
"""

import functools
import importlib
import logging
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Protocol, cast, get_args

import torch
from torch import Tensor

from nemo_fp8rl.fp8.delta import Delta
from nemo_fp8rl.fp8.kernels.matrices import Stack
from nemo_fp8rl.fp8.names import Block, KernelName, ScaleFormat, ScaleRule

logger = logging.getLogger(__name__)

_MODULE = {"reference": "reference", "cpu": "on_cpu.numba_kernel", "triton": "triton_kernels", "te": "te"}
_FP4_MODULE = {"reference": "reference", "cpu": "on_cpu.fp4_kernel", "triton": "triton_fp4"}
_LIBRARY = {"cpu": "numba", "triton": "triton", "te": "transformer_engine"}
_DEVICES = {"reference": ("cpu", "cuda"), "cpu": ("cpu",), "triton": ("cuda",), "te": ("cuda",)}


class KernelError(RuntimeError):
    """The kernel with the requested name does not exist or cannot run on this machine."""


class Kernel(Protocol):
    """A module that quantizes x [E, N, K], of any strides, or separate matrices.

    data:      output, E4M3 [E, N, K], contiguous
    scale_inv: output, float32 [E, ceil(N/b0), ceil(K/b1)]; contiguous in quantize_delta, of any strides in quantize
    base:      E4M3 [E, N, K], the previous bytes; it may be `data`
    """

    def quantize(self, x: Stack, block: Block, rule: ScaleRule, data: Tensor, scale_inv: Tensor) -> None:
        """Fill data and scale_inv."""

    def quantize_delta(
        self, x: Stack, block: Block, rule: ScaleRule, base: Tensor, data: Tensor, scale_inv: Tensor
    ) -> Delta | None:
        """Fill data and scale_inv, and return what differs from base; None if too much differs to list it."""


class Fp4Kernel(Protocol):
    """A module that quantizes x, as `Kernel` takes it, to E2M1; see `reference.quantize_fp4`."""

    def quantize_fp4(
        self, x: Stack, block: Block, encode: Tensor, flush: bool, data: Tensor, scale_inv: Tensor
    ) -> None:
        """Fill data, contiguous, and scale_inv, contiguous."""


@functools.cache
def resolve(name: KernelName, device: str) -> str:
    """Return the kernel that `name` stands for on a device type ("cpu", "cuda"), and log it once.

    Only `auto` falls back to another kernel.

    Raises: KernelError if any other name is unknown or cannot run on that device type
    """
    if name not in get_args(KernelName):
        raise KernelError(f"there is no FP8 kernel {name!r}; there are {', '.join(get_args(KernelName))}")
    if name == "auto":
        fastest = "triton" if device == "cuda" else "cpu"
        reason = why_unavailable(fastest, device)
        kernel = "reference" if reason else fastest
        logger.info("FP8 quantizer on %s: %s", device, f"{kernel}, as {reason}" if reason else describe(kernel))
        return kernel
    if reason := why_unavailable(name, device):
        raise KernelError(f"FP8 kernel {name} cannot run: {reason}; take another, or auto")
    logger.info("FP8 quantizer on %s: %s, as asked for", device, describe(name))
    return name


def load(name: KernelName, device: str) -> Kernel:
    """Return the module of the kernel that `name` stands for on a device type."""
    return _module(resolve(name, device))


def load_fp4(name: KernelName, device: str) -> Fp4Kernel:
    """Return the module of E2M1 that belongs to the kernel that `name` stands for on a device type.

    Raises: KernelError if that kernel has none
    """
    kernel = resolve(name, device)
    if kernel not in _FP4_MODULE:
        raise KernelError(f"FP8 kernel {kernel} does not quantize to FP4; take {', '.join(_FP4_MODULE)}, or auto")
    return cast(Fp4Kernel, importlib.import_module(f"{__name__}.{_FP4_MODULE[kernel]}"))


@functools.cache
def _module(kernel: str) -> Kernel:
    return cast(Kernel, importlib.import_module(f"{__name__}.{_MODULE[kernel]}"))


@functools.cache
def load_triton(name: str) -> ModuleType | None:
    """Return a module of Triton's kernels in this folder; None where Triton is not installed."""
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ImportError:
        return None


@functools.cache
def load_emulation(device: str) -> Callable[[Tensor, Block, ScaleRule, torch.dtype], Tensor]:
    """Return quantize_dequantize(x, block, rule, dtype) of the cpu kernel where it runs, else of `emulate`."""
    if resolve("auto", device) == "cpu":
        return importlib.import_module(f"{__name__}.on_cpu.numba_kernel").quantize_dequantize
    return importlib.import_module(f"{__name__}.emulate").quantize_dequantize


@functools.cache
def load_fp4_emulation(device: str) -> Callable[[Tensor, Block, Tensor | ScaleFormat, bool, torch.dtype], Tensor]:
    """Return quantize_dequantize_fp4(x, block, encode, flush, dtype), chosen as in `load_emulation`."""
    module = "on_cpu.fp4_kernel" if resolve("auto", device) == "cpu" else "emulate"
    return importlib.import_module(f"{__name__}.{module}").quantize_dequantize_fp4


def describe(kernel: str) -> str:
    """Return a resolved kernel's name, with the version of its library."""
    library = _LIBRARY.get(kernel)
    return f"{kernel} ({library} {metadata.version(library)})" if library else kernel


def why_unavailable(kernel: str, device: str) -> str:
    """Return why a kernel cannot run on a device type; empty if it can."""
    if device not in _DEVICES[kernel] and not (kernel == "triton" and _is_triton_interpreted()):
        return f"{kernel} runs on {' and '.join(_DEVICES[kernel])}, not on {device}"
    try:
        importlib.import_module(f"{__name__}.{_MODULE[kernel]}")
    except (ImportError, OSError) as error:
        return f"{_LIBRARY[kernel]} cannot be imported ({error})"
    return ""


def _is_triton_interpreted() -> bool:
    """Return whether Triton runs its kernels on the CPU, value by value (TRITON_INTERPRET=1 at their import)."""
    triton_kernels = load_triton("triton_kernels")
    return triton_kernels is not None and triton_kernels.IS_INTERPRETED
