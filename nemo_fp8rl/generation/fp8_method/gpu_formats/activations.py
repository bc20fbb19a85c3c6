"""Quantized activations for the kernels, each as one operation, as torch.compile needs it."""

import torch
from torch import Tensor

from nemo_fp8rl.fp8 import FORMATS, MXFP8, quantize_blockwise, quantize_tokens_fp4
from nemo_fp8rl.fp8.block_scaled import E4M3, e2m1_values
from nemo_fp8rl.generation.fp8_method.gpu_formats.derived import SWIZZLED_COLUMNS, SWIZZLED_ROWS, swizzle


@torch.library.custom_op("nemo_fp8rl::round_activations", mutates_args=())
def round_activations(x: Tensor, format: str) -> Tensor:
    """Return the values of x [M, K], bf16, after quantization in a format with activations; bf16 holds them."""
    if FORMATS[format].element == "e4m3":
        return quantize_blockwise(x, format=MXFP8, block=MXFP8.token_block, check=False).dequantize(x.dtype)
    data, scale_inv, encode = quantize_tokens_fp4(x)
    scales = scale_inv.float() * torch.reciprocal(encode).unsqueeze(1)
    return (e2m1_values(data).unflatten(1, (-1, 16)) * scales.unsqueeze(2)).flatten(1).to(x.dtype)


@round_activations.register_fake
def _(x: Tensor, format: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("nemo_fp8rl::quantize_mxfp8", mutates_args=())
def quantize_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize x [M, K] to E4M3 [M, K] and swizzled E8M0 scales, uint8 in one dimension."""
    quantized = quantize_blockwise(x, format=MXFP8, block=MXFP8.token_block, check=False)
    return quantized.data, swizzle(quantized.scale_inv).flatten()


@quantize_mxfp8.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = _swizzled_shape(x, 32)
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty((rows * columns,), dtype=torch.uint8)


@torch.library.custom_op("nemo_fp8rl::quantize_nvfp4", mutates_args=())
def quantize_nvfp4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize x [M, K] to E2M1, uint8 [M, K/2], swizzled E4M3 scales, and global scales of rows, x's dtype [M, 1].

    The global scales are powers of two, which bfloat16 holds.
    """
    data, scale_inv, encode = quantize_tokens_fp4(x)
    return data, swizzle(scale_inv), torch.reciprocal(encode).to(x.dtype).unsqueeze(1)


@quantize_nvfp4.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    m, k = x.shape
    scales = x.new_empty(_swizzled_shape(x, 16), dtype=E4M3)
    return x.new_empty((m, k // 2), dtype=torch.uint8), scales, x.new_empty((m, 1))


def _swizzled_shape(x: Tensor, block: int) -> tuple[int, int]:
    m, k = x.shape
    columns = -(-k // block)
    return -(-m // SWIZZLED_ROWS) * SWIZZLED_ROWS, -(-columns // SWIZZLED_COLUMNS) * SWIZZLED_COLUMNS
