"""The bins of a histogram of log importance weights l = log rho: what writes them and what draws them agree on these.

Evenly spaced in log |l| on both sides of 0, four a decade from 1e-4 to 10: sides that agree differ by 1e-4 and sides
that do not by 1, and one histogram has to show both. The bin in the middle holds what agrees better.
"""

from typing import Any, TypeGuard

SMALLEST, DECADES, BINS_A_DECADE = -4, 5, 4
"""SMALLEST: log10 of the edges of the bin in the middle."""
POSITIVE = tuple(10 ** (SMALLEST + k / BINS_A_DECADE) for k in range(DECADES * BINS_A_DECADE + 1))
EDGES = (*(-edge for edge in reversed(POSITIVE)), *POSITIVE)

Bin = tuple[float | None, float | None, int]
"""l above the first, up to the second, None without end; tokens."""
LARGEST, MOST_TOKENS = 10 * EDGES[-1], 2**53
"""exp(LARGEST) is finite."""


def is_bin(given: Any) -> TypeGuard[Bin]:
    """Whether it can be drawn: numbers in their order, and no edge at 0, whose logarithm has no place on the axis."""
    if not (isinstance(given, tuple) and len(given) == 3):
        return False
    edges = [edge for edge in given[:2] if edge is not None]
    return (
        type(given[2]) is int
        and 0 <= given[2] < MOST_TOKENS
        and len(edges) > 0
        and all(isinstance(edge, int | float) and 0 < abs(edge) <= LARGEST for edge in edges)
        and (len(edges) == 1 or edges[0] < edges[1])
    )
