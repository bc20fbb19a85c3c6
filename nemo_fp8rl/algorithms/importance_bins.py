"""Bins of a histogram of log importance weights l = log rho, for its writer and for its chart, which needs no torch.

The bins are evenly spaced in log |l| on both sides of 0, four a decade from 1e-4 to 10: policies that agree differ by
1e-4, others by 1, and one histogram has to show both. The bin in the middle holds all smaller differences.
"""

from typing import Any, TypeGuard

SMALLEST, DECADES, BINS_A_DECADE = -4, 5, 4
"""SMALLEST: log10 of the edges of the bin in the middle."""
POSITIVE = tuple(10 ** (SMALLEST + k / BINS_A_DECADE) for k in range(DECADES * BINS_A_DECADE + 1))
EDGES = (*(-edge for edge in reversed(POSITIVE)), *POSITIVE)

Bin = tuple[float | None, float | None, int]
"""(lower edge, upper edge, tokens); an edge is None where the bin has no end. The upper edge belongs to the bin."""
LARGEST, MOST_TOKENS = 10 * EDGES[-1], 2**53
"""exp(LARGEST) is finite."""


def is_bin(value: Any) -> TypeGuard[Bin]:
    """True for a bin that a chart can draw: its numbers are in order, and no edge is 0, which has no logarithm."""
    if not (isinstance(value, tuple) and len(value) == 3):
        return False
    edges = [edge for edge in value[:2] if edge is not None]
    return (
        type(value[2]) is int
        and 0 <= value[2] < MOST_TOKENS
        and len(edges) > 0
        and all(isinstance(edge, int | float) and 0 < abs(edge) <= LARGEST for edge in edges)
        and (len(edges) == 1 or edges[0] < edges[1])
    )
