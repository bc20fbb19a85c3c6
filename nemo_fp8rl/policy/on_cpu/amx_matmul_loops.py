"""The compiled inner loop of `amx_matmul`; fp8/kernels/on_cpu/compiled.py explains the use of numba."""

import numpy as np

from nemo_fp8rl.fp8.kernels.on_cpu.compiled import jit

DEPTH = 32
"""Products that one instruction sums."""
f32 = np.float32


@jit
def add_up(a, b, hidden, smallest, out):
    """Add a [batch, M, K] @ b [batch, K, N] to out [batch, M, N], which must be zeros; all float32.

    hidden:  int64 [batch, M, 2], the first term that a row leaves out, and the one after the last of them
    """
    sums = np.empty((2, out.shape[2]), f32)  # sums of even and of odd products
    for i in range(out.shape[0]):
        for m in range(out.shape[1]):
            row, total, first, end = a[i, m], out[i, m], hidden[i, m, 0], hidden[i, m, 1]
            terms = len(row) - (end - first)
            for start in range(0, terms, DEPTH):
                sums[:] = f32(0)
                for term in range(start, min(start + DEPTH, terms)):
                    k = term if term < first else term + end - first
                    if row[k] != f32(0):  # masked keys have 0
                        factor, partial, values = row[k], sums[term % 2], b[i, k]
                        for n in range(len(partial)):
                            added = f32(partial[n] + f32(factor * values[n]))
                            partial[n] = f32(0) if abs(added) < smallest else added
                for n in range(len(total)):
                    pair = f32(sums[0, n] + sums[1, n])
                    added = f32(total[n] + (f32(0) if abs(pair) < smallest else pair))
                    total[n] = f32(0) if abs(added) < smallest else added
