"""The compiled inner loops of `avx_attention`; fp8/kernels/on_cpu/compiled.py explains the use of numba.

`fused` selects the arithmetic of the AVX-512 kernel: multiply-adds round once, and the exponential is a polynomial.
"""

import math

import numba as nb
import numpy as np
from numba.extending import intrinsic

from nemo_fp8rl.fp8.kernels.on_cpu.compiled import jit

f32, i32 = np.float32, np.int32
LANES = 16
"""Number of partial sums of the weights."""
LOG2_E, LN_2, SMALLEST = f32(1.44269502), f32(0.693147182), f32(-87.3365479)
"""SMALLEST: the exponential of a lower number is 0."""
POLYNOMIAL = tuple(map(f32, (0.00828929059, 0.0418978221, 0.166676521, 0.499991506, 0.999999701, 1)))
"""Coefficients of exp(x) for |x| <= ln(2) / 2, the highest power first (vLLM 0.32, csrc/cpu/cpu_arch_macros.h)."""


@intrinsic
def multiply_add(typingctx, a, b, c):
    """Return a * b + c with one rounding, float32."""
    return nb.float32(nb.float32, nb.float32, nb.float32), lambda context, builder, signature, args: builder.fma(*args)


@jit
def attend(query, key, value, hidden, scale, out, fused):
    """Write causal attention into out, which has the shape of query; all float32 but `hidden`.

    query:       [n, heads, s, d]
    key, value:  [n, d, s] and [n, s, d]
    hidden:      int64 [n, s, 2], the first key that a query does not see, and the one after the last of them
    scale:       multiplies scores
    """
    n, heads, s, d = query.shape
    scores = np.empty(s, f32)
    for i in range(n):
        for h in range(heads):
            for row in range(s):
                first, end = min(hidden[i, row, 0], row + 1), min(hidden[i, row, 1], row + 1)
                # the order of sums counts the keys that are there, as the kernel's, which gets no others
                weights, result = scores[: first + row + 1 - end], out[i, h, row]
                weights[:] = f32(0)
                for c in range(d):
                    add_multiple(query[i, h, row, c], key[i, c, :first], weights[:first], fused)
                    add_multiple(query[i, h, row, c], key[i, c, end:], weights[first:], fused)
                for j in range(len(weights)):
                    weights[j] *= scale
                exponentials(weights, weights.max(), fused)
                result[:] = f32(0)
                for j in range(len(weights)):
                    add_multiple(weights[j], value[i, j if j < first else j + end - first], result, fused)
                share = f32(1) / sum_weights(weights, fused)
                for c in range(d):
                    result[c] *= share


@jit
def add_multiple(factor, row, sums, fused):
    """Add `factor * row` to all of sums, float32, with one rounding if `fused`."""
    if fused:
        for j in range(len(sums)):
            sums[j] = multiply_add(factor, row[j], sums[j])
    else:
        for j in range(len(sums)):
            sums[j] += f32(factor * row[j])


@jit
def exponentials(x, largest, fused):
    """Replace x by exp(x - largest)."""
    if not fused:
        for j in range(len(x)):
            # the C library's expf, as in the kernel; 1 in 1,600 results is not the nearest
            x[j] = math.exp(f32(x[j] - largest))
        return
    for j in range(len(x)):
        power = f32(x[j] - largest)
        clamped = max(power, SMALLEST)
        twos = multiply_add(clamped, LOG2_E, f32(0.5))
        whole = i32(twos)
        whole = i32(whole - i32(f32(whole) > twos))  # the next lower whole number
        rest = multiply_add(f32(-whole), LN_2, clamped)
        series = POLYNOMIAL[0]
        for coefficient in POLYNOMIAL[1:]:
            series = multiply_add(rest, series, coefficient)
        # 2 ** (whole - 1); 0 for the smallest, as in the kernel
        exponent = i32(i32(whole + i32(126)) << i32(23)).view(f32)
        x[j] = f32(0) if power < SMALLEST else f32(f32(series * exponent) * f32(2))


@jit
def sum_weights(weights, fused):
    """Sum in LANES lanes, then add one half to the other; if not `fused`, first sum each half one after another."""
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
