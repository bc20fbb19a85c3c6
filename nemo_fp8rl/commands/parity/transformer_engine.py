"""Transformer Engine's quantizers in integer arithmetic, without torch's division, rounding or casts.

Our contract is the same formulas, so a result of the same torch operations would prove nothing. This module finds amax
on bit patterns, computes 448 / amax by a long division of integers rounded half to even, and makes the bytes of E4M3
and E2M1 by shifts. Other roundings to float32 are taken from float64, which represents a product exactly and has more
than twice the digits that a quotient needs.
"""

import math

import numpy as np
import torch
from torch import Tensor

from nemo_fp8rl.fp8 import MXFP8, NVFP4, Block, ScaleFormat
from nemo_fp8rl.fp8.block_scaled import E2M1_MAX, E4M3, E4M3_MAX, BlockScaled

MAGNITUDE = 0x7FFFFFFF
FLOAT32_BIAS = 127
FLOAT32_MAX = float(np.finfo(np.float32).max)
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
    values = x.float().numpy()
    amax = _amax(values, block)
    scale = _scale(amax, torch.finfo(x.dtype).max)
    if scale_format == "pow2":
        scale = np.ldexp(0.5, np.frexp(scale)[1])
    data = torch.from_numpy(e4m3_bytes(_scaled(values, scale, block))).view(E4M3)
    return BlockScaled(data, torch.from_numpy((1 / scale).astype(np.float32)), block)


def mxfp8(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
    """Quantize to MXFP8 as Transformer Engine does.

    The scale is the smallest power of two that is not below amax * fl(1/448), a float32 product; 2^-127 if amax is 0.

    x:      finite values
    Source: TransformerEngine common/util/ptx_arch_spec.cuh, float_to_e8m0, and common/cast/mxfp8; the reference in
            tests/pytorch/test_mxfp8_2d_quantize.py gives the same
    """
    values = x.float().numpy()
    ratio = _rounded(_amax(values, block) * _rounded(1 / E4M3_MAX))
    fraction, exponent = np.frexp(ratio)  # ratio = fraction * 2^exponent, with a fraction of 0.5 ... 1
    exponent = np.where(ratio > 0, np.maximum(exponent - (fraction == 0.5), -FLOAT32_BIAS), -FLOAT32_BIAS)
    product = _scaled(values, np.ldexp(1.0, -exponent), block)
    data = torch.from_numpy(e4m3_bytes(product)).view(E4M3)
    return BlockScaled(data, torch.from_numpy((exponent + FLOAT32_BIAS).astype(np.uint8)), block, MXFP8)


def nvfp4(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
    """Quantize to NVFP4 as Transformer Engine does, with one global scale.

    It has no pow2 global scales; these are what it makes if the amax that it is handed is 2688 times a power of two.

    x:      finite values
    Source: TransformerEngine common/cast/nvfp4/core_nvfp4.cuh; transformer_engine.pytorch.custom_recipes
            .reference_nvfp4, NVFP4QuantizerRef
    """
    values = x.float().numpy()
    amax = _amax(values, block)
    largest = float(amax.max())
    encode = min(float(_rounded(E4M3_MAX * E2M1_MAX / largest)), FLOAT32_MAX) if largest else 0.0
    encode = encode or 1.0
    if scale_format == "pow2":
        encode = math.ldexp(0.5, math.frexp(encode)[1])
    decode = _rounded(1 / encode)
    scale_bytes = e4m3_bytes(_rounded(amax * _rounded(encode * _rounded(1 / E2M1_MAX))).astype(np.float32))
    scales = torch.from_numpy(scale_bytes).view(E4M3)
    with np.errstate(divide="ignore"):
        multiplier = np.minimum(_rounded(1 / _rounded(scales.double().numpy() * decode)), FLOAT32_MAX)
    codes = e2m1_codes(_scaled(values, multiplier, block))
    data = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
    return BlockScaled(data, scales, block, NVFP4, torch.tensor(float(decode)))


def _amax(values: np.ndarray, block: Block) -> np.ndarray:
    """Return the largest magnitude of each block of float32 values [N, K], as float64."""
    (n, k), (b0, b1) = values.shape, block
    padded = np.pad(values, ((0, -n % b0), (0, -k % b1)))
    blocks = padded.reshape(padded.shape[0] // b0, b0, padded.shape[1] // b1, b1)
    return (blocks.view(np.int32) & MAGNITUDE).max(axis=(1, 3)).view(np.float32).astype(np.float64)


def _scaled(values: np.ndarray, scale: np.ndarray, block: Block) -> np.ndarray:
    """Return the products, float32 [N, K], of values [N, K] and the multiplier of their block."""
    (n, k), (b0, b1) = values.shape, block
    with np.errstate(over="ignore"):
        return (values * scale.repeat(b0, 0)[:n].repeat(b1, 1)[:, :k]).astype(np.float32)


def _rounded(values: np.ndarray | float) -> np.ndarray:
    """Return float64 values, rounded to float32."""
    with np.errstate(over="ignore"):
        return np.asarray(values).astype(np.float32).astype(np.float64)


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
    return _short_float(values, mantissa_bits=3, bias=7, largest=E4M3_MAX, sign=1 << 7)


def e2m1_codes(values: np.ndarray) -> np.ndarray:
    """Return the E2M1 bits of float32 values as uint8: nearest, ties to even, saturated at 6."""
    return _short_float(values, mantissa_bits=1, bias=1, largest=E2M1_MAX, sign=1 << 3)


def _short_float(values: np.ndarray, mantissa_bits: int, bias: int, largest: float, sign: int) -> np.ndarray:
    bits = values.view(np.int32)
    magnitude = np.minimum(bits & MAGNITUDE, np.float32(largest).view(np.int32))
    exponent = (magnitude >> 23) - FLOAT32_BIAS
    dropped = 23 - mantissa_bits
    normal = _shift_right(magnitude, dropped) - ((FLOAT32_BIAS - bias) << mantissa_bits)
    significand = (magnitude & 0x7FFFFF) | 0x800000
    tiny = _shift_right(significand, np.clip(dropped + 1 - bias - exponent, 1, 26))  # in steps of the smallest value
    code = np.where(exponent >= 1 - bias, normal, tiny)
    return (code + sign * (bits < 0)).astype(np.uint8)


def _shift_right(integers: np.ndarray, places: int | np.ndarray) -> np.ndarray:
    """Return integers / 2^places, rounded half to even."""
    odd = (integers >> places) & 1
    return (integers + (1 << (places - 1)) - 1 + odd) >> places
