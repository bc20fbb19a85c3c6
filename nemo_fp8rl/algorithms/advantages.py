"""Group-relative advantages (GRPO, arXiv 2402.03300, eq. 3): a sample is judged against the others of its prompt."""

import torch
from torch import Tensor

STD_EPSILON = 1e-6


def group_advantages(
    rewards: Tensor, group_ids: Tensor, *, normalize_rewards: bool = True, use_leave_one_out_baseline: bool = False
) -> Tensor:
    """Advantage of each sample, float32 [B].

    rewards:    float32 [B]
    group_ids:  int64 [B], samples of one prompt share a value
    normalize_rewards divides by the group's standard deviation; use_leave_one_out_baseline compares with the mean of
    the OTHER samples and their deviation (RLOO, arXiv 2402.14740), as NeMo RL does under the same names. A group whose
    rewards are all equal gives 0. A group of one sample carries no signal and gives 0.
    """
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be [B]")
    _, group = torch.unique(group_ids, return_inverse=True)
    rewards = rewards.float()
    groups = int(group.max()) + 1 if len(group) else 0
    held_out = rewards if use_leave_one_out_baseline else torch.zeros_like(rewards)
    count = rewards.new_zeros(groups).index_add_(0, group, torch.ones_like(rewards))[group]
    total = rewards.new_zeros(groups).index_add_(0, group, rewards)[group]
    compared = count - 1 if use_leave_one_out_baseline else count
    baseline = (total - held_out) / compared.clamp(min=1)
    advantages = torch.where(count > 1, rewards - baseline, torch.zeros_like(rewards))
    if not normalize_rewards:
        return advantages
    # Unbiased deviation of the samples compared with; deviations from the group mean keep the sums small.
    deviation = rewards - (total / count)
    squares = rewards.new_zeros(groups).index_add_(0, group, deviation**2)[group]
    held = deviation if use_leave_one_out_baseline else torch.zeros_like(deviation)
    sum_squares = squares - held**2 - held**2 / compared.clamp(min=1)
    std = (sum_squares / (compared - 1).clamp(min=1)).clamp(min=0).sqrt()
    return torch.where(std > 0, advantages / (std + STD_EPSILON), advantages)
