"""The compiled inner loop of `ordered`; see fp8/kernels/loops.py for how numba is used."""

import math

import numba as nb
import numpy as np

LANES = 16
"""Partial sums of the weights, added up half by half."""
f32 = np.float32


@nb.njit(nogil=True, cache=True, error_model="numpy")
def attend(query, key, value, out):
    """query [n, heads, s, d], scaled, key [n, d, s], value [n, s, d] -> out, as query; float32."""
    n, heads, s, d = query.shape
    scores, lanes = np.empty(s, f32), np.empty(LANES, f32)
    for i in range(n):
        for h in range(heads):
            for row in range(s):
                seen, result = scores[: row + 1], out[i, h, row]
                seen[:] = f32(0)
                for c in range(d):
                    factor, keys = query[i, h, row, c], key[i, c]
                    for j in range(len(seen)):
                        seen[j] += f32(factor * keys[j])
                largest = seen.max()
                lanes[:] = f32(0)
                result[:] = f32(0)
                for j in range(len(seen)):
                    weight, values = f32(math.exp(np.float64(seen[j] - largest))), value[i, j]
                    lanes[j % LANES] += weight
                    for c in range(d):
                        result[c] += f32(weight * values[c])
                low, high = f32(0), f32(0)
                for j in range(LANES // 2):
                    low += lanes[j]
                    high += lanes[LANES // 2 + j]
                share = f32(1) / (low + high)
                for c in range(d):
                    result[c] *= share
