"""Transformer Engine's blockwise quantizer in integer arithmetic, without torch's division, rounding or FP8 cast.

Our contract is the same formula, so a result of the same torch operations would prove nothing. This module finds amax
on bit patterns, computes 448 / amax by a long division of integers rounded half to even, and makes E4M3 bytes by
shifts. The other two roundings (x * scale and 1 / scale to float32) are taken from float64, which represents the first
product exactly and has more than twice the digits that the second needs.
"""

import numpy as np
import torch
from torch import Tensor

from nemo_fp8rl.fp8 import Block, ScaleFormat
from nemo_fp8rl.fp8.block_scaled import E4M3, E4M3_MAX, BlockScaled

MAGNITUDE = 0x7FFFFFFF
FLOAT32_BIAS, E4M3_BIAS = 127, 7
DROPPED = 23 - 3
"""Mantissa bits of float32 that E4M3 lacks."""
LONG_DIVISION = 45
"""7 << 45 over a 24-bit integer has 24 bits, or one more."""


def quantize(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
    """Quantize as Transformer Engine does.

    amax is taken over the values that exist in the block, without a floor (epsilon 0); scale = 448 / amax, correctly
    rounded; 1 if amax is 0; the largest value of x's dtype if the quotient overflows; mantissa masked off for pow2;
    scale_inv = 1 / scale.

    x:      finite values
    Source: TransformerEngine common/recipe/recipe_common.cuh, compute_scale_from_amax, and the kernels that call it
    """
    (n, k), (b0, b1) = x.shape, block
    values = x.float().numpy()
    padded = np.pad(values, ((0, -n % b0), (0, -k % b1)))
    blocks = padded.reshape(padded.shape[0] // b0, b0, padded.shape[1] // b1, b1)
    amax = (blocks.view(np.int32) & MAGNITUDE).max(axis=(1, 3)).view(np.float32)
    scale = _scale(amax.astype(np.float64), torch.finfo(x.dtype).max)
    if scale_format == "pow2":
        scale = np.ldexp(0.5, np.frexp(scale)[1])
    scale_of_value = scale.repeat(b0, 0)[:n].repeat(b1, 1)[:, :k]
    with np.errstate(over="ignore"):
        product = (values * scale_of_value).astype(np.float32)
    data = torch.from_numpy(e4m3_bytes(product)).view(E4M3)
    return BlockScaled(data, torch.from_numpy((1 / scale).astype(np.float32)), block)


def _scale(amax: np.ndarray, largest: float) -> np.ndarray:
    """Return 448 / amax, rounded to float32, as float64. amax: float32 values as float64."""
    fraction, exponent = np.frexp(np.where(amax > 0, amax, E4M3_MAX))
    divisor = np.ldexp(fraction, 24).astype(np.int64)  # amax = divisor * 2^(exponent - 24)
    shift = LONG_DIVISION - (divisor << 24 <= 7 << LONG_DIVISION)  # so that the quotient has 24 bits
    quotient, rest = np.divmod(np.left_shift(7, shift), divisor)
    quotient += (2 * rest > divisor) | ((2 * rest == divisor) & (quotient % 2 == 1))
    scale = np.ldexp(quotient.astype(np.float64), 6 + 24 - exponent - shift)
    scale = np.where(scale > np.finfo(np.float32).max, largest, scale)
    return np.where(amax > 0, scale, 1.0)


def e4m3_bytes(values: np.ndarray) -> np.ndarray:
    """Return the E4M3 bits of float32 values as uint8: nearest, ties to even, saturated at 448."""
    bits = values.view(np.int32)
    magnitude = np.minimum(bits & MAGNITUDE, np.float32(E4M3_MAX).view(np.int32))
    exponent = (magnitude >> 23) - FLOAT32_BIAS
    normal = _shift_right(magnitude, DROPPED) - ((FLOAT32_BIAS - E4M3_BIAS) << 3)
    significand = (magnitude & 0x7FFFFF) | 0x800000
    tiny = _shift_right(significand, np.clip(14 - exponent, 1, 26))  # in steps of 2^-9, the smallest E4M3 value
    code = np.where(exponent >= 1 - E4M3_BIAS, normal, tiny)
    return (code + 128 * (bits < 0)).astype(np.uint8)


def _shift_right(integers: np.ndarray, places: int | np.ndarray) -> np.ndarray:
    """Return integers / 2^places, rounded half to even."""
    odd = (integers >> places) & 1
    return (integers + (1 << (places - 1)) - 1 + odd) >> places
