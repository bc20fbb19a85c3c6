"""The compiled inner loops of the `cpu` kernel: LLVM through numba, so the user's machine needs no compiler.

A strip (rows of one block's height) is read twice, the second time from the cache: once for the maxima of its columns,
and once to convert it. The scales are repeated to one per column, so that a row is a single long loop; blocks of one
row are converted one after another. Fused and reordered floating-point operations stay off, so every bit equals
`reference`.

The first call on a machine compiles (seconds); `compiled` says where numba then stores the code. `bits` says how values
are passed.
"""

import numba as nb
import numpy as np
from llvmlite import ir
from numba.core.cgutils import get_or_insert_function
from numba.cpython.unsafe.numbers import trailing_zeros
from numba.extending import intrinsic, overload

from nemo_fp8rl.fp8.kernels.on_cpu.bits import (
    PIECE,
    e4m3,
    e4m3_value,
    f32,
    float32,
    i16,
    i32,
    magnitude,
    round_like,
    u8,
    u16,
    u32,
    u64,
)
from nemo_fp8rl.fp8.kernels.on_cpu.compiled import jit
from nemo_fp8rl.fp8.kernels.on_cpu.prefetching import prefetch
from nemo_fp8rl.fp8.kernels.on_cpu.scales import FP32, block_maxima, block_scale, block_scales, repeat, strip_scales

LANES = 32
"""Values of 16 bits that one operation converts."""
ROUND = 14
"""Added before five bits are dropped, the last of which is 0, it rounds to nearest: ties down; with 2 more, ties up."""
AHEAD = 4096
"""Distance in bytes of the prefetch of bytes to compare: the processor's own prefetching is late for them."""
NARROW = 2048
"""Largest row in bytes for which the next strip is prefetched; with longer rows that gains nothing."""


@jit
def convert_row(x, scales, out):
    for k in range(len(x)):
        out[k] = e4m3(float32(x[k]) * scales[k])


def fill_shifts(scales, shifts):
    """Fill `shifts` with the bits of uint16 for `shift_row`, and return whether it can replace `convert_row`."""


@overload(fill_shifts)
def _fill_shifts(scales, shifts):
    def of_bfloat16(scales, shifts):
        usual = True
        for k in range(len(scales)):
            exponent = i32(i32(f32(scales[k]).view(u32) >> u32(23)) - i32(127))
            usual &= exponent <= i32(115)  # above it, and where the scale is NaN, denormal values matter
            shifts[k] = i16(i32(i32(i32(120) - exponent) << i32(8)) - i32(ROUND))
        return usual

    return of_bfloat16 if shifts.dtype == nb.int16 else (lambda scales, shifts: False)


@nb.njit(error_model="numpy")
def e4m3_by_shift(h, shift):
    """Return `e4m3(float32(h) * scale)` in 16-bit arithmetic, for a bfloat16 h.

    The scale must be a power of two that keeps the product at 448 or below. The product is a sum of exponents. `value`
    is then E4M3 with four more mantissa bits; below 2^-6 it is the mantissa of h, which must lose more bits.
    """
    scaled = i16(i16(h & i16(0x7FFF)) - i16(u16(u16(shift) + u16(ROUND)) >> u16(1)))
    value = max(scaled, i16(i16(h & i16(0x7F)) | i16(0x80)))
    excess = u16(min(max(i16(i16(4) - i16(scaled >> i16(7))), i16(3)), i16(14)))  # bits to drop, minus one
    v, half = u16(value), u16(u16(u16(1) << excess) - u16(1))
    odd = u16(u16(u16(v >> excess) >> u16(1)) & u16(1))
    code = u16(u16(u16(u16(v + half) + odd) >> excess) >> u16(1))
    return u8(code | u16(u16(u16(h) >> u16(8)) & u16(0x80)))


@intrinsic
def convert_normal(typing, values, shifts, codes):
    """Convert 128 values at these addresses as `e4m3_by_shift` does, and return whether the result is valid.

    It is not valid if a value is below 2^-6 after the shift. Every normal value loses the same number of bits (five, of
    twice its bits plus ROUND), so no lane shifts by a number of its own, for which AVX2 has no instruction. The code is
    written in vectors, because LLVM's own vector code for such a loop takes half as long again.
    """
    i8s, i16s = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(ir.IntType(16), LANES)

    def code(context, builder, signature, arguments):
        def function(name, *operands, returns=i16s):
            kind = ir.FunctionType(returns, [operand.type for operand in operands])
            return builder.call(get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}i16"), operands)

        def splat(number, kind=i16s):
            return ir.Constant(kind, [number] * LANES)

        def pointer(address, nbytes, kind):
            return builder.inttoptr(builder.add(address, ir.Constant(address.type, nbytes)), kind.as_pointer())

        x, shift, out = arguments
        smallest = splat(0xFFFF)
        for first in range(0, 128, LANES):
            h = builder.load(pointer(x, 2 * first, i16s), align=2)
            value = function("usub.sat", builder.add(h, h), builder.load(pointer(shift, 2 * first, i16s), align=2))
            smallest = function("umin", smallest, value)
            odd = builder.and_(builder.lshr(h, splat(3)), splat(2))  # the last bit that remains
            magnitude = builder.trunc(builder.lshr(builder.add(value, odd), splat(5)), i8s)
            negative = function("smax", function("smin", h, splat(127)), splat(-128))  # with trunc, one instruction
            sign = builder.and_(builder.trunc(negative, i8s), splat(0x80, i8s))
            builder.store(builder.or_(magnitude, sign), pointer(out, first, i8s), align=1)
        least = function("vector.reduce.umin", smallest, returns=ir.IntType(16))
        return builder.icmp_unsigned(">=", least, ir.Constant(least.type, 0x100 + ROUND))

    return nb.boolean(nb.intp, nb.intp, nb.intp), code


@jit
def shift_row(x, shifts, out):
    """Convert a row, 128 values at a time: nearly always all of them are normal."""
    whole = len(x) // 128 * 128
    values, shift, codes = x.ctypes.data, shifts.ctypes.data, out.ctypes.data
    for first in range(0, whole, 128):
        if not convert_normal(values + 2 * first, shift + 2 * first, codes + first):
            for k in range(first, first + 128):
                out[k] = e4m3_by_shift(x[k], shifts[k])
    for k in range(whole, len(x)):
        out[k] = e4m3_by_shift(x[k], shifts[k])


@jit
def quantize(x, layout, first, end, out, scale_inv, height, width, rule, largest, maxima, scales):
    """Quantize strips `first` to `end`, counted through all matrices.

    x:         flat memory
    layout:    (origins, stride of rows): row r of matrix e begins at origins[e] + r * layout[1]
    out:       output, bytes [E, N, K]
    scale_inv: output [E, strips, blocks]
    maxima, scales: scratch, one per column
    """
    if height == 1:
        quantize_lines(x, layout, first, end, out, scale_inv, width, rule, largest)
        return
    origins, stride = layout
    row_bytes = len(scales) * x.itemsize
    for strip in range(first, end):
        matrix, j = divmod(strip, scale_inv.shape[1])
        top, bottom = j * height, min(out.shape[1], j * height + height)
        start = origins[matrix] + top * stride
        matrix_ahead, j_ahead = divmod(strip + 1, scale_inv.shape[1])
        ahead = origins[min(matrix_ahead, len(origins) - 1)] + j_ahead * height * stride
        strip_scales(x, start, stride, bottom - top, width, rule, largest, maxima, scales, scale_inv[matrix, j])
        can_shift = rule != FP32 and fill_shifts(scales, maxima)
        for row in range(top, bottom):
            values = x[start : start + len(scales)]
            if row_bytes <= NARROW and strip + 1 < end:
                prefetch(x.ctypes.data + ahead * x.itemsize, row_bytes)
                ahead += stride
            if can_shift:
                shift_row(values, maxima, out[matrix, row])
            else:
                convert_row(values, scales, out[matrix, row])
            start += stride


@jit
def maximum_of_128(values):
    """Return the largest magnitude of exactly 128 values: a length that the compiler knows."""
    m = magnitude(values[0])
    for k in range(128):
        m = max(m, magnitude(values[k]))
    return m


@jit
def quantize_lines(x, layout, first, end, out, scale_inv, width, rule, largest):
    """Quantize in blocks of one row: no scales to repeat, and loops of a length that the compiler knows."""
    origins, stride = layout
    columns, blocks = out.shape[2], scale_inv.shape[2]
    maxima, scales = np.empty(blocks, x.dtype), np.empty(blocks, f32)
    whole = columns // 128 if width == 128 else 0
    for strip in range(first, end):
        matrix, row = divmod(strip, out.shape[1])
        start = origins[matrix] + row * stride
        values, codes, inverses = x[start : start + columns], out[matrix, row], scale_inv[matrix, row]
        for j in range(whole):
            block, bytes_ = values[j * 128 : j * 128 + 128], codes[j * 128 : j * 128 + 128]
            scale = block_scale(maximum_of_128(block), rule, largest)
            inverses[j] = f32(1) / scale
            for k in range(128):
                bytes_[k] = e4m3(float32(block[k]) * scale)
        if whole < blocks:
            block_maxima(values[whole * 128 :], width, maxima[whole:])
            block_scales(maxima[whole:], rule, largest, scales[whole:], inverses[whole:])
        for j in range(whole, blocks):
            scale, k, stop = scales[j], j * width, min(columns, j * width + width)
            for _ in range((stop - k) // PIECE):
                piece, bytes_ = values[k : k + PIECE], codes[k : k + PIECE]
                for i in range(PIECE):
                    bytes_[i] = e4m3(float32(piece[i]) * scale)
                k += PIECE
            for i in range(k, stop):
                codes[i] = e4m3(float32(values[i]) * scale)


@jit
def quantize_dequantize(x, layout, first, end, out, height, width, rule, largest, maxima, scales):
    """Compute the values that `quantize` stores, strips `first` to `end`; see `quantize`.

    out: output, bits [E, N, K] of the values, int16 for bfloat16 or int32 for float32
    """
    if height == 1:
        round_trip_lines(x, layout, first, end, out, width, rule, largest)
        return
    origins, stride = layout
    inverses = np.empty(-(-len(scales) // width), f32)
    inverse_row = np.empty(len(scales), f32)
    strips = -(-out.shape[1] // height)
    for strip in range(first, end):
        matrix, i = divmod(strip, strips)
        top, bottom = i * height, min(out.shape[1], i * height + height)
        start = origins[matrix] + top * stride
        strip_scales(x, start, stride, bottom - top, width, rule, largest, maxima, scales, inverses)
        repeat(inverses, width, inverse_row)
        for row in range(top, bottom):
            round_trip_row(x[start : start + len(scales)], scales, inverse_row, out[matrix, row])
            start += stride


@jit
def round_trip_row(x, scales, inverses, out):
    for k in range(len(x)):
        out[k] = round_like(e4m3_value(float32(x[k]) * scales[k]) * inverses[k], out[k])


@jit
def round_trip_lines(x, layout, first, end, out, width, rule, largest):
    """Compute the values that `quantize_lines` stores."""
    origins, stride = layout
    columns, blocks = out.shape[2], -(-out.shape[2] // width)
    maxima, scales, inverses = np.empty(blocks, x.dtype), np.empty(blocks, f32), np.empty(blocks, f32)
    whole = columns // 128 if width == 128 else 0
    for strip in range(first, end):
        matrix, row = divmod(strip, out.shape[1])
        start = origins[matrix] + row * stride
        values, bits = x[start : start + columns], out[matrix, row]
        for j in range(whole):
            block, results = values[j * 128 : j * 128 + 128], bits[j * 128 : j * 128 + 128]
            scale = block_scale(maximum_of_128(block), rule, largest)
            inverse = f32(1) / scale
            for k in range(128):
                results[k] = round_like(e4m3_value(float32(block[k]) * scale) * inverse, results[k])
        if whole < blocks:
            block_maxima(values[whole * 128 :], width, maxima[whole:])
            block_scales(maxima[whole:], rule, largest, scales[whole:], inverses[whole:])
        for j in range(whole, blocks):
            scale, inverse, k, stop = scales[j], inverses[j], j * width, min(columns, j * width + width)
            for _ in range((stop - k) // PIECE):
                piece, results = values[k : k + PIECE], bits[k : k + PIECE]
                for i in range(PIECE):
                    results[i] = round_like(e4m3_value(float32(piece[i]) * scale) * inverse, results[i])
                k += PIECE
            for i in range(k, stop):
                bits[i] = round_like(e4m3_value(float32(values[i]) * scale) * inverse, bits[i])


@intrinsic
def difference_mask(typing, a, b):
    """Return which of the 64 bytes at two addresses differ: one bit per byte, the lowest for the first."""
    bytes_ = ir.VectorType(ir.IntType(8), 64)

    def code(context, builder, signature, arguments):
        x, y = (builder.load(builder.inttoptr(address, bytes_.as_pointer()), align=1) for address in arguments)
        return builder.bitcast(builder.icmp_unsigned("!=", x, y), ir.IntType(64))

    return nb.uint64(nb.intp, nb.intp), code


@jit
def record_changes(codes, bytes_, row_start, gaps, differences, state):
    """Overwrite the bytes of a row with `codes`, and list those that differ."""
    last, entries, changes = state[0], state[1], state[2]
    new, old, columns = codes.ctypes.data, bytes_.ctypes.data, len(codes)
    for first in range(0, columns, 64):
        if first + 64 <= columns:
            mask = difference_mask(new + first, old + first)
        else:
            mask = u64(0)
            for k in range(first, columns):
                mask |= u64(codes[k] != bytes_[k]) << u64(k - first)
        while mask != u64(0):
            k = first + np.int64(trailing_zeros(mask))
            mask &= mask - u64(1)
            gap = row_start + k - last - 1
            while gap > 65535:
                gaps[entries], differences[entries] = 65535, 0
                entries += 1
                gap -= 65536
            gaps[entries], differences[entries] = gap, codes[k] - bytes_[k]
            bytes_[k] = codes[k]
            last = row_start + k
            entries += 1
            changes += 1
    state[0], state[1], state[2] = last, entries, changes


@jit
def quantize_delta(
    x, layout, row, end, out, scale_inv, height, width, rule, largest, maxima, scales,
    gaps, differences, state, codes,
):  # fmt: skip
    """Quantize rows `row` to `end`, counted through all matrices, and list the bytes that change.

    The loop stops where the next entries might not fit, and returns the row where the next call continues.

    out:   the previous bytes, [E, N, K], overwritten with the new ones
    gaps, differences: output, the entries
    state: input and output, see `Recording`
    codes: scratch for a row
    The other arguments are those of `quantize`.
    """
    origins, stride = layout
    columns = len(scales)
    can_shift, next_strip = False, row
    matrix, within = divmod(row, out.shape[1])
    for r in range(row, end):
        if state[1] + columns + (r * columns + columns - state[0]) // 65536 + 1 > len(gaps):
            end = r
            break
        start = origins[matrix] + within * stride
        if r == next_strip:
            strip = within // height
            top, bottom = strip * height, min(out.shape[1], strip * height + height)
            next_strip += bottom - within
            strip_scales(
                x, start - (within - top) * stride, stride, bottom - top, width, rule, largest, maxima, scales,
                scale_inv[matrix, strip],
            )  # fmt: skip
            can_shift = rule != FP32 and fill_shifts(scales, maxima)
        values, bytes_ = x[start : start + columns], out[matrix, within]
        prefetch(bytes_.ctypes.data + AHEAD, columns)
        if columns * x.itemsize <= NARROW and within + height < out.shape[1]:
            prefetch(values.ctypes.data + height * stride * x.itemsize, columns * x.itemsize)
        if can_shift:
            shift_row(values, maxima, codes)
        else:
            convert_row(values, scales, codes)
        record_changes(codes, bytes_, r * columns, gaps, differences, state)
        within += 1
        if within == out.shape[1]:
            matrix, within = matrix + 1, 0
    return end
