"""Reduction of the points of a line that keeps the outliers."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

Point = tuple[float, float]
Value = TypeVar("Value")


def keep_extremes(points: Sequence[Point], limit: int) -> list[Point]:
    """Return the lowest and the highest point of each of limit / 2 stretches; all points if `limit` allows it."""
    if len(points) <= limit:
        return list(points)
    extremes: list[Point] = []
    for stretch in split_evenly(points, limit // 2):
        low, high = (pick(stretch, key=lambda point: point[1]) for pick in (min, max))
        extremes += sorted({low, high})
    return extremes


def compute_running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Return the mean of the last `window` values at each point, from the point number `window` on.

    The mean of equal values is that value, and not one that the rounding of earlier values has moved.
    """
    total, equal, means = 0.0, 0, []
    for i, (x, y) in enumerate(points):
        total += y - (points[i - window][1] if i >= window else 0.0)
        equal = equal + 1 if i and points[i - 1][1] == y else 1
        if equal >= window:
            total = y * window
        if i >= window - 1:
            means.append((x, y if equal >= window else total / window))
    return means


def split_evenly(values: Sequence[Value], count: int) -> list[Sequence[Value]]:
    """Return `count` consecutive parts of nearly equal length; fewer parts if there are fewer values."""
    count = min(count, len(values))
    ends = [round(i * len(values) / count) for i in range(count + 1)]
    return [values[start:end] for start, end in pairwise(ends)]
