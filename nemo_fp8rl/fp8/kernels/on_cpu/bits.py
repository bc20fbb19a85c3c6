"""Single values as bits, for the compiled loops: magnitudes, and rounding to bfloat16, E4M3 and E2M1.

LLVM makes vector code of a loop over these only if every operation is on a type of fixed width, hence the many casts.
numba cannot view a variable that is assigned twice as another type, hence the many names. Rounding is integer
arithmetic on the float32 bits, or the addition of a number whose last bit is the step of the format.

Values are passed as their bits: int16 for bfloat16, int32 for float32.
"""

import numba as nb
import numpy as np
from numba.extending import overload

u8, u16, u32, u64, i16, i32, f32 = np.uint8, np.uint16, np.uint32, np.uint64, np.int16, np.int32, np.float32
PIECE = 16
"""Values that a loop converts with one scale; a length that the compiler knows gives code without a loop."""


def magnitude(h):
    """Return the bits without the sign, in the width of h."""


def float32(h):
    """Return the value of the bits h as float32."""


def round_like(value, h):
    """Return the bits of a float32 value in the width of h: nearest, ties to even."""


@overload(magnitude, inline="always")
def _magnitude(h):
    return (lambda h: i16(h & i16(0x7FFF))) if h == nb.int16 else (lambda h: i32(h & i32(0x7FFFFFFF)))


@overload(float32, inline="always")
def _float32(h):
    return (lambda h: u32(u32(u16(h)) << u32(16)).view(f32)) if h == nb.int16 else (lambda h: u32(h).view(f32))


@overload(round_like, inline="always")
def _round_like(value, h):
    def to_bfloat16(value, h):
        bits = f32(value).view(u32)
        return i16(u16(u32(bits + u32(u32(0x7FFF) + u32(u32(bits >> u32(16)) & u32(1)))) >> u32(16)))

    return to_bfloat16 if h == nb.int16 else (lambda value, h: f32(value).view(i32))


@nb.njit(error_model="numpy")
def power_not_above(value):
    """Return the power of two with the exponent of a positive float32 value: the value without its mantissa."""
    return u32(f32(value).view(u32) & u32(0x7F800000)).view(f32)


@nb.njit(error_model="numpy")
def power_not_below(value):
    """Return the smallest power of two not below a float32 value, at least 2^-127, which is a subnormal."""
    bits = f32(value).view(u32)
    exponent, mantissa = u32(bits >> u32(23)), u32(bits & u32(0x7FFFFF))
    is_between = mantissa > u32(0) and not (exponent == u32(0) and mantissa <= u32(1 << 22))
    return u32(max(u32(u32(exponent + u32(is_between)) << u32(23)), u32(1 << 22))).view(f32)


@nb.njit(error_model="numpy")
def e4m3(value):
    """Return the E4M3 bits of a float32 value: nearest, ties to even, saturated at 448."""
    signed = f32(value).view(u32)
    a = u32(signed & u32(0x7FFFFFFF))
    normal = u32(u32(u32(u32(a + u32(0x7FFFF)) + u32(u32(a >> u32(20)) & u32(1))) >> u32(20)) - u32(120 << 3))
    # Below 2^-6 E4M3 values are 2^-9 apart, as float32 values are around 2^14: adding 2^14 rounds to them.
    tiny = u32(f32(a.view(f32) + f32(16384)).view(u32) - u32(0x46800000))
    return u8(min(tiny if a < u32(0x3C800000) else normal, u32(0x7E)) | u32(u32(signed >> u32(24)) & u32(0x80)))


@nb.njit(error_model="numpy")
def e4m3_value(value):
    """Return the nearest E4M3 value of a float32 value, by the arithmetic of `emulate.round_to_e4m3`."""
    v = f32(min(max(f32(value), f32(-448)), f32(448)))
    exponent = max(u32(v.view(u32) & u32(0x7F800000)), u32(121 << 23))
    magic = f32(u32(exponent + u32(20 << 23)).view(f32) * f32(1.5))
    magnitude = u32(f32(f32(v + magic) - magic).view(u32) & u32(0x7FFFFFFF))
    return u32(magnitude | u32(f32(value).view(u32) & u32(0x80000000))).view(f32)


@nb.njit(error_model="numpy")
def e2m1(value):
    """Return the E2M1 code of a float32 value: nearest, ties to even, saturated at 6.

    The codes up to 4 are 1/2 apart, those from 4 to 6 are 1 apart, and above 2. float32 values are as far apart around
    2^22, 2^23 and 2^24, so adding these rounds; outside of its range each of the three is above the code.
    """
    signed = f32(value).view(u32)
    v = u32(signed & u32(0x7FFFFFFF)).view(f32)
    halves = u32(f32(v + f32(1 << 22)).view(u32) - u32(0x4A800000))
    ones = u32(f32(v + f32(1 << 23)).view(u32) - u32(0x4B000000 - 2))
    twos = u32(f32(v + f32(1 << 24)).view(u32) - u32(0x4B800000 - 4))
    return u8(min(halves, ones, twos, u32(7)) | u32(u32(signed >> u32(28)) & u32(8)))


@nb.njit(error_model="numpy")
def e2m1_value(value):
    """Return the nearest E2M1 value of a float32 value."""
    signed = f32(value).view(u32)
    a = u32(signed & u32(0x7FFFFFFF)).view(f32)
    v = f32(a if a < f32(6) else f32(6))
    exponent = max(u32(v.view(u32) & u32(0x7F800000)), u32(127 << 23))
    magic = u32(exponent + u32(22 << 23)).view(f32)  # its last bit is the step of E2M1 at v
    return u32(f32(f32(v + magic) - magic).view(u32) | u32(signed & u32(0x80000000))).view(f32)


@nb.njit(error_model="numpy")
def e2m1_low_byte(v):
    """Return a number whose low byte is the code that `e2m1` gives for a float32 value without sign."""
    halves = u32(f32(v + f32(1 << 22)).view(u32))
    ones = u32(f32(v + f32(1 << 23)).view(u32) - u32(0x4B000000 - 0x4A800000 - 2))
    twos = u32(f32(v + f32(1 << 24)).view(u32) - u32(0x4B800000 - 0x4A800000 - 4))
    return min(halves, ones, twos, u32(0x4A800007))


@nb.njit(error_model="numpy")
def e2m1_pair(pair, scale):
    """Return the packed codes of two bfloat16 in 32 bits, the first in the low half, times a scale above zero.

    Two at a time need no widening and no packing.
    """
    bits = u32(pair)
    even = u32(u32(bits << u32(16)) & u32(0x7FFFFFFF)).view(f32)
    odd = u32(bits & u32(0x7FFF0000)).view(f32)
    low, high = e2m1_low_byte(f32(even * scale)), u32(e2m1_low_byte(f32(odd * scale)) << u32(4))
    signs = u32(u32(bits >> u32(12)) & u32(8)) | u32(u32(bits >> u32(24)) & u32(0x80))
    return u8(u32(u32(u32(low & u32(0xF)) | high) | signs))
