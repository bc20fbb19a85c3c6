"""The compiled inner loops of E2M1. `loops` explains the use of numba, and the arguments that are not explained here.

A row is converted to one code per byte in a scratch row, and then packed: LLVM makes vector code of both loops. Two
bfloat16 that share a scale are converted together, which is faster, but only in long loops.
"""

import numba as nb
import numpy as np
from numba.extending import overload

from nemo_fp8rl.fp8.kernels.on_cpu.bits import (
    PIECE,
    e2m1,
    e2m1_pair,
    e2m1_value,
    e4m3,
    e4m3_value,
    f32,
    float32,
    power_not_above,
    round_like,
    u8,
    u16,
)
from nemo_fp8rl.fp8.kernels.on_cpu.compiled import jit
from nemo_fp8rl.fp8.kernels.on_cpu.prefetching import prefetch
from nemo_fp8rl.fp8.kernels.on_cpu.scales import repeat, strip_maxima

LARGEST = np.finfo(np.float32).max
SIXTH = f32(1) / f32(6)
E4M3_NAN = 0x7F
GIVEN, FP32, POW2 = 0, 1, 2
"""Where the factor of a row comes from: `encode`, or the row's largest value, in float32 or as a power of two."""


@nb.njit(error_model="numpy")
def line_encode(maxima, source):
    """Return the factor of a row with these bits of its blocks' largest magnitudes, as `reference.encode_scale`."""
    m = maxima[0]
    for j in range(len(maxima)):
        m = max(m, maxima[j])
    amax = float32(m)
    quotient = f32(2688) / amax
    factor = LARGEST if quotient > LARGEST else quotient
    factor = f32(1) if amax == f32(0) or factor == f32(0) else factor
    return power_not_above(factor) if source == POW2 else factor


@jit
def fp4_scales(maxima, encode, flush, scales, inverses, scale_inv):
    """Fill the multipliers `scales`, the E4M3 bytes `scale_inv`, and the values `inverses` that dequantize."""
    decode, sixth = f32(1) / f32(encode), f32(f32(encode) * SIXTH)
    for j in range(len(maxima)):
        amax = float32(maxima[j])
        product = f32(amax * sixth)
        is_nan = (not np.isfinite(amax)) or np.isnan(product)
        inverse = e4m3_value(product)
        quotient = f32(1) / f32(inverse * decode)
        is_lost = flush and inverse < f32(2**-6)
        scale = quotient if quotient < LARGEST else LARGEST
        scales[j] = f32(np.nan) if is_nan else (f32(0) if is_lost else scale)
        inverses[j] = f32(np.nan) if is_nan else (f32(0) if is_lost else f32(inverse * decode))
        scale_inv[j] = u8(E4M3_NAN) if is_nan else (u8(0) if is_lost else e4m3(product))


@jit
def quantize(x, layout, first, end, out, scale_inv, height, width, encode, flush):
    """Quantize strips `first` to `end`, counted through all matrices.

    out:       output, packed codes, bytes [E, N, K/2]
    scale_inv: output, E4M3 bytes [E, strips, blocks]
    encode:    float32 [E, 1], or [E, N] with blocks of one row
    """
    origins, stride = layout
    columns, blocks, strips = 2 * out.shape[2], scale_inv.shape[2], scale_inv.shape[1]
    scratch, maxima, codes = np.empty(columns, x.dtype), np.empty(blocks, x.dtype), np.empty(columns, np.uint8)
    scales, inverses = np.empty(blocks, f32), np.empty(blocks, f32)
    of_columns = np.empty(columns, f32)
    for strip in range(first, end):
        matrix, i = divmod(strip, strips)
        top, bottom = i * height, min(out.shape[1], i * height + height)
        start = origins[matrix] + top * stride
        strip_maxima(x, start, stride, bottom - top, width, scratch, maxima)
        factor = encode[matrix, top if encode.shape[1] > 1 else 0]
        fp4_scales(maxima, factor, flush, scales, inverses, scale_inv[matrix, i])
        by_pairs = height > 1 and width % 2 == 0 and of_bfloat16(x)
        if by_pairs:
            repeat(scales, width // 2, of_columns[: columns // 2])
        elif height > 1:
            repeat(scales, width, of_columns)
        for row in range(top, bottom):
            values, packed = x[start : start + columns], out[matrix, row]
            prefetch(x.ctypes.data + (start + height * stride) * x.itemsize, columns * x.itemsize)
            if by_pairs:
                convert_pairs(values, of_columns, packed)
            else:
                if height > 1:
                    convert_row(values, of_columns, codes)
                else:
                    convert_line(values, scales, width, codes)
                pack(codes, packed)
            start += stride


def of_bfloat16(x):
    """Return whether x holds bits of bfloat16."""


@overload(of_bfloat16)
def _of_bfloat16(x):
    return (lambda x: True) if x.dtype == nb.int16 else (lambda x: False)


@jit
def convert_pairs(x, scales, out):
    """Convert bfloat16 to packed codes, with a scale for each pair of columns."""
    pairs = x.view(np.uint32)
    for k in range(len(out)):
        out[k] = e2m1_pair(pairs[k], scales[k])


@jit
def convert_line(x, scales, width, codes):
    """Convert a row to one code per byte, with a scale for each `width` columns."""
    for j in range(len(scales)):
        scale, k, stop = scales[j], j * width, min(len(x), j * width + width)
        for _ in range((stop - k) // PIECE):
            piece, bytes_ = x[k : k + PIECE], codes[k : k + PIECE]
            for i in range(PIECE):
                bytes_[i] = e2m1(float32(piece[i]) * scale)
            k += PIECE
        for i in range(k, stop):
            codes[i] = e2m1(float32(x[i]) * scale)


@jit
def convert_row(x, scales, codes):
    """Convert a row to one code per byte, with a scale for each column."""
    for k in range(len(x)):
        codes[k] = e2m1(float32(x[k]) * scales[k])


@jit
def pack(codes, out):
    """Pack two codes into a byte, the even column low."""
    pairs = codes.view(np.uint16)
    for k in range(len(out)):
        out[k] = u8(u16(pairs[k] | u16(pairs[k] >> u16(4))))


@jit
def quantize_dequantize(x, layout, first, end, out, height, width, encode, source, flush):
    """Compute the values that `quantize` stores, strips `first` to `end`.

    out:    output, bits [E, N, K] of the values, int16 for bfloat16 or int32 for float32
    source: of the factors; those of the rows themselves need blocks of one row
    """
    origins, stride = layout
    columns, blocks, strips = out.shape[2], -(-out.shape[2] // width), -(-out.shape[1] // height)
    scratch, maxima, unused = np.empty(columns, x.dtype), np.empty(blocks, x.dtype), np.empty(blocks, np.uint8)
    scales, inverses = np.empty(blocks, f32), np.empty(blocks, f32)
    of_columns, inverses_of_columns = np.empty(columns, f32), np.empty(columns, f32)
    for strip in range(first, end):
        matrix, i = divmod(strip, strips)
        top, bottom = i * height, min(out.shape[1], i * height + height)
        start = origins[matrix] + top * stride
        strip_maxima(x, start, stride, bottom - top, width, scratch, maxima)
        factor = encode[matrix, top if encode.shape[1] > 1 else 0] if source == GIVEN else line_encode(maxima, source)
        fp4_scales(maxima, factor, flush, scales, inverses, unused)
        if height > 1:
            repeat(scales, width, of_columns)
            repeat(inverses, width, inverses_of_columns)
        for row in range(top, bottom):
            prefetch(x.ctypes.data + (start + height * stride) * x.itemsize, columns * x.itemsize)
            if height > 1:
                round_trip_row(x[start : start + columns], of_columns, inverses_of_columns, out[matrix, row])
            else:
                round_trip_line(x[start : start + columns], scales, inverses, width, out[matrix, row])
            start += stride


@jit
def round_trip_line(x, scales, inverses, width, out):
    for j in range(len(scales)):
        scale, inverse, k, stop = scales[j], inverses[j], j * width, min(len(x), j * width + width)
        for _ in range((stop - k) // PIECE):
            piece, results = x[k : k + PIECE], out[k : k + PIECE]
            for i in range(PIECE):
                results[i] = round_like(e2m1_value(float32(piece[i]) * scale) * inverse, results[i])
            k += PIECE
        for i in range(k, stop):
            out[i] = round_like(e2m1_value(float32(x[i]) * scale) * inverse, out[i])


@jit
def round_trip_row(x, scales, inverses, out):
    for k in range(len(x)):
        out[k] = round_like(e2m1_value(float32(x[k]) * scales[k]) * inverses[k], out[k])
