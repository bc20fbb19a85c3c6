"""The entry points of the quantizer: check the input, run the kernel, refuse values that are not finite."""

import math

import torch
from torch import Tensor

from nemo_fp8rl.fp8 import kernels
from nemo_fp8rl.fp8.delta import Delta
from nemo_fp8rl.fp8.format import (
    ALONG_LAST,
    E4M3,
    BlockScaled,
    NonFiniteError,
    check_scale_format,
    describe_non_finite,
    scale_shape,
)
from nemo_fp8rl.fp8.names import BLOCK, Block, KernelName, ScaleFormat

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.no_grad()
def quantize_blockwise(
    x: Tensor,
    *,
    block: Block = BLOCK,
    scale_format: ScaleFormat = "pow2",
    kernel: KernelName = "auto",
    out: BlockScaled | None = None,
    check: bool = True,
) -> BlockScaled:
    """Quantize to E4M3 with one scale per block, by the formula of `kernels/reference.py`.

    x:      bf16, fp16 or fp32, any strides; [N, K], or [E, N, K] for experts, whose blocks stay within one expert
    kernel: the implementation; all give the same bytes
    out:    tensors to fill and return instead of new ones; they must not share memory with x
    check:  False skips the search for values that are not finite, which waits for a GPU; the caller can then search
            scale_inv, which is NaN for a block with such a value
    Raises: NonFiniteError, with the count of such values and the index of the first; `out` then has no meaning.
            Transformer Engine would drop a NaN silently.
    """
    x3, out = _check_and_allocate(x, block, scale_format, out)
    data, scale_inv = _as_stack(out.data), _as_stack(out.scale_inv)
    kernels.load(kernel, x.device.type).quantize(x3, block, scale_format, data, scale_inv)
    if check:
        _refuse_non_finite(x, out)
    return out


@torch.no_grad()
def quantize_delta(
    x: Tensor,
    base: Tensor,
    *,
    block: Block = BLOCK,
    scale_format: ScaleFormat = "pow2",
    kernel: KernelName = "auto",
    out: BlockScaled | None = None,
) -> tuple[BlockScaled, Delta | None]:
    """Quantize as `quantize_blockwise` does, and return the delta that turns `base` into the new bytes.

    The delta is None when more than `delta.MAX_CHANGED` of the bytes differ.

    base: E4M3 bytes of the previous version, of x's shape, contiguous; not written, unless `base` is out.data, which is
          the fastest
    """
    if base.dtype is not E4M3 or base.shape != x.shape or not base.is_contiguous() or base.device != x.device:
        raise ValueError(
            f"the base of a delta must be contiguous {E4M3} {list(x.shape)} on {x.device}, "
            f"got {base.dtype} {list(base.shape)} on {base.device}"
        )
    x3, out = _check_and_allocate(x, block, scale_format, out)
    data, scale_inv = _as_stack(out.data), _as_stack(out.scale_inv)
    module = kernels.load(kernel, x.device.type)
    delta = module.quantize_delta(x3, block, scale_format, _as_stack(base), data, scale_inv)
    _refuse_non_finite(x, out)
    return out, delta


@torch.no_grad()
def quantize_activations(x: Tensor, scale_format: ScaleFormat = "pow2", scale_inv: Tensor | None = None) -> BlockScaled:
    """Quantize x [M, K] in blocks of 1x128, without a search for values that are not finite (it would wait for a GPU).

    A block that holds such a value gets a scale_inv of NaN.

    scale_inv: float32 [M, ceil(K/128)] of any strides, to fill and return instead of a new tensor
    """
    _check_input(x, ALONG_LAST, scale_format)
    data = torch.empty(x.shape, dtype=E4M3, device=x.device)
    if scale_inv is None:
        scale_inv = torch.empty(scale_shape(x.shape, ALONG_LAST), dtype=torch.float32, device=x.device)
    kernels.load("auto", x.device.type).quantize(x[None], ALONG_LAST, scale_format, data[None], scale_inv[None])
    return BlockScaled(data, scale_inv, ALONG_LAST)


def fake_quantize(
    x: Tensor, *, block: Block, scale_format: ScaleFormat = "pow2", dtype: torch.dtype | None = None
) -> Tensor:
    """Return `quantize_blockwise(x).dequantize(dtype)` of x [N, K], in one fast pass without E4M3 storage.

    A block that holds a value that is not finite becomes NaN.

    dtype: of the result, by default x's
    """
    check_scale_format(scale_format)
    quantize_dequantize = kernels.load_emulation(x.device.type)
    return quantize_dequantize(x.detach(), block, scale_format, dtype or x.dtype)


def _check_and_allocate(
    x: Tensor, block: Block, scale_format: ScaleFormat, out: BlockScaled | None
) -> tuple[Tensor, BlockScaled]:
    """Return x as [E, N, K], and `out`, or new tensors, of the right shapes."""
    _check_input(x, block, scale_format)
    shape = scale_shape(x.shape, block)
    if out is None:
        data = torch.empty(x.shape, dtype=E4M3, device=x.device)
        out = BlockScaled(data, torch.empty(shape, dtype=torch.float32, device=x.device), block)
    for name, tensor, dtype, size in (
        ("data", out.data, E4M3, x.shape),
        ("scale_inv", out.scale_inv, torch.float32, shape),
    ):
        if tensor.dtype is not dtype or tensor.shape != size or tensor.device != x.device or not tensor.is_contiguous():
            raise ValueError(
                f"out.{name} must be contiguous {dtype} {list(size)} on {x.device}, "
                f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )
    if out.block != block:
        raise ValueError(f"out is for blocks of {out.block}, not of {block}")
    return _as_stack(x), out


def _check_input(x: Tensor, block: Block, scale_format: ScaleFormat) -> None:
    if x.dim() not in (2, 3):
        raise ValueError(f"a matrix [N, K] or a stack of them [E, N, K] is quantized, got shape {list(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"{', '.join(map(str, DTYPES))} is quantized, got {x.dtype}")
    check_scale_format(scale_format)
    if min(block) < 1:
        raise ValueError(f"a block has at least one row and one column, got {block}")


def _as_stack(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x.unsqueeze(0)


def _refuse_non_finite(x: Tensor, out: BlockScaled) -> None:
    """Raise NonFiniteError if a scale_inv is NaN, the kernels' mark of a block with a value that is not finite."""
    if not math.isnan(float(out.scale_inv.sum())):  # scales are not negative, so nothing else makes the sum NaN
        return
    raise NonFiniteError(describe_non_finite(x))
