"""Functions of float32 values, and sums, for use inside the Triton kernels of this folder."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2_HIGH, LN2_LOW = tl.constexpr(0.693359375), tl.constexpr(-2.12194440e-4)
"""Their sum is ln 2. A whole number below 2^9 times the first is exact in float32."""
LARGEST, SMALLEST = tl.constexpr(88.0), tl.constexpr(-87.0)
"""Borders of `exp`: no result below or above them is infinite or denormal."""
ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: a sum with it is rounded to a whole number."""
SQRT_HALF = tl.constexpr(0.70710678118654752)


@triton.jit
def exp(x):
    """Return e^x of float32 x, within 1e-7 of its size: 0 below -87, e^88 above 88, NaN of NaN.

    The polynomial is that of Cephes (expf.c).
    """
    bounded = tl.where(x > LARGEST, LARGEST, tl.where(x < SMALLEST, SMALLEST, x))
    k = tl.fma(bounded, LOG2E, ROUND) - ROUND
    r = tl.fma(k, -LN2_HIGH, bounded)
    r = tl.fma(k, -LN2_LOW, r)
    p = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    p = tl.fma(p, r * r, r) + 1.0
    power = ((k.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < SMALLEST, 0.0, p * power)


@triton.jit
def log(x):
    """Return ln x of a float32 x that is at least 2^-126 and finite, within 2e-7; NaN of NaN.

    The polynomial is that of Cephes (logf.c).
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) - 126).to(tl.float32)
    m = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)  # in [0.5, 1)
    is_small = m < SQRT_HALF
    exponent = tl.where(is_small, exponent - 1.0, exponent)
    z = tl.where(is_small, m + m, m) - 1.0
    p = tl.fma(z, 7.0376836292e-2, -1.1514610310e-1)
    p = tl.fma(p, z, 1.1676998740e-1)
    p = tl.fma(p, z, -1.2420140846e-1)
    p = tl.fma(p, z, 1.4249322787e-1)
    p = tl.fma(p, z, -1.6668057665e-1)
    p = tl.fma(p, z, 2.0000714765e-1)
    p = tl.fma(p, z, -2.4999993993e-1)
    p = tl.fma(p, z, 3.3333331174e-1)
    square = z * z
    y = (p * z) * square
    y = tl.fma(exponent, LN2_LOW, y)
    y = tl.fma(square, -0.5, y)
    return tl.where(x != x, x, tl.fma(exponent, LN2_HIGH, z + y))  # noqa: PLR0124, NaN alone


@triton.constexpr_function
def levels(size):
    """Return the base-2 logarithm of a power of two."""
    return size.bit_length() - 1


@triton.jit
def tree_sum(x, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Return the sums [ROWS] of x [ROWS, SIZE], SIZE a power of two: neighbours are added, then neighbouring sums."""
    for level in tl.static_range(levels(SIZE)):
        left, right = tl.split(tl.reshape(x, (ROWS, SIZE >> (level + 1), 2)))
        x = left + right
    return tl.reshape(x, (ROWS,))
