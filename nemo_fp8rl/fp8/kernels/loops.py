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
from numba.cpython.unsafe.numbers import trailing_zeros
from numba.extending import overload

u8, u16, u32, u64, i16, i32, f32 = np.uint8, np.uint16, np.uint32, np.uint64, np.int16, np.int32, np.float32
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
def column_maxima(x, top, bottom, left, maxima):
    maxima[:] = 0
    columns = len(maxima)
    row = top
    while row + 4 <= bottom:  # four rows at a time keep the maxima in registers four times as long
        a, b = x[row][left:], x[row + 1][left:]
        c, d = x[row + 2][left:], x[row + 3][left:]
        for k in range(columns):
            m = max(magnitude(a[k]), magnitude(b[k]), magnitude(c[k]), magnitude(d[k]))
            maxima[k] = max(maxima[k], m)
        row += 4
    while row < bottom:
        a = x[row][left:]
        for k in range(columns):
            maxima[k] = max(maxima[k], magnitude(a[k]))
        row += 1


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
def strip_scales(x, top, bottom, left, width, pow2, largest, maxima, scales, scale_inv):
    """Scales of the blocks from column `left` on, spread out to one a column in `scales`; inverses in `scale_inv`."""
    column_maxima(x, top, bottom, left, maxima)
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


@jit
def convert_row_and_compare(x, scales, old, out, changed):
    for k in range(len(x)):
        new = e4m3(float32(x[k]) * scales[k])
        changed[k] = new ^ old[k]
        out[k] = new


@jit
def changed_words(words, hits):
    """Indices of the words that are not zero, in `hits`; returns how many. No branch here depends on the data.

    words: uint64, a multiple of eight of them. hits: one an word, and as many again as there are groups of eight.
    """
    groups = 0
    for group in range(0, len(words), 8):
        hits[len(words) + groups] = group
        groups += (
            words[group] | words[group + 1] | words[group + 2] | words[group + 3]
            | words[group + 4] | words[group + 5] | words[group + 6] | words[group + 7]
        ) != u64(0)  # fmt: skip
    found = 0
    for i in range(groups):
        group = hits[len(words) + i]
        for word in range(group, group + 8):
            hits[found] = word
            found += words[word] != u64(0)
    return found


@jit
def quantize(x, out, scale_inv, height, width, pow2, largest, maxima, scales):
    if (height, width) == (1, 128):
        quantize_rows(x, out, scale_inv, pow2, largest, maxima, scales)
        return
    for strip in range(len(scale_inv)):
        top, bottom = strip * height, min(len(x), strip * height + height)
        strip_scales(x, top, bottom, 0, width, pow2, largest, maxima, scales, scale_inv[strip])
        for row in range(top, bottom):
            convert_row(x[row], scales, out[row])


@jit
def maximum_of_128(values):
    """Of the magnitudes of exactly 128 values: a length that the compiler knows."""
    m = magnitude(values[0])
    for k in range(128):
        m = max(m, magnitude(values[k]))
    return m


@jit
def quantize_rows(x, out, scale_inv, pow2, largest, maxima, scales):
    """1x128 blocks: loops of a length known to the compiler, and no scales to spread out."""
    whole = x.shape[1] // 128
    for row in range(len(x)):
        for j in range(whole):
            values, bytes_ = x[row][j * 128 : j * 128 + 128], out[row][j * 128 : j * 128 + 128]
            scale = block_scale(maximum_of_128(values), pow2, largest)
            scale_inv[row, j] = f32(1) / scale
            for k in range(128):
                bytes_[k] = e4m3(float32(values[k]) * scale)
        ragged = whole * 128
        if ragged < x.shape[1]:
            rest = scales[ragged:]
            strip_scales(x, row, row + 1, ragged, 128, pow2, largest, maxima[ragged:], rest, scale_inv[row][whole:])
            convert_row(x[row][ragged:], rest, out[row][ragged:])


@jit
def quantize_dequantize(x, out, height, width, pow2, largest, maxima, scales):
    """out: bits of the values that `quantize` keeps, int16 for bfloat16 or int32 for float32."""
    inverses = np.empty(-(-x.shape[1] // width), f32)
    spread = np.empty(x.shape[1], f32)
    whole = x.shape[1] // 128 if (height, width) == (1, 128) else 0
    for top in range(0, len(x), height):
        bottom = min(len(x), top + height)
        for j in range(whole):
            values, kept = x[top][j * 128 : j * 128 + 128], out[top][j * 128 : j * 128 + 128]
            scale = block_scale(maximum_of_128(values), pow2, largest)
            inverse = f32(1) / scale
            for k in range(128):
                kept[k] = rounded(e4m3_value(float32(values[k]) * scale) * inverse, kept[k])
        left = whole * 128
        if left < x.shape[1]:
            rest, back = scales[left:], spread[left:]
            strip_scales(x, top, bottom, left, width, pow2, largest, maxima[left:], rest, inverses[whole:])
            spread_out(inverses[whole:], width, back)
            for row in range(top, bottom):
                convert_row_back(x[row][left:], rest, back, out[row][left:])


@jit
def spread_out(inverses, width, spread):
    for first in range(0, len(spread), width):
        spread[first : first + width] = inverses[first // width]


@jit
def convert_row_back(x, scales, inverses, out):
    for k in range(len(x)):
        out[k] = rounded(e4m3_value(float32(x[k]) * scales[k]) * inverses[k], out[k])


@jit
def quantize_delta(
    x, out, scale_inv, height, width, pow2, largest, maxima, scales,
    base, row, start, gaps, differences, state, changed,
):  # fmt: skip
    """Rows from `row` on, until the entries might not fit; returns the row to go on with."""
    rows, columns = x.shape
    words = changed.view(u64)
    hits = np.empty(len(words) + len(words) // 8, np.int32)
    last, entries, changes = state
    for r in range(row, rows):
        if entries + columns + (start + r * columns + columns - last) // 65536 + 1 > len(gaps):
            rows = r
            break
        if r == row or r % height == 0:
            top = r - r % height
            strip_scales(
                x, top, min(len(x), top + height), 0, width, pow2, largest, maxima, scales, scale_inv[top // height]
            )
        old, new = base[r], out[r]
        convert_row_and_compare(x[r], scales, old, new, changed[:columns])
        for hit in range(changed_words(words, hits)):
            word = hits[hit]
            mask = words[word]
            while mask != u64(0):
                byte = np.int64(trailing_zeros(mask)) >> 3
                mask &= ~u64(u64(0xFF) << u64(8 * byte))
                column = word * 8 + byte
                at = start + r * columns + column
                gap = at - last - 1
                last = at
                while gap > 65535:
                    gaps[entries], differences[entries] = 65535, 0
                    entries += 1
                    gap -= 65536
                gaps[entries], differences[entries] = gap, new[column] - old[column]
                entries += 1
                changes += 1
    state[0], state[1], state[2] = last, entries, changes
    return rows
