"""Correlation of pairs that come in parts: each part's spread is taken about its own mean, so that pairs that lie close
together lose nothing to the difference of large sums.

A part is float64 [6]: number of pairs, mean x, mean y, and the sums of dx dx, dy dy, dx dy, d from the mean.
"""

import math

import torch
from torch import Tensor

EMPTY = (0.0,) * 6


def part(x: Tensor, y: Tensor, live: Tensor) -> Tensor:
    """The part of the pairs for which `live` is 1; float64, all of one shape, x and y 0 where `live` is."""
    n = live.sum()
    means = torch.stack([x.sum(), y.sum()]) / n.clamp(min=1)
    dx, dy = ((side - mean).mul_(live).flatten() for side, mean in zip((x, y), means, strict=True))
    return torch.stack([n, *means, dx.dot(dx), dy.dot(dy), dx.dot(dy)])


def joined(a: Tensor, b: Tensor) -> Tensor:
    """The part that holds the pairs of both (Chan, Golub and LeVeque 1979, eq. 2.1)."""
    n = a[0] + b[0]
    share = b[0] / n.clamp(min=1)
    dx, dy = apart = b[1:3] - a[1:3]
    spreads = a[3:] + b[3:] + torch.stack([dx * dx, dy * dy, dx * dy]) * (a[0] * share)
    return torch.cat([n[None], a[1:3] + apart * share, spreads])


def correlation(pairs: Tensor) -> float | None:
    """Pearson's correlation; None, as undefined, where x or y varies by less than the rounding of float32."""
    n, *means, xx, yy, xy = pairs.tolist()
    if any(not spread > 1e-12 * (spread + n * mean**2) for spread, mean in zip((xx, yy), means, strict=True)):
        return None
    return xy / math.sqrt(xx * yy)
