"""Fewer points than were measured, without losing what stands out."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

Point = tuple[float, float]
Value = TypeVar("Value")


def extremes(points: Sequence[Point], most: int) -> list[Point]:
    """The lowest and the highest point of each of most / 2 stretches; all where there are no more than `most`."""
    if len(points) <= most:
        return list(points)
    kept: list[Point] = []
    for stretch in stretches(points, most // 2):
        low, high = (pick(stretch, key=lambda point: point[1]) for pick in (min, max))
        kept += sorted({low, high})
    return kept


def running_mean(points: Sequence[Point], over: int) -> list[Point]:
    """Mean over the last `over` values at each of them, once there are as many."""
    total, means = 0.0, []
    for i, (x, y) in enumerate(points):
        total += y - (points[i - over][1] if i >= over else 0.0)
        if i >= over - 1:
            means.append((x, total / over))
    return means


def stretches(values: Sequence[Value], count: int) -> list[Sequence[Value]]:
    """`count` parts, one after the other and as even as they go; fewer where there are fewer values."""
    count = min(count, len(values))
    ends = [round(i * len(values) / count) for i in range(count + 1)]
    return [values[start:end] for start, end in pairwise(ends)]
