"""A box of a tensor: the part that a rank has or needs of a tensor that ranks have split among them."""

from collections.abc import Sequence

Region = tuple[tuple[int, int], ...]
"""(start, stop) of every dimension."""


def full_region(shape: Sequence[int]) -> Region:
    """Return the region of the whole tensor."""
    return tuple((0, size) for size in shape)


def region_at(start: Sequence[int], shape: Sequence[int]) -> Region:
    """Return the region of a part of this shape that begins at `start`."""
    return tuple((a, a + size) for a, size in zip(start, shape, strict=True))


def shape_of(region: Region) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in region)


def start_of(region: Region) -> tuple[int, ...]:
    return tuple(start for start, _ in region)


def overlap(a: Region, b: Region) -> Region | None:
    """Return the intersection of two regions; None where it is empty."""
    common = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def region_slices(region: Region, within: Region | None = None) -> tuple[slice, ...]:
    """Return the index that takes the region from a tensor.

    within:  the region that the tensor covers; None: all of it
    """
    start = start_of(within) if within is not None else (0,) * len(region)
    return tuple(slice(a - origin, b - origin) for (a, b), origin in zip(region, start, strict=True))
