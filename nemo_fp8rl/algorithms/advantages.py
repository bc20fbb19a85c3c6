"""Advantages from rewards, and the changes that DAPO makes to rewards. Names and formulas are NeMo RL's.

    GRPO         A = (r - mean) / (std + 1e-6) within the group of a prompt          arXiv 2402.03300, eq. 3
    RLOO         A = r - mean of the OTHER samples of the group                      arXiv 2402.14740:
                 group_advantages(normalize_rewards=False, use_leave_one_out_baseline=True)
    REINFORCE++  A = (r - group mean - KL penalty of the token), whitened over all   arXiv 2501.03262
                 tokens of the batch
    DAPO         groups whose rewards are all equal are replaced by further prompts,  arXiv 2503.14476, eq. 11 and 13
                 answers close to the length limit lose reward

All arithmetic is float64. Equality of the rewards of a group is exact and not decided by a rounded deviation.
Left out: critics (GAE), several rewards at once (GDPO).
"""

import math

import torch
from torch import Tensor

from nemo_fp8rl.common.errors import UserError

STD_EPSILON = 1e-6
VARIANCE_FLOOR = 1e-8


def group_advantages(
    rewards: Tensor, group_ids: Tensor, *, normalize_rewards: bool = True, use_leave_one_out_baseline: bool = False
) -> Tensor:
    """Return the advantage of each sample, float32 [B].

    rewards:                     float32 [B]
    group_ids:                   int64 [B], samples of one prompt share a value, in any order
    normalize_rewards:           divide by the standard deviation of the group
    use_leave_one_out_baseline:  compare with the mean (and deviation) of the OTHER samples; RLOO is this alone
    Raises:  ValueError on shapes or dtypes that do not fit and on rewards that are not finite
    Source:  NeMo RL, GRPOAdvantageEstimator

    A group whose rewards are all equal, or of one sample, gives 0.
    """
    _check(rewards, group_ids)
    advantages = torch.zeros_like(rewards, dtype=torch.float64)
    _, group, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    by_group = group.argsort(stable=True)
    for size in sizes.unique().tolist():  # all groups of one size at once; sizes differ only if samples were dropped
        members = by_group[(sizes == size)[group[by_group]]].view(-1, size)
        if size > 1:
            advantages[members] = _relative(rewards[members].double(), normalize_rewards, use_leave_one_out_baseline)
    return advantages.float()


def reinforce_plus_plus_advantages(
    rewards: Tensor, group_ids: Tensor, mask: Tensor, *, minus_baseline: bool = True, kl: Tensor | None = None
) -> Tensor:
    """Return the advantage of each token, float32 [B, T], 0 outside the mask.

    rewards:         float32 [B]
    group_ids:       int64 [B], as in `group_advantages`
    mask:            float32 or bool [B, T], nonzero where a token takes part
    minus_baseline:  subtract the mean reward of the group, of all its samples, also dropped ones
    kl:              float32 [B, T], the penalty of each token times its coefficient; not read outside the mask
    Source:          NeMo RL, ReinforcePlusPlusAdvantageEstimator

        a = r - baseline - kl;  A = (a - mean a) / sqrt(max(var a, 1e-8)), over all tokens of the mask

    The batch must be whole, because a microbatch would be whitened by its own mean. The variance divides by the count.
    An empty mask, for example after the filter of truncated answers, gives zeros. Raises ValueError on shapes or dtypes
    that do not fit, a KL that is not finite, and, with minus_baseline, on a group of one sample.
    """
    _check(rewards, group_ids)
    if mask.dim() != 2 or len(mask) != len(rewards):
        raise ValueError(f"mask {list(mask.shape)} must be [B, T] with B = {len(rewards)}, the number of rewards")
    inside = mask > 0
    count = max(1, int(inside.sum()))
    values = rewards.double()
    if minus_baseline:
        group, sizes = _groups_of_two(group_ids, "a baseline; or set grpo.adv_estimator.minus_baseline=false")
        values = values - (values.new_zeros(len(sizes)).index_add_(0, group, values) / sizes)[group]
    tokens = values[:, None].expand(mask.shape)
    if kl is not None:
        tokens = tokens - _penalty(kl, inside)
    mean = torch.where(inside, tokens, 0.0).sum() / count
    centred = torch.where(inside, tokens - mean, 0.0)
    variance = centred.square().sum() / count
    return (centred / variance.clamp(min=VARIANCE_FLOOR).sqrt()).float()


def groups_with_signal(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return which samples are in groups whose rewards differ, bool [B]; dynamic sampling keeps these (DAPO, eq. 11).

    rewards:    float32 [B], before shaping: a penalty on length would make every group differ
    group_ids:  int64 [B]
    Raises:     ValueError as `group_advantages`, and on a group of one sample

    Equality is exact. NeMo RL requires a deviation that is not 0, but in float32 that of ten rewards of 0.1 is 5e-5.
    """
    _check(rewards, group_ids)
    group, sizes = _groups_of_two(group_ids, "rewards to differ")
    extrema = rewards.new_zeros(2, len(sizes))
    for values, reduction in zip(extrema, ("amin", "amax"), strict=True):
        values.scatter_reduce_(0, group, rewards, reduction, include_self=False)
    return (extrema[0] != extrema[1])[group]


def group_metrics(rewards: Tensor, group_ids: Tensor) -> dict[str, float]:
    """Return how many groups give a gradient, under TRL's and NeMo RL's names; arguments as `groups_with_signal`.

    frac_reward_zero_std:   share of the groups whose rewards are all equal
    baseline_reward/pct_*:  per cent of the groups whose mean reward is 0, or 1, or another value (NeMo RL counts
                            samples, and with a leave-one-out baseline the mean of the others)
    """
    group, sizes = _groups_of_two(group_ids, "rewards to differ")
    means = rewards.double().new_zeros(len(sizes)).index_add_(0, group, rewards.double()) / sizes
    of_0, of_1 = (100 * float((means == value).double().mean()) for value in (0, 1))
    with_signal = torch.zeros(len(sizes), dtype=torch.bool)
    with_signal[group] = groups_with_signal(rewards, group_ids)
    return {
        "frac_reward_zero_std": 1 - float(with_signal.double().mean()),
        "baseline_reward/pct_0": of_0,
        "baseline_reward/pct_1": of_1,
        "baseline_reward/pct_mixed": 100 - of_0 - of_1,
    }


def overlong_penalty(
    lengths: Tensor, *, max_response_length: int, overlong_buffer_length: int, overlong_buffer_penalty: float
) -> Tensor:
    """Return what DAPO's soft overlong punishment adds to a reward (eq. 13), float32 [B], 0 or less.

    lengths:  int64 [B], generated tokens
    Raises:   UserError on values out of range

    With start = max_response_length - overlong_buffer_length it is

        0                                                                    up to start
        -overlong_buffer_penalty (length - start) / overlong_buffer_length   up to max_response_length
        -overlong_buffer_penalty                                             beyond

    NeMo RL (grpo.reward_shaping, same names) gives the same up to max_response_length and lets the penalty grow beyond
    it, against the paper and the comment in its code. This function bounds it, so that one very long answer does not
    set the deviation of its whole group. The two differ only where the engine may generate more than
    max_response_length tokens.
    """
    block = "grpo.reward_shaping"
    if lengths.dim() != 1:
        raise ValueError(f"lengths {list(lengths.shape)} must be [B]")
    if not 0 < overlong_buffer_length <= max_response_length:
        raise UserError(
            f"{block}.overlong_buffer_length={overlong_buffer_length} must be in 1..{block}.max_response_length="
            f"{max_response_length}"
        )
    if not 0 <= overlong_buffer_penalty < math.inf:
        raise UserError(f"{block}.overlong_buffer_penalty={overlong_buffer_penalty} must be a finite number, 0 or more")
    start = max_response_length - overlong_buffer_length
    share = ((start - lengths).double() / overlong_buffer_length).clamp(-1, 0)
    return (overlong_buffer_penalty * share).float()


def stop_properly_penalty(rewards: Tensor, truncated: Tensor, coefficient: float) -> Tensor:
    """Return the rewards with those of truncated answers times `coefficient`, float32 [B].

    rewards:      float32 [B], 0 or more: a negative reward would become less negative
    truncated:    bool [B], answers that ran into the length limit
    coefficient:  0..1; 0 removes the reward
    Source:       NeMo RL, stop_properly_penalty_coef
    """
    if rewards.dim() != 1 or truncated.shape != rewards.shape or truncated.dtype is not torch.bool:
        raise ValueError(
            f"truncated, {truncated.dtype} {list(truncated.shape)}, must be bool [B] as the rewards "
            f"{list(rewards.shape)} are [B]"
        )
    if not 0 <= coefficient <= 1:
        raise UserError(f"grpo.reward_shaping.stop_properly_penalty_coef={coefficient} must lie in 0..1")
    return torch.where(truncated, rewards * coefficient, rewards).float()


def _relative(rewards: Tensor, normalize: bool, leave_one_out: bool) -> Tensor:
    """Advantages within groups of two or more; rewards and result float64 [groups, G]."""
    n, g = rewards.shape
    compared = rewards[:, None].expand(n, g, g)  # [group, i]: the samples with which sample i is compared
    if leave_one_out:
        others = ~torch.eye(g, dtype=torch.bool, device=rewards.device)
        compared = compared[:, others].view(n, g, g - 1)
    equal = compared.amin(-1) == compared.amax(-1)  # decided exactly: a mean of equal values need not equal them
    advantages = rewards - torch.where(equal, compared[..., 0], compared.mean(-1))
    if not normalize:
        return advantages
    std = compared.std(-1) if compared.size(-1) > 1 else torch.zeros_like(rewards)
    return torch.where(equal, advantages, advantages / (std + STD_EPSILON))


def _penalty(kl: Tensor, inside: Tensor) -> Tensor:
    """The KL inside the mask and 0 elsewhere, float64 [B, T]."""
    if kl.shape != inside.shape:
        raise ValueError(f"kl {list(kl.shape)} must have the mask's shape, {list(inside.shape)}")
    kl = torch.where(inside, kl.double(), 0.0)
    if not kl.isfinite().all():
        raise ValueError(f"kl is not finite at {int((~kl.isfinite()).sum())} tokens of the mask")
    return kl


def _groups_of_two(group_ids: Tensor, purpose: str) -> tuple[Tensor, Tensor]:
    """(group of each sample as 0, 1, ..., int64 [B]; samples of each group). Raises ValueError on a group of one."""
    names, group, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    if (sizes == 1).any():
        raise ValueError(
            f"group {names[sizes == 1][0].item()} has one sample and nothing to compare it with: set "
            f"grpo.num_generations_per_prompt to 2 or more for {purpose}"
        )
    return group, sizes


def _check(rewards: Tensor, group_ids: Tensor) -> None:
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be [B]")
    if not rewards.is_floating_point():
        raise ValueError(f"rewards must be floating point, got {rewards.dtype}")
    if group_ids.is_floating_point() or group_ids.dtype is torch.bool:
        raise ValueError(f"group_ids must be integers, got {group_ids.dtype}")
    if not rewards.isfinite().all():
        bad = (~rewards.isfinite()).nonzero()[:, 0].tolist()
        raise ValueError(f"the rewards of {len(bad)} samples are not finite, the first is sample {bad[0]}")
