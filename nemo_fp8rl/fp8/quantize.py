"""The quantizer that everything calls: checks the input, runs the kernel, refuses what is not finite."""

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
    """Quantize to E4M3 with one scale a block.

    x: bf16, fp16 or fp32, any strides; [N, K], or [E, N, K] for experts, whose blocks stay within one expert.
    out: filled and returned if given, instead of new tensors; it must not share memory with x.

    Raises NonFiniteError with the count and the place of the first value when x holds NaN or infinity: such a weight
    must not be shipped (Transformer Engine would drop the NaN silently). `out` is then worthless. check: false leaves
    that, which waits for a GPU, to the caller: a block that holds such a value has a scale_inv of NaN.
    """
    x3, out = _prepared(x, block, scale_format, out)
    data, scale_inv = _stacked(out.data), _stacked(out.scale_inv)
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
    """`quantize_blockwise`, and what changed since the last version.

    base: the last version's E4M3 bytes, of x's shape, contiguous; never written unless they are out.data, too, which is
    fastest. The delta turns base into out.data; it is None when more than `delta.MAX_CHANGED` of the bytes differ.
    """
    if base.dtype is not E4M3 or base.shape != x.shape or not base.is_contiguous() or base.device != x.device:
        raise ValueError(
            f"the base of a delta must be contiguous {E4M3} {list(x.shape)} on {x.device}, "
            f"got {base.dtype} {list(base.shape)} on {base.device}"
        )
    x3, out = _prepared(x, block, scale_format, out)
    data, scale_inv = _stacked(out.data), _stacked(out.scale_inv)
    chosen = kernels.load(kernel, x.device.type)
    delta = chosen.quantize_delta(x3, block, scale_format, _stacked(base), data, scale_inv)
    _refuse_non_finite(x, out)
    return out, delta


@torch.no_grad()
def quantize_activations(x: Tensor, scale_format: ScaleFormat = "pow2", scale_inv: Tensor | None = None) -> BlockScaled:
    """`quantize_blockwise` of x [M, K] in blocks of 1x128, without its check, which would wait for a GPU: a block that
    holds a value that is not finite gets a scale_inv of NaN.

    scale_inv: float32 [M, ceil(K/128)] of any strides, filled and returned if given.
    """
    _check(x, ALONG_LAST, scale_format)
    data = torch.empty(x.shape, dtype=E4M3, device=x.device)
    if scale_inv is None:
        scale_inv = torch.empty(scale_shape(x.shape, ALONG_LAST), dtype=torch.float32, device=x.device)
    kernels.load("auto", x.device.type).quantize(x[None], ALONG_LAST, scale_format, data[None], scale_inv[None])
    return BlockScaled(data, scale_inv, ALONG_LAST)


def fake_quantize(
    x: Tensor, *, block: Block, scale_format: ScaleFormat = "pow2", dtype: torch.dtype | None = None
) -> Tensor:
    """`quantize_blockwise(x).dequantize(dtype)` of x [N, K] in one fast pass, without E4M3 storage.

    dtype defaults to x's. A block that holds a value that is not finite becomes NaN.
    """
    check_scale_format(scale_format)
    quantize_dequantize = kernels.load_emulation(x.device.type)
    return quantize_dequantize(x.detach(), block, scale_format, dtype or x.dtype)


def _prepared(
    x: Tensor, block: Block, scale_format: ScaleFormat, out: BlockScaled | None
) -> tuple[Tensor, BlockScaled]:
    """x as [E, N, K], and an `out` that fits it."""
    _check(x, block, scale_format)
    shape = scale_shape(x.shape, block)
    if out is None:
        data = torch.empty(x.shape, dtype=E4M3, device=x.device)
        out = BlockScaled(data, torch.empty(shape, dtype=torch.float32, device=x.device), block)
    for name, got, dtype, size in (
        ("data", out.data, E4M3, x.shape),
        ("scale_inv", out.scale_inv, torch.float32, shape),
    ):
        if got.dtype is not dtype or got.shape != size or got.device != x.device or not got.is_contiguous():
            raise ValueError(
                f"out.{name} must be contiguous {dtype} {list(size)} on {x.device}, "
                f"got {got.dtype} {list(got.shape)} on {got.device}"
            )
    if out.block != block:
        raise ValueError(f"out is for blocks of {out.block}, not of {block}")
    return _stacked(x), out


def _check(x: Tensor, block: Block, scale_format: ScaleFormat) -> None:
    if x.dim() not in (2, 3):
        raise ValueError(f"a matrix [N, K] or a stack of them [E, N, K] is quantized, got shape {list(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"{', '.join(map(str, DTYPES))} is quantized, got {x.dtype}")
    check_scale_format(scale_format)
    if min(block) < 1:
        raise ValueError(f"a block has at least one row and one column, got {block}")


def _stacked(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x.unsqueeze(0)


def _refuse_non_finite(x: Tensor, out: BlockScaled) -> None:
    """Kernels mark a block with a value that is not finite by a scale_inv of NaN; only then the values are searched."""
    if not math.isnan(float(out.scale_inv.sum())):  # of numbers that are not negative
        return
    raise NonFiniteError(describe_non_finite(x))
