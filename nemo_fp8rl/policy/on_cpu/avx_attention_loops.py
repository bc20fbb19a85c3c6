"""The compiled inner loops of `ordered`; see fp8/kernels/on_cpu/loops.py for how numba is used.

fused: of the kernel for AVX-512, whose multiply-adds round once and whose exponential is a polynomial.
"""

import math

import numba as nb
import numpy as np
from numba.extending import intrinsic

f32, i32 = np.float32, np.int32
LANES = 16
"""Partial sums of the weights."""
LOG2_E, LN_2, SMALLEST = f32(1.44269502), f32(0.693147182), f32(-87.3365479)
"""SMALLEST: what is below it counts as 0."""
POLYNOMIAL = tuple(map(f32, (0.00828929059, 0.0418978221, 0.166676521, 0.499991506, 0.999999701, 1)))
"""Coefficients of exp(x) for |x| <= ln(2) / 2, the highest power first (vLLM 0.32, csrc/cpu/cpu_arch_macros.h)."""
jit = nb.njit(nogil=True, cache=True, error_model="numpy")


@intrinsic
def multiply_add(typingctx, a, b, c):
    """a * b + c with one rounding; float32."""
    return nb.float32(nb.float32, nb.float32, nb.float32), lambda context, builder, signature, args: builder.fma(*args)


@jit
def attend(query, key, value, scale, out, fused):
    """query [n, heads, s, d], key [n, d, s], value [n, s, d] -> out, as query; float32. scale: of a score."""
    n, heads, s, d = query.shape
    scores = np.empty(s, f32)
    for i in range(n):
        for h in range(heads):
            for row in range(s):
                weights, result = scores[: row + 1], out[i, h, row]
                weights[:] = f32(0)
                for c in range(d):
                    add_multiple(query[i, h, row, c], key[i, c], weights, fused)
                for j in range(len(weights)):
                    weights[j] *= scale
                exponentials(weights, weights.max(), fused)
                result[:] = f32(0)
                for j in range(len(weights)):
                    add_multiple(weights[j], value[i, j], result, fused)
                share = f32(1) / total(weights, fused)
                for c in range(d):
                    result[c] *= share


@jit
def add_multiple(factor, row, sums, fused):
    """Add `factor * row` to sums, float32, as many as there are; with one rounding if `fused`."""
    if fused:
        for j in range(len(sums)):
            sums[j] = multiply_add(factor, row[j], sums[j])
    else:
        for j in range(len(sums)):
            sums[j] += f32(factor * row[j])


@jit
def exponentials(x, largest, fused):
    """exp(x - largest), in place."""
    if not fused:
        for j in range(len(x)):
            x[j] = math.exp(f32(x[j] - largest))  # the C library's expf, as the kernel's: 1 in 1,600 is not the nearest
        return
    for j in range(len(x)):
        power = f32(x[j] - largest)
        kept = max(power, SMALLEST)
        twos = multiply_add(kept, LOG2_E, f32(0.5))
        whole = i32(twos)
        whole = i32(whole - i32(f32(whole) > twos))  # the next lower whole number
        rest = multiply_add(f32(-whole), LN_2, kept)
        series = POLYNOMIAL[0]
        for coefficient in POLYNOMIAL[1:]:
            series = multiply_add(rest, series, coefficient)
        exponent = i32(i32(whole + i32(126)) << i32(23)).view(f32)  # 2 ** (whole - 1); 0 for the smallest, as there
        x[j] = f32(0) if power < SMALLEST else f32(f32(series * exponent) * f32(2))


@jit
def total(weights, fused):
    """The sum: in LANES lanes, then one half onto the other; if not `fused`, one after another in each half first."""
    lanes = np.zeros(LANES, f32)
    for j in range(len(weights)):
        lanes[j % LANES] += weights[j]
    half = LANES // 2
    if not fused:
        for j in range(1, half):
            lanes[0] += lanes[j]
            lanes[half] += lanes[half + j]
        return f32(lanes[0] + lanes[half])
    while half:
        for j in range(half):
            lanes[j] += lanes[half + j]
        half //= 2
    return lanes[0]
