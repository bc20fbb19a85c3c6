"""The compiled inner loops of the `cpu` kernel: LLVM through numba, so no compiler is needed on the user's machine.

A strip of rows, one block high, is read twice (the second time from the cache): for the maxima of its columns and
then to be converted, with the scales spread out to one a column so that a row is a single long loop. LLVM turns such
loops into vector code only if every operation is on a type of fixed width, hence the many casts. Rounding is integer
arithmetic on the float32 bits. Fused and reordered floating-point operations stay off, so every bit is the reference's.

The first call on a machine compiles (seconds); numba then keeps the code beside this file, or in NUMBA_CACHE_DIR.
Values come as their bits: int16 for bfloat16, int32 for float32.
"""

import numba as nb
import numpy as np
from llvmlite import ir
from numba.core.cgutils import get_or_insert_function
from numba.cpython.unsafe.numbers import trailing_zeros
from numba.extending import intrinsic, overload

u8, u16, u32, u64, i16, i32, f32 = np.uint8, np.uint16, np.uint32, np.uint64, np.int16, np.int32, np.float32
LANES = 32
"""Values of 16 bits that are converted by one operation."""
ROUND = 14
"""Added before five digits go, the last of them a 0, it rounds to nearest: ties down, and with 2 more ties up."""
AHEAD = 4096
"""Bytes that are asked for before they are compared: the processor's own prefetching is late for them."""
NARROW = 2048
"""Bytes of a row up to which the strip that comes next is asked for; with longer rows that gains nothing."""
jit = nb.njit(nogil=True, cache=True, error_model="numpy")  # fastmath stays off: it changes bits


def magnitude(h):
    """Bits without the sign, in their own width."""


def float32(h):
    """The value as float32."""


def rounded(value, h):
    """The bits of a float32 value in the width of h, nearest and ties to even."""


@overload(magnitude, inline="always")
def _magnitude(h):
    return (lambda h: i16(h & i16(0x7FFF))) if h == nb.int16 else (lambda h: i32(h & i32(0x7FFFFFFF)))


@overload(float32, inline="always")
def _float32(h):
    return (lambda h: u32(u32(u16(h)) << u32(16)).view(f32)) if h == nb.int16 else (lambda h: u32(h).view(f32))


@overload(rounded, inline="always")
def _rounded(value, h):
    def to_bfloat16(value, h):
        bits = f32(value).view(u32)
        return i16(u16(u32(bits + u32(u32(0x7FFF) + u32(u32(bits >> u32(16)) & u32(1)))) >> u32(16)))

    return to_bfloat16 if h == nb.int16 else (lambda value, h: f32(value).view(i32))


@jit
def column_maxima(x, start, stride, rows, maxima):
    """Fill `maxima`, one a column, over rows of x, flat, that begin at `start`, `start + stride`, ..."""
    maxima[:] = 0
    columns = len(maxima)
    while rows >= 4:  # four rows at a time keep the maxima in registers four times as long
        second, third, fourth = start + stride, start + 2 * stride, start + 3 * stride
        a, b = x[start : start + columns], x[second : second + columns]
        c, d = x[third : third + columns], x[fourth : fourth + columns]
        for k in range(columns):
            m = max(magnitude(a[k]), magnitude(b[k]), magnitude(c[k]), magnitude(d[k]))
            maxima[k] = max(maxima[k], m)
        start += 4 * stride
        rows -= 4
    while rows > 0:
        a = x[start : start + columns]
        for k in range(columns):
            maxima[k] = max(maxima[k], magnitude(a[k]))
        start += stride
        rows -= 1


@nb.njit(error_model="numpy")
def block_scale(m, pow2, largest):
    """Bits of amax -> scale; NaN if it is not finite."""
    amax = float32(m)
    scale = f32(1)
    if not np.isfinite(amax):
        scale = f32(np.nan)
    elif amax > 0:
        scale = f32(448) / amax
        if np.isinf(scale):
            scale = largest
        if pow2:
            scale = u32(f32(scale).view(u32) & u32(0x7F800000)).view(f32)
    return scale


@jit
def strip_scales(x, start, stride, rows, width, pow2, largest, maxima, scales, scale_inv):
    """Scales of the blocks of a strip, spread out to one a column in `scales`; inverses in `scale_inv`."""
    column_maxima(x, start, stride, rows, maxima)
    for j in range(len(scale_inv)):
        first, end = j * width, min(len(maxima), j * width + width)
        m = maxima[first]
        for k in range(first + 1, end):
            m = max(m, maxima[k])
        scale = block_scale(m, pow2, largest)
        scale_inv[j] = f32(1) / scale
        scales[first:end] = scale


@nb.njit(error_model="numpy")
def e4m3(value):
    """float32 -> E4M3 bits: nearest, ties to even, saturated at 448."""
    signed = f32(value).view(u32)
    a = u32(signed & u32(0x7FFFFFFF))
    normal = u32(u32(u32(u32(a + u32(0x7FFFF)) + u32(u32(a >> u32(20)) & u32(1))) >> u32(20)) - u32(120 << 3))
    # Below 2^-6 the values are 2^-9 apart, as float32 itself is around 2^14: adding that rounds to them.
    tiny = u32(f32(a.view(f32) + f32(16384)).view(u32) - u32(0x46800000))
    return u8(min(tiny if a < u32(0x3C800000) else normal, u32(0x7E)) | u32(u32(signed >> u32(24)) & u32(0x80)))


@nb.njit(error_model="numpy")
def e4m3_value(value):
    """float32 -> the nearest E4M3 value, as `emulate.round_to_e4m3` gets it."""
    v = f32(min(max(f32(value), f32(-448)), f32(448)))
    exponent = max(u32(v.view(u32) & u32(0x7F800000)), u32(121 << 23))
    magic = f32(u32(exponent + u32(20 << 23)).view(f32) * f32(1.5))
    magnitude = u32(f32(f32(v + magic) - magic).view(u32) & u32(0x7FFFFFFF))
    return u32(magnitude | u32(f32(value).view(u32) & u32(0x80000000))).view(f32)


@jit
def convert_row(x, scales, out):
    for k in range(len(x)):
        out[k] = e4m3(float32(x[k]) * scales[k])


def shifts_of(scales, shifts):
    """Whether `shift_row` can stand for `convert_row` here: then `shifts` are what it needs, uint16 in their bits."""


@overload(shifts_of)
def _shifts_of(scales, shifts):
    def of_bfloat16(scales, shifts):
        usual = True
        for k in range(len(scales)):
            exponent = i32(i32(f32(scales[k]).view(u32) >> u32(23)) - i32(127))
            usual &= exponent <= i32(115)  # above, and where the scale is NaN, denormal values count
            shifts[k] = i16(i32(i32(i32(120) - exponent) << i32(8)) - i32(ROUND))
        return usual

    return of_bfloat16 if shifts.dtype == nb.int16 else (lambda scales, shifts: False)


@nb.njit(error_model="numpy")
def e4m3_shifted(h, shift):
    """`e4m3(float32(h) * scale)` of a bfloat16 h and a power of two that keeps it at 448 or below, in 16 bits.

    The product is a sum of exponents. `value` is then E4M3 with four more digits, or, below 2^-6, the digits of h,
    of which more must go.
    """
    scaled = i16(i16(h & i16(0x7FFF)) - i16(u16(u16(shift) + u16(ROUND)) >> u16(1)))
    value = max(scaled, i16(i16(h & i16(0x7F)) | i16(0x80)))
    excess = u16(min(max(i16(i16(4) - i16(scaled >> i16(7))), i16(3)), i16(14)))  # digits that go, but for the last
    v, half = u16(value), u16(u16(u16(1) << excess) - u16(1))
    odd = u16(u16(u16(v >> excess) >> u16(1)) & u16(1))
    code = u16(u16(u16(u16(v + half) + odd) >> excess) >> u16(1))
    return u8(code | u16(u16(u16(h) >> u16(8)) & u16(0x80)))


@intrinsic
def convert_normal(typing, values, shifts, codes):
    """Convert 128 values at these addresses as `e4m3_shifted` does; false if one is below 2^-6 when it is shifted, and
    what was written is then wrong.

    As many digits go of every normal value, five of twice its bits and ROUND, and no lane shifts by a number of its
    own, for which AVX2 has no instruction. Written in vectors: LLVM's own take half as long again for such a loop.
    """
    i8s, i16s = ir.VectorType(ir.IntType(8), LANES), ir.VectorType(ir.IntType(16), LANES)

    def code(context, builder, signature, arguments):
        def function(name, *operands, returns=i16s):
            kind = ir.FunctionType(returns, [operand.type for operand in operands])
            return builder.call(get_or_insert_function(builder.module, kind, f"llvm.{name}.v{LANES}i16"), operands)

        def every(number, kind=i16s):
            return ir.Constant(kind, [number] * LANES)

        def at(address, nbytes, kind):
            return builder.inttoptr(builder.add(address, ir.Constant(address.type, nbytes)), kind.as_pointer())

        x, taken, out = arguments
        smallest = every(0xFFFF)
        for first in range(0, 128, LANES):
            h = builder.load(at(x, 2 * first, i16s), align=2)
            value = function("usub.sat", builder.add(h, h), builder.load(at(taken, 2 * first, i16s), align=2))
            smallest = function("umin", smallest, value)
            odd = builder.and_(builder.lshr(h, every(3)), every(2))  # whether the last digit that stays is
            magnitude = builder.trunc(builder.lshr(builder.add(value, odd), every(5)), i8s)
            negative = function("smax", function("smin", h, every(127)), every(-128))  # one instruction, with trunc
            sign = builder.and_(builder.trunc(negative, i8s), every(0x80, i8s))
            builder.store(builder.or_(magnitude, sign), at(out, first, i8s), align=1)
        least = function("vector.reduce.umin", smallest, returns=ir.IntType(16))
        return builder.icmp_unsigned(">=", least, ir.Constant(least.type, 0x100 + ROUND))

    return nb.boolean(nb.intp, nb.intp, nb.intp), code


@jit
def shift_row(x, shifts, out):
    """128 at a time: mostly all are normal."""
    whole = len(x) // 128 * 128
    values, taken, codes = x.ctypes.data, shifts.ctypes.data, out.ctypes.data
    for first in range(0, whole, 128):
        if not convert_normal(values + 2 * first, taken + 2 * first, codes + first):
            for k in range(first, first + 128):
                out[k] = e4m3_shifted(x[k], shifts[k])
    for k in range(whole, len(x)):
        out[k] = e4m3_shifted(x[k], shifts[k])


@intrinsic
def fetch_line(typing, address):
    """Have the cache line at an address on its way; no harm if nothing is there."""

    def code(context, builder, signature, arguments):
        pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
        function = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        to_read, close, data = flag(0), flag(3), flag(1)
        builder.call(function, [builder.inttoptr(arguments[0], pointer), to_read, close, data])
        return context.get_dummy_value()

    return nb.void(nb.intp), code


@jit
def fetch(address, nbytes):
    for line in range(address, address + nbytes, 64):
        fetch_line(line)


@jit
def quantize(x, place, first, end, out, scale_inv, height, width, pow2, largest, maxima, scales):
    """Strips `first` to `end`, counted through all matrices.

    x: flat. place: (origin, stride of matrices, of rows); row r of matrix e begins at origin + e * place[1] +
    r * place[2]. out: [E, N, K]; scale_inv: [E, strips, blocks].
    """
    if (height, width) == (1, 128):
        quantize_rows(x, place, first, end, out, scale_inv, pow2, largest, maxima, scales)
        return
    origin, matrix_stride, stride = place
    row_bytes = len(scales) * x.itemsize
    for strip in range(first, end):
        matrix, j = divmod(strip, scale_inv.shape[1])
        top, bottom = j * height, min(out.shape[1], j * height + height)
        start = origin + matrix * matrix_stride + top * stride
        matrix_ahead, j_ahead = divmod(strip + 1, scale_inv.shape[1])
        ahead = origin + matrix_ahead * matrix_stride + j_ahead * height * stride
        strip_scales(x, start, stride, bottom - top, width, pow2, largest, maxima, scales, scale_inv[matrix, j])
        shifted = pow2 and shifts_of(scales, maxima)
        for row in range(top, bottom):
            values = x[start : start + len(scales)]
            if row_bytes <= NARROW and strip + 1 < end:
                fetch(x.ctypes.data + ahead * x.itemsize, row_bytes)
                ahead += stride
            if shifted:
                shift_row(values, maxima, out[matrix, row])
            else:
                convert_row(values, scales, out[matrix, row])
            start += stride


@jit
def maximum_of_128(values):
    """The largest of the magnitudes of exactly 128 values: a length that the compiler knows."""
    m = magnitude(values[0])
    for k in range(128):
        m = max(m, magnitude(values[k]))
    return m


@jit
def quantize_rows(x, place, first, end, out, scale_inv, pow2, largest, maxima, scales):
    """1x128 blocks: loops of a length known to the compiler, and no scales to spread out."""
    origin, matrix_stride, stride = place
    whole, ragged = len(scales) // 128, len(scales) // 128 * 128
    for strip in range(first, end):
        matrix, row = divmod(strip, out.shape[1])
        start = origin + matrix * matrix_stride + row * stride
        values, codes, inverses = x[start : start + len(scales)], out[matrix, row], scale_inv[matrix, row]
        for j in range(whole):
            block, bytes_ = values[j * 128 : j * 128 + 128], codes[j * 128 : j * 128 + 128]
            scale = block_scale(maximum_of_128(block), pow2, largest)
            inverses[j] = f32(1) / scale
            for k in range(128):
                bytes_[k] = e4m3(float32(block[k]) * scale)
        if ragged < len(scales):
            rest = scales[ragged:]
            strip_scales(x, start + ragged, 0, 1, 128, pow2, largest, maxima[ragged:], rest, inverses[whole:])
            convert_row(values[ragged:], rest, codes[ragged:])


@jit
def quantize_dequantize(x, place, first, end, out, height, width, pow2, largest, maxima, scales):
    """out: bits [E, N, K] of the values that `quantize` keeps, int16 for bfloat16 or int32 for float32."""
    origin, matrix_stride, stride = place
    inverses = np.empty(-(-len(scales) // width), f32)
    spread = np.empty(len(scales), f32)
    strips = -(-out.shape[1] // height)
    whole = len(scales) // 128 if (height, width) == (1, 128) else 0
    left = whole * 128
    for strip in range(first, end):
        matrix, i = divmod(strip, strips)
        top, bottom = i * height, min(out.shape[1], i * height + height)
        start = origin + matrix * matrix_stride + top * stride
        for j in range(whole):
            values = x[start + j * 128 : start + j * 128 + 128]
            kept = out[matrix, top][j * 128 : j * 128 + 128]
            scale = block_scale(maximum_of_128(values), pow2, largest)
            inverse = f32(1) / scale
            for k in range(128):
                kept[k] = rounded(e4m3_value(float32(values[k]) * scale) * inverse, kept[k])
        if left < len(scales):
            start += left
            rest, back = scales[left:], spread[left:]
            strip_scales(x, start, stride, bottom - top, width, pow2, largest, maxima[left:], rest, inverses[whole:])
            spread_out(inverses[whole:], width, back)
            for row in range(top, bottom):
                convert_row_back(x[start : start + len(rest)], rest, back, out[matrix, row][left:])
                start += stride


@jit
def spread_out(inverses, width, spread):
    for first in range(0, len(spread), width):
        spread[first : first + width] = inverses[first // width]


@jit
def convert_row_back(x, scales, inverses, out):
    for k in range(len(x)):
        out[k] = rounded(e4m3_value(float32(x[k]) * scales[k]) * inverses[k], out[k])


@intrinsic
def differing(typing, a, b):
    """Which of the 64 bytes at two addresses differ: a bit each, the lowest for the first."""
    bytes_ = ir.VectorType(ir.IntType(8), 64)

    def code(context, builder, signature, arguments):
        x, y = (builder.load(builder.inttoptr(one, bytes_.as_pointer()), align=1) for one in arguments)
        return builder.bitcast(builder.icmp_unsigned("!=", x, y), ir.IntType(64))

    return nb.uint64(nb.intp, nb.intp), code


@jit
def record(codes, bytes_, row_start, gaps, differences, state):
    """Make the bytes of a row what `codes` are, and list those that differ."""
    last, entries, changes = state[0], state[1], state[2]
    new, held, columns = codes.ctypes.data, bytes_.ctypes.data, len(codes)
    for first in range(0, columns, 64):
        if first + 64 <= columns:
            left = differing(new + first, held + first)
        else:
            left = u64(0)
            for k in range(first, columns):
                left |= u64(codes[k] != bytes_[k]) << u64(k - first)
        while left != u64(0):
            k = first + np.int64(trailing_zeros(left))
            left &= left - u64(1)
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
    x, place, row, end, out, scale_inv, height, width, pow2, largest, maxima, scales,
    gaps, differences, state, codes,
):  # fmt: skip
    """Rows `row` to `end`, counted through all matrices, until the entries might not fit; returns where to go on.

    out: what the rows are compared with, and then what they are. state: see `Recording`. codes: scratch for a row.
    """
    origin, matrix_stride, stride = place
    columns = len(scales)
    shifted, next_strip = False, row
    matrix, within = divmod(row, out.shape[1])
    for r in range(row, end):
        if state[1] + columns + (r * columns + columns - state[0]) // 65536 + 1 > len(gaps):
            end = r
            break
        start = origin + matrix * matrix_stride + within * stride
        if r == next_strip:
            strip = within // height
            top, bottom = strip * height, min(out.shape[1], strip * height + height)
            next_strip += bottom - within
            strip_scales(
                x, start - (within - top) * stride, stride, bottom - top, width, pow2, largest, maxima, scales,
                scale_inv[matrix, strip],
            )  # fmt: skip
            shifted = pow2 and shifts_of(scales, maxima)
        values, bytes_ = x[start : start + columns], out[matrix, within]
        fetch(bytes_.ctypes.data + AHEAD, columns)
        if columns * x.itemsize <= NARROW and within + height < out.shape[1]:
            fetch(values.ctypes.data + height * stride * x.itemsize, columns * x.itemsize)
        if shifted:
            shift_row(values, maxima, codes)
        else:
            convert_row(values, scales, codes)
        record(codes, bytes_, r * columns, gaps, differences, state)
        within += 1
        if within == out.shape[1]:
            matrix, within = matrix + 1, 0
    return end
