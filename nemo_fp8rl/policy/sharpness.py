"""Sharpness of the cross entropy at a token's logits: its relative rise at the worst point of a small box.

    phi = 100 (max_{|y_i| <= d_i} CE(x + y) - CE(x)) / (1 + CE(x)),   d_i = epsilon (|x_i| + 1)

This is the measure of Keskar et al. (arXiv 1609.04836) with the logits of a token as its variables (arXiv 2405.18710).
Both look for the maximum with an optimizer. It has a closed form: CE rises in every logit but the target's, in which it
falls, so the maximum is at one vertex of the box: y_i = d_i for i != target, y_target = -d_target. With p = softmax(x)

    CE(x + y) - CE(x) = log(1 + sum_{i != target} p_i (e^(d_i + d_target) - 1)),

a sum of positive terms: the difference of two cross entropies would lose most of the digits of so small a rise.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def sharpness(
    logits: Tensor, targets: Tensor, epsilon: float, first_token: int = 0, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the sharpness of each token, float32 [N]; all ranks of the group get the same values.

    logits:       float32 [N, V], or this rank's columns of them; -inf excludes a token, in the box as in the softmax
    targets:      int64 [N], token ids
    epsilon:      half the side of the box, of a logit x in units of |x| + 1
    first_token:  token id of the first column
    group:        ranks that share the vocabulary; None for one rank
    """
    return combine(sum_columns(logits, targets, epsilon, first_token), epsilon, group)


def sum_columns(logits: Tensor, targets: Tensor, epsilon: float, first_token: int = 0) -> Tensor:
    """Return what `combine` needs of this rank's columns, float32 [SUMS, N]; the arguments are those of `sharpness`.

    The rows are the largest logit, the sums over i != target of w_i = e^(x_i - largest) and of w_i (e^d_i - 1), and the
    target's logit, 0 where another rank has it.
    """
    columns = (targets - first_token)[:, None]
    is_local = ((columns >= 0) & (columns < logits.size(1))).squeeze(1)
    columns = columns.clamp(0, logits.size(1) - 1)
    largest = logits.amax(-1).clamp_min(torch.finfo(logits.dtype).min)  # where a rank has no token that takes part
    weights = (logits - largest[:, None]).exp_()
    weights.scatter_(1, columns, weights.gather(1, columns).masked_fill(is_local[:, None], 0.0))
    growth = _growth(logits, epsilon).masked_fill_(logits == -torch.inf, 0.0)
    at_target = logits.gather(1, columns).squeeze(1).masked_fill(~is_local, 0.0)
    return torch.stack([largest, weights.sum(-1), growth.mul_(weights).sum(-1), at_target])


SUMS = 4
"""Rows of `sum_columns`."""


def combine(sums: Tensor, epsilon: float, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sharpness of each token from all ranks' `sum_columns`, float32 [N]."""
    largest, *others_rise_target = sums
    if group is not None and group.size() > 1:
        largest = largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        scale = (sums[0] - largest).exp()
        shared = torch.stack([sums[1] * scale, sums[2] * scale, sums[3]])
        dist.all_reduce(shared, group=group)
        others_rise_target = list(shared)
    others, rise, at_target = others_rise_target
    total = others + (at_target - largest).exp()
    growth_of_target = _growth(at_target, epsilon)
    # e^(a + b) - 1 = (e^a - 1) e^b + e^b - 1, so that a rank needs no other rank's logits
    rise = (rise * (1 + growth_of_target) + others * growth_of_target) / total
    cross_entropy = total.log() + largest - at_target
    return 100 * rise.log1p() / (1 + cross_entropy)


def _growth(logits: Tensor, epsilon: float) -> Tensor:
    """Return e^d - 1."""
    return logits.abs().add_(1).mul_(epsilon).expm1_()


def sharpness_metrics(values: Tensor, mask: Tensor) -> dict[str, float]:
    """Return sharpness, the mean over all tokens, and sharpness_last_token, that over the last token of each row.

    The result is empty without a token.
    values:  float32 [B, T], of each token, given the tokens before it
    mask:    [B, T], not 0 at the tokens of answers
    """
    inside = mask > 0
    rows = inside.any(1)
    if not rows.any():
        return {}
    last = inside.size(1) - 1 - inside.flip(1).int().argmax(1)
    at_last = values.gather(1, last[:, None]).squeeze(1)
    return {"sharpness": float(values[inside].mean()), "sharpness_last_token": float(at_last[rows].mean())}
