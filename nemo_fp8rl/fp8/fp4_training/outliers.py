"""Outlier clamp and compensation of activations (arXiv 2501.17116): a token's extremes do not widen its blocks' scales.

A token is clamped to quantiles of its own values, so that it does not depend on the tokens of its batch; the paper
takes those of the whole tensor. What the clamp takes away is multiplied in high precision and added.
"""

import math

from torch import Tensor


def split_outliers(x: Tensor, quantile: float) -> tuple[Tensor, Tensor]:
    """Return (x clamped to its quantiles, x's dtype, the rest, float32), whose sum is x; x is [M, K].

    quantile: the upper one, above 0.5; the bounds are values of the token, so that it keeps its dtype
    """
    beyond = math.floor((1 - quantile) * x.size(1) + 1e-9)
    if not beyond or not x.size(0):
        return x, x.new_zeros((), dtype=x.float().dtype)
    upper, lower = (x.topk(beyond + 1, 1, largest).values[:, -1:] for largest in (True, False))
    clamped = x.clamp(lower, upper)
    return clamped, x.float() - clamped.float()
