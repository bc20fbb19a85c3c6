"""The specification of the contract, in torch; every other kernel must equal it to the bit. All is float32 arithmetic.

FP8, for each block of x:

    amax      = max |x|                               incomplete blocks at the edges are padded with zeros
    scale     = 448 / amax                            1 if amax is 0; the largest finite value of x's dtype if the
                                                      quotient overflows
    scale     = scale with its mantissa set to zero   only with pow2 scales: the largest power of two not above it
    q         = round(x * scale)                      to E4M3: nearest, ties to even, saturated at +-448
    scale_inv = 1 / scale                             x is approximately q * scale_inv

This is Transformer Engine's arithmetic (common/recipe/recipe_common.cuh, recipe Float8BlockScaling), with one
difference: where amax is NaN or infinite, scale_inv is NaN, so that the caller can refuse the tensor, while Transformer
Engine continues with scale 1. That holds for every format.

MXFP8 differs in the scale, which is rounded up to a power of two (Transformer Engine, ptx_arch_spec.cuh; vLLM;
ModelOpt). The OCP specification rounds down and saturates elements, and is refused:

    scale_inv = the smallest power of two not below amax * fl(1/448), at least 2^-127;  2^-127 if amax is 0
    scale     = 1 / scale_inv

NVFP4, for a tensor or a row with the factor `encode` = 2688 / its amax, or a power of two below (2688 = 6 * 448;
Transformer Engine, core_nvfp4.cuh, custom_recipes/reference_nvfp4.py):

    scale_inv = round(amax * (encode * fl(1/6)))      to E4M3: nearest, ties to even, saturated at 448
    scale     = 1 / (scale_inv * (1 / encode))        the largest float32 if it overflows
    q         = round(x * scale)                      to E2M1: nearest, ties to even, saturated at +-6

With `flush` a block whose scale_inv is below 2^-6, E4M3's smallest normal value, becomes zeros with scale_inv 0: Marlin
(vLLM) cannot read such scales, and loses the block silently.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_fp8rl.fp8.block_scaled import E2M1_MAX, E4M3, E4M3_MAX
from nemo_fp8rl.fp8.kernels.compare_bytes import make_quantize_delta
from nemo_fp8rl.fp8.kernels.matrices import Stack, as_tensor
from nemo_fp8rl.fp8.names import Block, ScaleFormat, ScaleRule

FLOAT32_EXPONENT_BITS = 0x7F800000
FLOAT32_MAX = torch.finfo(torch.float32).max
MIN_NORMAL_E4M3 = 2.0**-6
E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""The middles between neighbouring values of E2M1; at a middle the even code is taken."""


def quantize(x: Stack, block: Block, rule: ScaleRule, data: Tensor, scale_inv: Tensor) -> None:
    """Quantize x to E4M3 in `data` and `scale_inv`.

    x:            bf16, fp16 or fp32 [E, N, K]
    block:        (b0, b1), rows and columns that share a scale
    rule:         how scales are chosen
    data:         output, E4M3 [E, N, K]
    scale_inv:    output, float32 [E, ceil(N/b0), ceil(K/b1)]
    """
    blocks = to_blocks(as_tensor(x), block)
    scale = block_scale(blocks, x.dtype, rule)
    q = (blocks * scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    data.copy_(from_blocks(q, x.shape))
    scale_inv.copy_((1.0 / scale)[:, :, 0, :, 0])


quantize_delta = make_quantize_delta(quantize)


def quantize_fp4(x: Stack, block: Block, encode: Tensor, flush: bool, data: Tensor, scale_inv: Tensor) -> None:
    """Quantize x to E2M1 in `data` and `scale_inv`.

    x:            bf16, fp16 or fp32 [E, N, K], K even
    block:        (b0, b1), rows and columns that share a scale
    encode:       float32 [E, 1], one factor per matrix, or [E, N], one per row, with blocks of one row
    flush:        True writes zeros where scale_inv would be below 2^-6
    data:         output, uint8 [E, N, K/2]; the even column is in the low half of a byte
    scale_inv:    output, E4M3 [E, ceil(N/b0), ceil(K/b1)]
    """
    blocks = to_blocks(as_tensor(x), block)
    scale, inverse = fp4_scales(blocks, encode, flush)
    codes = from_blocks(e2m1_codes(blocks * scale), x.shape)
    data.copy_(codes[..., 0::2] | (codes[..., 1::2] << 4))
    scale_inv.copy_(inverse[:, :, 0, :, 0])


def fp4_scales(blocks: Tensor, encode: Tensor, flush: bool) -> tuple[Tensor, Tensor]:
    """Return the multiplier of each block, float32 [E, N/b0, 1, K/b1, 1], and its scale_inv, E4M3 of that shape.

    blocks: float32 [E, N/b0, b0, K/b1, b1]
    encode, flush: as in `quantize_fp4`
    """
    amax = blocks.abs().amax((2, 4), keepdim=True)
    encode = encode[:, :, None, None, None]
    sixth = torch.ones_like(encode).div_(torch.full_like(encode, E2M1_MAX))
    product = (amax * (encode * sixth)).clamp_(max=E4M3_MAX)  # clamp_ keeps NaN
    inverse = product.masked_fill_(~amax.isfinite(), torch.nan).to(E4M3)
    decode = torch.div(torch.ones_like(encode), encode)
    scale = torch.div(torch.ones_like(product), inverse.float() * decode).clamp_(max=FLOAT32_MAX)
    if flush:
        is_lost = inverse.float() < MIN_NORMAL_E4M3
        inverse, scale = inverse.float().masked_fill(is_lost, 0.0).to(E4M3), scale.masked_fill_(is_lost, 0.0)
    return scale, inverse


def encode_scale(amax: Tensor, scale_format: ScaleFormat, headroom: int = 0) -> Tensor:
    """Return the factor `encode` of tensors, or of rows, with these largest magnitudes, float32 of amax's shape.

    headroom: with pow2 scales, binades by which a value may grow before its block scale saturates
    Source: Transformer Engine, core_nvfp4.cuh, compute_global_encode_scaling_factor_FP4
    """
    amax = amax.float()
    encode = torch.div(torch.full_like(amax, E4M3_MAX * E2M1_MAX), amax).clamp_(max=FLOAT32_MAX)
    encode = torch.where((amax == 0) | (encode == 0), 1.0, encode)
    if scale_format == "pow2":
        encode = (encode.view(torch.int32) & FLOAT32_EXPONENT_BITS).view(torch.float32) * 2.0**-headroom
    return encode


def e2m1_codes(values: Tensor) -> Tensor:
    """Return the codes 0 to 15, uint8, of float32 values: nearest, ties to the even code, saturated; signs stay."""
    bounds, magnitude = torch.tensor(E2M1_BOUNDS, dtype=torch.float32, device=values.device), values.abs()
    upper, lower = (torch.searchsorted(bounds, magnitude, right=right) for right in (True, False))
    return (torch.where(upper % 2 == 0, upper, lower) | (torch.signbit(values).long() << 3)).to(torch.uint8)


def block_scale(blocks: Tensor, dtype: torch.dtype, rule: ScaleRule) -> Tensor:
    """Return the multiplier of each block, float32 [E, N/b0, 1, K/b1, 1].

    blocks: float32 [E, N/b0, b0, K/b1, b1]
    dtype:  dtype of the tensor before it was cut into blocks
    """
    amax = blocks.abs().amax((2, 4), keepdim=True)
    if rule == "e8m0":
        return torch.div(torch.ones_like(amax), e8m0_scale_inv(amax))
    # torch.div, not `448 / amax`: torch computes the Python expression as reciprocal() * 448, which rounds twice.
    scale = torch.div(torch.full_like(amax, E4M3_MAX), amax)
    scale = scale.masked_fill_(scale == torch.inf, torch.finfo(dtype).max).masked_fill_(amax == 0, 1.0)
    if rule == "pow2":
        scale = scale.view(torch.int32).bitwise_and_(FLOAT32_EXPONENT_BITS).view(torch.float32)
    return scale.masked_fill_(~amax.isfinite(), torch.nan)


def e8m0_scale_inv(amax: Tensor) -> Tensor:
    """Return the power of two that MXFP8 divides by, as float32; NaN where amax is not finite."""
    ratio = amax * torch.ones_like(amax).div_(E4M3_MAX)
    bits = ratio.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # a subnormal up to 2^-127 has the exponent 0, as 2^-127 itself, which float32 holds as the mantissa 2^22
    rounds_up = (mantissa > 0) & ~((exponent == 0) & (mantissa <= 1 << 22))
    power = ((exponent + rounds_up.int()) << 23).clamp_(min=1 << 22).view(torch.float32)
    return power.masked_fill(~amax.isfinite(), torch.nan)


def to_blocks(x: Tensor, block: Block) -> Tensor:
    """Return x [E, N, K] as float32 [E, N/b0, b0, K/b1, b1], padded with zeros to whole blocks."""
    (experts, n, k), (b0, b1) = x.shape, block
    padded = x.float()
    if n % b0 or k % b1:
        padded = F.pad(padded, (0, -k % b1, 0, -n % b0))
    return padded.reshape(experts, padded.size(1) // b0, b0, padded.size(2) // b1, b1)


def from_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Invert `to_blocks`: [E, N/b0, b0, K/b1, b1] -> [E, N, K] of `shape`, without the padding."""
    experts, a, b0, c, b1 = blocks.shape
    return blocks.reshape(experts, a * b0, c * b1)[:, : shape[1], : shape[2]]
