"""Quantize and dequantize in one pass, without E4M3 storage: the operands of the emulated matmuls.

torch's CPU casts to and from E4M3 are scalar; rounding in float32 arithmetic gives the same value several times faster.
For a value of exponent e, adding and subtracting 1.5 * 2^(e+20) leaves three mantissa bits under round-to-nearest-even;
clamping e at -6 gives E4M3's subnormals. A few blocks of rows are converted at a time, so that the temporaries stay in
the cache. `tests/fp8` checks that the result equals `reference` to the bit.
"""

import torch
from torch import Tensor

from nemo_fp8rl.fp8.block_scaled import E4M3_MAX, e2m1_decode
from nemo_fp8rl.fp8.kernels.reference import (
    FLOAT32_EXPONENT_BITS,
    block_scale,
    e2m1_codes,
    encode_scale,
    fp4_scales,
    from_blocks,
    to_blocks,
)
from nemo_fp8rl.fp8.names import Block, ScaleFormat, ScaleRule

MIN_NORMAL_EXPONENT = (127 - 6) << 23
MANTISSA_SHIFT = (23 - 3) << 23
CHUNK_VALUES = 1 << 18
"""Values converted at a time: one MiB of float32, so that the temporaries stay in the cache and reuse their pages."""


def round_to_e4m3(v: Tensor) -> Tensor:
    """Round to the nearest E4M3 value, ties to even, as float32. Equals v.to(float8_e4m3fn).float().

    v: float32, |v| <= 448
    """
    exponent = v.view(torch.int32).bitwise_and(FLOAT32_EXPONENT_BITS).clamp_(min=MIN_NORMAL_EXPONENT)
    magic = exponent.add_(MANTISSA_SHIFT).view(torch.float32).mul_(1.5)
    return (v + magic).sub_(magic).copysign_(v)  # a negative value that rounds to zero keeps its sign, as in E4M3


def quantize_dequantize(x: Tensor, block: Block, rule: ScaleRule, dtype: torch.dtype) -> Tensor:
    """Return the values that `reference.quantize` stores for x [N, K], as [N, K] in `dtype`.

    E4M3 times a power of two is exact in bfloat16, so with pow2 scales `dtype` may be bfloat16 without loss.
    """
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    rows = block[0] * max(1, CHUNK_VALUES // (block[0] * max(1, x.size(1))))
    for start in range(0, x.size(0), rows):
        part = x[None, start : start + rows]
        blocks = to_blocks(part, block)
        scale = block_scale(blocks, x.dtype, rule)
        values = round_to_e4m3((blocks * scale).clamp_(-E4M3_MAX, E4M3_MAX)).mul_(1.0 / scale)
        out[start : start + rows] = from_blocks(values, part.shape)[0]
    return out


def quantize_dequantize_fp4(
    x: Tensor, block: Block, encode: Tensor | ScaleFormat, flush: bool, dtype: torch.dtype
) -> Tensor:
    """Return the values that `reference.quantize_fp4` stores for x [N, K], as [N, K] in `dtype`.

    encode: float32 [1], or [N], one factor per row, with blocks of one row; or the format of the global scale, for
            which each row takes the factor of its own largest value
    """
    if isinstance(encode, str):
        encode = encode_scale(x.abs().amax(1), encode) if x.size(1) else torch.ones(x.size(0), device=x.device)
    blocks = to_blocks(x[None], block)
    scale, inverse = fp4_scales(blocks, encode[None], flush)
    decode = torch.div(torch.ones_like(encode), encode)[None, :, None, None, None]
    elements = e2m1_decode(e2m1_codes(blocks * scale))
    return from_blocks(elements * (inverse.float() * decode), x[None].shape)[0].to(dtype)
