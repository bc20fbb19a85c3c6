"""Which answers of a step train, and how often (Shuffle-R1, arXiv 2508.05612).

    pairs    the 2N answers of a group are sorted by advantage, and the i-th best answer is the partner of the i-th
             worst; the first pairs have the largest contrast and are kept
    shuffle  pair j has the weight W_j = |A_j1| + |A_j2|. Every round draws pairs of the whole step without replacement,
             each next one with probability W_j / sum of the W that are left. The rounds one after another are the
             batch, in which an answer may occur once a round

The released code stops with an error where fewer pairs have a weight than a round draws, as in a step whose groups are
nearly all of equal rewards. Here such a round takes every pair with a weight and fills up from them.
"""

import torch
from torch import Tensor


def pair_by_contrast(advantages: Tensor, group_ids: Tensor, count: int) -> Tensor:
    """Return the rows of the pairs of largest contrast, int64 [groups * count, 2], the better answer first.

    advantages:  float [B], of answers; equal ones keep their order
    group_ids:   int64 [B], answers of one prompt share a value, in any order
    count:       pairs of a group that are kept, at most half of its answers
    Raises:      ValueError on groups of an odd size or of several sizes
    Source:      xiaomi-research/shuffle-r1, compute_pairwise_purning_grpo_advantage
    """
    _, group, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    size = int(sizes[0])
    if (sizes != size).any() or size % 2 or not 0 < count <= size // 2:
        raise ValueError(f"{count} pairs of groups of {sizes.unique().tolist()} answers: groups must be even and alike")
    order = advantages.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)].view(-1, size)
    return torch.stack([order[:, :count], order.flip(1)[:, :count]], -1).reshape(-1, 2)


def draw_pairs(weights: Tensor, rounds: int, count: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """Return the pairs of every round, int64 [rounds, count], and how many of them fill a round up.

    A round with fewer pairs of a weight above 0 than `count` takes them all, and fills up from them with equal chances,
    with replacement. Where no pair has a weight, a round draws from all with equal chances, and all its draws count as
    filled: such pairs have no gradient.

    weights:    float [pairs], 0 or more; a pair of weight 0 is drawn only where no pair has a weight
    count:      draws of a round, at most the number of pairs
    generator:  of the CPU
    Raises:     ValueError on a weight that is negative or not finite, and on more draws than pairs

    Draws come from keys E_j / W_j with E_j of the exponential distribution: the pairs in the order of their keys have
    the law of draws one after another without replacement (Efraimidis and Spirakis, 2006).
    """
    if not (weights.isfinite() & (weights >= 0)).all() or count > len(weights):
        raise ValueError(f"{count} draws from {len(weights)} pairs: weights must be finite and not negative")
    has_weight = bool((weights > 0).any())
    values = weights.double() if has_weight else torch.ones(len(weights), dtype=torch.float64)
    candidates = (values > 0).nonzero()[:, 0]
    draws = [_draw(candidates, values[candidates], count, generator) for _ in range(rounds)]
    missing = max(0, count - len(candidates)) if has_weight else count
    return torch.stack(draws), rounds * missing


def _draw(candidates: Tensor, weights: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` of the candidates, int64 [count]; weights float64 above 0."""
    keys = torch.empty_like(weights).exponential_(generator=generator) / weights
    first = candidates[keys.argsort(stable=True)[:count]]
    extra = torch.randint(len(candidates), (count - len(first),), generator=generator)
    return torch.cat([first, candidates[extra]])
