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
    advantages = torch.zeros(len(rewards), dtype=torch.float64)
    for group in torch.unique(group_ids):
        members = (group_ids == group).nonzero()[:, 0]
        if len(members) > 1:
            own = rewards[members].double()
            advantages[members] = _relative(own, normalize_rewards, use_leave_one_out_baseline)
    return advantages.float()


def _relative(rewards: Tensor, normalize: bool, leave_one_out: bool) -> Tensor:
    """Advantages within one group of two or more, float64 [G]."""
    g = len(rewards)
    compared = rewards.expand(g, g)  # row i: what sample i is compared with
    if leave_one_out:
        compared = compared[~torch.eye(g, dtype=torch.bool)].view(g, g - 1)
    equal = compared.amin(1) == compared.amax(1)  # decided exactly: a mean of equal values need not equal them
    advantages = rewards - torch.where(equal, compared[:, 0], compared.mean(1))
    if not normalize:
        return advantages
    std = compared.std(1) if compared.size(1) > 1 else torch.zeros(g, dtype=torch.float64)
    return torch.where(equal, advantages, advantages / (std + STD_EPSILON))
