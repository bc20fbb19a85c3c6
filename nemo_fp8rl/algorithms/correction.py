"""Rollout correction: weights for tokens that another policy than the trainer's sampled.

    rho = exp(log pi_train - log pi_rollout)        trainer over rollout, always in this direction

pi_train is the trainer's own recomputation before the update (`prev_logprobs`), pi_rollout the engine's.
"""

import torch
from torch import Tensor


class RolloutError(RuntimeError):
    """A rollout that must not be trained on."""


def token_importance_ratio(train_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """rho of every token, float32, shaped as its arguments [B, T]; 0 outside the mask, whatever the padding holds.

    Raises RolloutError when a masked-in log-probability is not finite: such a batch was not sampled by these weights.
    """
    inside = mask > 0
    log_ratio = torch.where(inside, train_logprobs - rollout_logprobs, 0.0)
    if not torch.isfinite(log_ratio).all():
        count = int((~torch.isfinite(log_ratio)).sum())
        raise RolloutError(
            f"{count} of {int(inside.sum())} generated tokens have a log-probability that is not finite in "
            "generation_logprobs or prev_logprobs; check the last refit and the sampling parameters"
        )
    return torch.where(inside, log_ratio.exp(), 0.0)


def truncated_importance_weights(ratio: Tensor, maximum: float, minimum: float = 0.0) -> Tensor:
    """Token TIS: w = min(rho, maximum), floored at `minimum` (NeMo RL `tis`; Yao et al. 2025). No gradient."""
    return ratio.detach().clamp(minimum, maximum)
