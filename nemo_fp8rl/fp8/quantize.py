"""The entry points of the quantizer: check the input, run the kernel, refuse values that are not finite.

With power-of-two global scales a block of an NVFP4 weight whose scale would be below E4M3's normal values is flushed to
zeros, in the trainer's forward as well as on the wire, because vLLM's Marlin kernel would lose it. With float32 global
scales the bytes are Transformer Engine's.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.fp8 import kernels
from nemo_fp8rl.fp8.block_scaled import (
    ALONG_LAST,
    DATA_DTYPES,
    E4M3,
    E8M0_NAN,
    SCALE_DTYPES,
    BlockScaled,
    NonFiniteError,
    check_scale_format,
    count_nans,
    describe_non_finite,
    e8m0_of,
    empty_block_scaled,
    scale_shape,
)
from nemo_fp8rl.fp8.delta import Delta
from nemo_fp8rl.fp8.formats import FP8, NVFP4, Format
from nemo_fp8rl.fp8.kernels.matrices import Matrices, Stack
from nemo_fp8rl.fp8.kernels.reference import encode_scale
from nemo_fp8rl.fp8.names import Block, KernelName, ScaleFormat, ScaleRule

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.no_grad()
def quantize_blockwise(
    x: Stack,
    *,
    format: Format = FP8,
    block: Block | None = None,
    scale_format: ScaleFormat = "pow2",
    encode: Tensor | None = None,
    kernel: KernelName = "auto",
    out: BlockScaled | None = None,
    check: bool = True,
) -> BlockScaled:
    """Quantize with one scale per block, by the formulas of `kernels/reference.py`.

    x:      bf16, fp16 or fp32, any strides; [N, K], or [E, N, K] for experts, whose blocks stay within one expert; or
            separate matrices, for which one call of a kernel is enough
    block:  by default the format's block of a weight
    encode: float32 [] or [E], the factors of a format with a global scale, which is 1 / encode; by default those of
            each matrix's largest value
    kernel: the implementation; all give the same bytes
    out:    tensors to fill and return instead of new ones; they must not share memory with x. Those of a stack may lie
            in a larger stack, as gate in vLLM's w13; each matrix is then a call of a kernel
    check:  False skips the search for values that are not finite, which waits for a GPU; the caller can then search
            scale_inv, which is NaN for a block with such a value
    Raises: NonFiniteError, with the count of such values and the index of the first, of separate matrices in the first
            that has one; `out` then has no meaning. Transformer Engine would drop a NaN silently.
    """
    block = block or format.weight_block
    if out is not None and _lies_in_larger_stack(out):
        for i in range(x.size(0)):
            of_matrix = encode if encode is None or not encode.dim() else encode[i]
            part = replace(
                out,
                data=out.data[i],
                scale_inv=out.scale_inv[i],
                global_scale=None if out.global_scale is None else out.global_scale[i],
            )
            how: dict[str, Any] = {"format": format, "block": block, "scale_format": scale_format, "kernel": kernel}
            try:
                quantize_blockwise(x[i], encode=of_matrix, out=part, check=check, **how)
            except NonFiniteError as error:
                raise NonFiniteError(str(error), i) from None
        return out
    x3, out = _check_and_allocate(x, format, block, scale_format, out)
    data, scale_inv = _as_stack(out.data), _as_stack(out.scale_inv)
    if format.element == "e4m3":
        written = scale_inv if format.scale == "float32" else scale_inv.new_empty(scale_inv.shape, dtype=torch.float32)
        kernels.load(kernel, x.device.type).quantize(x3, block, _rule(format, scale_format), data, written)
        if format.scale == "e8m0":
            scale_inv.copy_(e8m0_of(written))
    else:
        factors = _set_global_scale(x3, encode, scale_format, out)
        flush = scale_format == "pow2"
        kernels.load_fp4(kernel, x.device.type).quantize_fp4(x3, block, factors, flush, data, scale_inv)
    if check:
        _refuse_non_finite(x, out)
    return out


@torch.no_grad()
def quantize_delta(
    x: Stack,
    base: Tensor,
    *,
    format: Format = FP8,
    block: Block | None = None,
    scale_format: ScaleFormat = "pow2",
    encode: Tensor | None = None,
    kernel: KernelName = "auto",
    out: BlockScaled | None = None,
) -> tuple[BlockScaled, Delta | None]:
    """Quantize as `quantize_blockwise` does, and return the delta that turns `base` into the new bytes.

    The delta is None when more than `delta.MAX_CHANGED` of the bytes differ.

    base: bytes of the previous version, as the format stores x, contiguous; not written, unless `base` is out.data,
          which is the fastest
    """
    block, dtype = block or format.weight_block, DATA_DTYPES[format.element]
    shape = format.data_shape(tuple(x.shape))
    if base.dtype is not dtype or base.shape != shape or not base.is_contiguous() or base.device != x.device:
        raise ValueError(
            f"the base of a delta must be contiguous {dtype} {list(shape)} on {x.device}, "
            f"got {base.dtype} {list(base.shape)} on {base.device}"
        )
    if format.element != "e4m3" or format.scale != "float32":
        old = base.clone() if out is not None and base.data_ptr() == out.data.data_ptr() else base
        new = quantize_blockwise(
            x, format=format, block=block, scale_format=scale_format, encode=encode, kernel=kernel, out=out
        )
        return new, Delta.between(old, new.data)
    x3, out = _check_and_allocate(x, format, block, scale_format, out)
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


@torch.no_grad()
def quantize_tokens_fp4(x: Tensor, scale_format: ScaleFormat = "pow2") -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x [M, K] to E2M1 in blocks of 1x16 with a global scale for each row, as `fake_quantize_tokens` does.

    It does not search for values that are not finite. Returns packed data, uint8 [M, K/2], scales, E4M3 [M, K/16], and
    the factors `encode` of the rows, float32 [M].
    """
    block = NVFP4.line_block
    _check_input(x, block, scale_format)
    out = empty_block_scaled((1, *x.shape), NVFP4, block, x.device)
    encode = encode_scale(x.abs().amax(1), scale_format)
    kernel = kernels.load_fp4("auto", x.device.type)
    kernel.quantize_fp4(x.unsqueeze(0), block, encode.unsqueeze(0), False, out.data, out.scale_inv)
    return out.data[0], out.scale_inv[0], encode


def fake_quantize(
    x: Tensor,
    *,
    format: Format = FP8,
    block: Block,
    scale_format: ScaleFormat = "pow2",
    encode: Tensor | None = None,
    flush: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `quantize_blockwise(x).dequantize(dtype)` of x [N, K], in one fast pass without storage of the codes.

    A block that holds a value that is not finite becomes NaN.

    encode: as in `quantize_blockwise`, or float32 [N], one factor per row
    flush:  see `kernels.reference.quantize_fp4`; of weights
    dtype:  of the result, by default x's
    """
    check_scale_format(scale_format)
    x, dtype = x.detach(), dtype or x.dtype
    if format.element == "e4m3":
        return kernels.load_emulation(x.device.type)(x, block, _rule(format, scale_format), dtype)
    encode = encode_scale(largest_magnitude(x), scale_format) if encode is None else encode
    return kernels.load_fp4_emulation(x.device.type)(x, block, encode.reshape(-1), flush, dtype)


def fake_quantize_tokens(
    x: Tensor, format: Format, scale_format: ScaleFormat = "pow2", dtype: torch.dtype | None = None
) -> Tensor:
    """Return the values of an activation x [M, K] that a matmul sums over K, as `fake_quantize` does.

    A token has a global scale of its own where the format has one, so that its values do not depend on other tokens. An
    activation that the format leaves alone comes back in `dtype`.
    """
    x, dtype = x.detach(), dtype or x.dtype
    if format.token_block is None:
        return x.to(dtype)
    if format.has_global:
        check_scale_format(scale_format)
        return kernels.load_fp4_emulation(x.device.type)(x, format.token_block, scale_format, False, dtype)
    return fake_quantize(x, format=format, block=format.token_block, scale_format=scale_format, dtype=dtype)


def largest_magnitude(x: Stack) -> Tensor:
    """Return the largest magnitude of each matrix of x [(E,) N, K], [] or [E] in x's dtype; NaN where a value is."""
    if isinstance(x, Matrices) or x.dim() == 3:
        of_matrices = [largest_magnitude(matrix) for matrix in x]
        return torch.stack(of_matrices) if of_matrices else torch.empty(0, dtype=x.dtype, device=x.device)
    if not x.numel():
        return x.new_zeros(())
    smallest, largest = x.detach().aminmax()  # without the copy of x that `x.abs()` makes
    return torch.maximum(-smallest, largest)


def _rule(format: Format, scale_format: ScaleFormat) -> ScaleRule:
    return "e8m0" if format.scale == "e8m0" else scale_format


def _set_global_scale(x: Stack, encode: Tensor | None, scale_format: ScaleFormat, out: BlockScaled) -> Tensor:
    """Return the factors, float32 [E, 1], of x [E, N, K], and store their inverses in `out`."""
    assert out.global_scale is not None
    if encode is None:
        encode = encode_scale(largest_magnitude(x), scale_format)
    factors = encode.to(x.device, torch.float32).reshape(-1).expand(x.size(0))
    out.global_scale.copy_(torch.div(torch.ones_like(factors), factors).view(out.global_scale.shape))
    return factors.unsqueeze(1).contiguous()


def _check_and_allocate(
    x: Stack, format: Format, block: Block, scale_format: ScaleFormat, out: BlockScaled | None
) -> tuple[Stack, BlockScaled]:
    """Return x as [E, N, K], and `out`, or new tensors, of the right shapes."""
    _check_input(x, block, scale_format)
    shape = scale_shape(x.shape, block)
    if out is None:
        out = empty_block_scaled(tuple(x.shape), format, block, x.device)
    for name, tensor, dtype, size in (
        ("data", out.data, DATA_DTYPES[format.element], format.data_shape(tuple(x.shape))),
        ("scale_inv", out.scale_inv, SCALE_DTYPES[format.scale], shape),
    ):
        if tensor.dtype is not dtype or tensor.shape != size or tensor.device != x.device or not tensor.is_contiguous():
            raise ValueError(
                f"out.{name} must be contiguous {dtype} {list(size)} on {x.device}, "
                f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            )
    if out.block != block:
        raise ValueError(f"out is for blocks of {out.block}, not of {block}")
    if out.format != format:
        raise ValueError(f"out is for {out.format.name}, not for {format.name}")
    return x if isinstance(x, Matrices) else _as_stack(x), out


def _lies_in_larger_stack(out: BlockScaled) -> bool:
    tensors = out.data, out.scale_inv
    return out.data.dim() == 3 and len(out.data) > 0 and not all(x.is_contiguous() for x in tensors)


def _check_input(x: Stack, block: Block, scale_format: ScaleFormat) -> None:
    if x.dim() not in (2, 3):
        raise ValueError(f"a matrix [N, K] or a stack of them [E, N, K] is quantized, got shape {list(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"{', '.join(map(str, DTYPES))} is quantized, got {x.dtype}")
    check_scale_format(scale_format)
    if min(block) < 1:
        raise ValueError(f"a block has at least one row and one column, got {block}")


def _as_stack(x: Tensor) -> Tensor:
    return x if x.dim() == 3 else x.unsqueeze(0)


def has_nan_scale(scale_inv: Tensor) -> bool:
    """Return whether a scale is NaN, the kernels' mark of a block with a value that is not finite."""
    if scale_inv.dtype is torch.uint8:
        return bool((scale_inv == E8M0_NAN).any())
    if scale_inv.dtype is E4M3:
        return bool(count_nans(scale_inv))
    return math.isnan(float(scale_inv.sum()))  # scales are not negative, so nothing else makes the sum NaN


def _refuse_non_finite(x: Stack, out: BlockScaled) -> None:
    if not has_nan_scale(out.scale_inv):
        return
    if isinstance(x, Matrices):
        i = next(i for i, scale_inv in enumerate(out.scale_inv) if has_nan_scale(scale_inv))
        raise NonFiniteError(describe_non_finite(x[i]), i)
    raise NonFiniteError(describe_non_finite(x))
