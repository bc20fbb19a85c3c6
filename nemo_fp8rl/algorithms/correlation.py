"""Correlation of pairs that come in parts. The spread of a part is taken about the mean of the part, so that no
precision is lost to a difference of large sums where pairs lie close together.

A part is float64 [6]: number of pairs, mean x, mean y, and the sums of dx dx, dy dy and dx dy, where d is the distance
from the mean.
"""

import math

import torch
from torch import Tensor

EMPTY = (0.0,) * 6


def make_part(x: Tensor, y: Tensor, live: Tensor) -> Tensor:
    """Return the part of the pairs for which `live` is 1.

    x, y, live:  float64 of one shape; x and y are 0 where live is 0
    """
    n = live.sum()
    means = torch.stack([x.sum(), y.sum()]) / n.clamp(min=1)
    dx, dy = ((side - mean).mul_(live).flatten() for side, mean in zip((x, y), means, strict=True))
    return torch.stack([n, *means, dx.dot(dx), dy.dot(dy), dx.dot(dy)])


def merge_parts(a: Tensor, b: Tensor) -> Tensor:
    """Return the part of the pairs of both (Chan, Golub and LeVeque 1979, eq. 2.1)."""
    n = a[0] + b[0]
    share = b[0] / n.clamp(min=1)
    dx, dy = distance = b[1:3] - a[1:3]
    spreads = a[3:] + b[3:] + torch.stack([dx * dx, dy * dy, dx * dy]) * (a[0] * share)
    return torch.cat([n[None], a[1:3] + distance * share, spreads])


def correlation(pairs: Tensor) -> float | None:
    """Return Pearson's correlation; None where x or y varies by less than the rounding of float32."""
    n, *means, xx, yy, xy = pairs.tolist()
    if any(not spread > 1e-12 * (spread + n * mean**2) for spread, mean in zip((xx, yy), means, strict=True)):
        return None
    return xy / math.sqrt(xx * yy)
