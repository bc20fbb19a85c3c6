"""The compiled loops that find the largest magnitude of each block, and E4M3's scales by it."""

import numba as nb
import numpy as np

from nemo_fp8rl.fp8.kernels.on_cpu.bits import f32, float32, magnitude, power_not_above, power_not_below
from nemo_fp8rl.fp8.kernels.on_cpu.compiled import jit

FP32, POW2, E8M0 = 0, 1, 2
"""The rules of scales."""


@jit
def column_maxima(x, start, stride, rows, maxima):
    """Fill `maxima`, one per column, over the rows of flat x that begin at `start`, `start + stride`, ..."""
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


@jit
def pair_maxima(values, maxima):
    """Fill `maxima` with the larger magnitude of each two neighbours."""
    for k in range(len(maxima)):
        maxima[k] = max(magnitude(values[2 * k]), magnitude(values[2 * k + 1]))


@jit
def block_maxima(values, width, maxima):
    """Fill `maxima` with the largest magnitude of each `width` neighbours; the last may be fewer.

    LLVM makes no vector code of a maximum over few values. Where the width is a power of two, pairs are halved until
    one value per block is left.
    """
    whole = 0
    if width & (width - 1) == 0:
        whole = len(values) // width
        scratch, first = np.empty(len(values), values.dtype), 0
        source, count = values[: whole * width], whole * width
        while count > 2 * whole:
            count //= 2
            target = scratch[first : first + count]
            pair_maxima(source, target)
            source = target
            first += count
        if width > 1:
            pair_maxima(source, maxima[:whole])
        else:
            for k in range(whole):
                maxima[k] = magnitude(source[k])
    for j in range(whole, len(maxima)):
        m = magnitude(values[j * width])
        for k in range(j * width + 1, min(len(values), j * width + width)):
            m = max(m, magnitude(values[k]))
        maxima[j] = m


@jit
def strip_maxima(x, start, stride, rows, width, columns, maxima):
    """Fill `maxima`, one per block, of a strip. columns: scratch, one per column."""
    if rows == 1:
        block_maxima(x[start : start + len(columns)], width, maxima)
    else:
        column_maxima(x, start, stride, rows, columns)
        block_maxima(columns, width, maxima)


@nb.njit(error_model="numpy")
def block_scale(m, rule, largest):
    """Return E4M3's scale for the bits of amax; NaN if amax is not finite."""
    amax = float32(m)
    quotient = f32(448) / amax
    scale = f32(1) if amax == f32(0) else (largest if np.isinf(quotient) else quotient)
    if rule == POW2:
        scale = power_not_above(scale)
    elif rule == E8M0:
        scale = f32(1) / power_not_below(amax * f32(1 / 448))
    return scale if np.isfinite(amax) else f32(np.nan)


@jit
def block_scales(maxima, rule, largest, scales, scale_inv):
    """Fill `scales` and their inverses `scale_inv`, one per block."""
    for j in range(len(maxima)):
        scale = block_scale(maxima[j], rule, largest)
        scales[j] = scale
        scale_inv[j] = f32(1) / scale


@jit
def strip_scales(x, start, stride, rows, width, rule, largest, columns, scales, scale_inv):
    """Fill `scales`, one per column, and their inverses `scale_inv`, one per block, of a strip.

    columns: scratch, one per column
    """
    maxima = np.empty(len(scale_inv), columns.dtype)
    strip_maxima(x, start, stride, rows, width, columns, maxima)
    if width == 1:
        block_scales(maxima, rule, largest, scales, scale_inv)
        return
    of_blocks = np.empty(len(scale_inv), f32)
    block_scales(maxima, rule, largest, of_blocks, scale_inv)
    repeat(of_blocks, width, scales)


@jit
def repeat(of_blocks, width, columns):
    """Fill `columns` with the number of each column's block."""
    for j in range(len(of_blocks)):
        columns[j * width : j * width + width] = of_blocks[j]
