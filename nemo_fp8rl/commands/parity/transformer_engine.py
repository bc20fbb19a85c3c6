"""Transformer Engine's blockwise quantizer in integer arithmetic, without torch's division, rounding or FP8 cast.

Our contract is this same formula, so an answer from the same torch operations would prove nothing. Here amax is found
on bit patterns, 448 / amax is a long division of integers rounded half to even, E4M3 bytes come from shifts, and the
two roundings left (x * scale and 1 / scale to float32) are taken from float64, which holds the first exactly and has
more than twice the digits that the second needs.
"""

import numpy as np
import torch
from torch import Tensor

from nemo_fp8rl.fp8 import Block, ScaleFormat
from nemo_fp8rl.fp8.format import E4M3, E4M3_MAX, BlockScaled

MAGNITUDE = 0x7FFFFFFF
FLOAT32_BIAS, E4M3_BIAS = 127, 7
DROPPED = 23 - 3
"""Mantissa bits of float32 that E4M3 lacks."""
LONG_DIVISION = 45
"""7 << 45 over a 24-bit integer has 24 bits, or one more."""


def quantize(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
    """TransformerEngine common/recipe/recipe_common.cuh, compute_scale_from_amax, and the kernels that call it.

    amax over the values that exist in the block, no floor (epsilon 0); scale = 448 / amax, correctly rounded; 1 where
    amax is 0; where it overflows, the largest value of the dtype of x; mantissa masked off for pow2; scale_inv =
    1 / scale. x must be finite.
    """
    (n, k), (b0, b1) = x.shape, block
    values = x.float().numpy()
    padded = np.pad(values, ((0, -n % b0), (0, -k % b1)))
    blocks = padded.reshape(padded.shape[0] // b0, b0, padded.shape[1] // b1, b1)
    amax = (blocks.view(np.int32) & MAGNITUDE).max(axis=(1, 3)).view(np.float32)
    scale = _scale(amax.astype(np.float64), torch.finfo(x.dtype).max)
    if scale_format == "pow2":
        scale = np.ldexp(0.5, np.frexp(scale)[1])
    spread = scale.repeat(b0, 0)[:n].repeat(b1, 1)[:, :k]
    with np.errstate(over="ignore"):
        product = (values * spread).astype(np.float32)
    data = torch.from_numpy(e4m3_bytes(product)).view(E4M3)
    return BlockScaled(data, torch.from_numpy((1 / scale).astype(np.float32)), block)


def _scale(amax: np.ndarray, largest: float) -> np.ndarray:
    """float64 amax, each a float32 -> 448 / amax as float32 has it, in float64."""
    fraction, exponent = np.frexp(np.where(amax > 0, amax, E4M3_MAX))
    divisor = np.ldexp(fraction, 24).astype(np.int64)  # amax = divisor * 2^(exponent - 24)
    shift = LONG_DIVISION - (divisor << 24 <= 7 << LONG_DIVISION)  # so that the quotient has 24 bits
    quotient, rest = np.divmod(np.left_shift(7, shift), divisor)
    quotient += (2 * rest > divisor) | ((2 * rest == divisor) & (quotient % 2 == 1))
    scale = np.ldexp(quotient.astype(np.float64), 6 + 24 - exponent - shift)
    scale = np.where(scale > np.finfo(np.float32).max, largest, scale)
    return np.where(amax > 0, scale, 1.0)


def e4m3_bytes(values: np.ndarray) -> np.ndarray:
    """float32 -> uint8 of the same shape: E4M3 bit patterns, nearest, ties to even, saturating at 448."""
    bits = values.view(np.int32)
    magnitude = np.minimum(bits & MAGNITUDE, np.float32(E4M3_MAX).view(np.int32))
    exponent = (magnitude >> 23) - FLOAT32_BIAS
    normal = _shifted(magnitude, DROPPED) - ((FLOAT32_BIAS - E4M3_BIAS) << 3)
    significand = (magnitude & 0x7FFFFF) | 0x800000
    tiny = _shifted(significand, np.clip(14 - exponent, 1, 26))  # in steps of 2^-9, the smallest E4M3 value
    code = np.where(exponent >= 1 - E4M3_BIAS, normal, tiny)
    return (code + 128 * (bits < 0)).astype(np.uint8)


def _shifted(integers: np.ndarray, places: int | np.ndarray) -> np.ndarray:
    """integers / 2^places, rounded half to even."""
    odd = (integers >> places) & 1
    return (integers + (1 << (places - 1)) - 1 + odd) >> places
