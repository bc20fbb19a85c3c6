"""A box of a tensor: what is held, or wanted, of one that ranks have split among them."""

from collections.abc import Sequence

Region = tuple[tuple[int, int], ...]
"""(start, stop) of every dimension."""


def whole(shape: Sequence[int]) -> Region:
    return tuple((0, size) for size in shape)


def placed(start: Sequence[int], shape: Sequence[int]) -> Region:
    """The region of a part of this shape that begins at `start`."""
    return tuple((a, a + size) for a, size in zip(start, shape, strict=True))


def shape_of(region: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def start_of(region: Region) -> tuple[int, ...]:
    return tuple(start for start, _ in region)


def overlap(a: Region, b: Region) -> Region | None:
    """What both hold; None where that is nothing."""
    common = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def index(region: Region, within: Region | None = None) -> tuple[slice, ...]:
    """How to take the region from a tensor that holds the region `within`; None: all of it."""
    start = start_of(within) if within is not None else (0,) * len(region)
    return tuple(slice(a - origin, b - origin) for (a, b), origin in zip(region, start, strict=True))
