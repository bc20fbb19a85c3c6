"""The losses that a policy minimizes: GRPO with truncated importance sampling, and supervised NLL for the warm-up.

A loss is called once a microbatch with the log-probs of the current policy and the GLOBAL counts of valid tokens and
sequences; it returns (loss, metrics), both already divided by a global count, so that summing over microbatches and
ranks gives the value of the whole batch. This is NeMo RL's LossFunction protocol.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from nemo_fp8rl.algorithms.correction import token_importance_ratio, truncated_importance_weights
from nemo_fp8rl.batch import TrainBatch
from nemo_fp8rl.errors import UserError


@dataclass(frozen=True)
class LossConfig:
    """NeMo RL's `loss_fn` block, as far as this loss goes; names and meanings are its own."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    ratio_clip_min: float = 0.2
    """The ratio is clipped below at 1 - ratio_clip_min."""
    ratio_clip_max: float = 0.28
    """The ratio is clipped above at 1 + ratio_clip_max (clip-higher, DAPO, arXiv 2503.14476)."""
    use_importance_sampling_correction: bool = True
    """Weight each token by pi_train / pi_rollout."""
    truncated_importance_sampling_type: Literal["tis"] | None = "tis"
    """`tis` clamps the weight; null leaves it as it is."""
    truncated_importance_sampling_ratio: float | None = 2.0
    """Upper bound of the weight."""
    truncated_importance_sampling_ratio_min: float | None = None
    """Lower bound of the weight; null is 0."""
    token_level_loss: bool = True
    """Divide by the global number of valid tokens; the only choice so far."""
    reference_policy_kl_penalty: float = 0.0
    """Weight of the KL to a reference policy; 0, the only choice so far, trains without one."""

    def check(self) -> None:
        """Raise UserError on keys that contradict each other."""
        cap, floor = self.truncated_importance_sampling_ratio, self.truncated_importance_sampling_ratio_min
        if self.truncated_importance_sampling_type and cap is None:
            raise UserError("loss_fn.truncated_importance_sampling_type is set but ..._ratio is null: give the cap")
        if cap is not None and not cap > 0:
            raise UserError("loss_fn.truncated_importance_sampling_ratio must be above 0: 2.0 is a common cap")
        if floor is not None and not 0 <= floor <= (math.inf if cap is None else cap):
            raise UserError(
                f"loss_fn.truncated_importance_sampling_ratio_min={floor} must lie between 0 and "
                f"loss_fn.truncated_importance_sampling_ratio={cap}"
            )
        if not 0 <= self.ratio_clip_min <= 1:
            raise UserError(f"loss_fn.ratio_clip_min={self.ratio_clip_min} must lie in 0..1: 0.2 is common")
        if not self.ratio_clip_max >= 0:
            raise UserError(f"loss_fn.ratio_clip_max={self.ratio_clip_max} must be 0 or more: 0.28 is common")
        if not self.token_level_loss:
            raise UserError("loss_fn.token_level_loss: false is not available here; set it to true")
        if self.reference_policy_kl_penalty != 0:
            raise UserError("loss_fn.reference_policy_kl_penalty must be 0: there is no reference policy here")


class GrpoLoss:
    """Clipped surrogate with per-token truncated importance weights.

    r = exp(curr - prev)                                  the update's own ratio
    w = min(exp(prev - gen), C)                           trainer over rollout, no gradient
    L = sum(mask * w * max(-A r, -A clip(r, 1 - lo, 1 + hi))) / global_valid_toks
    """

    def __init__(self, cfg: LossConfig | Mapping[str, Any]) -> None:
        if not isinstance(cfg, LossConfig):
            unknown = set(cfg) - {f.name for f in fields(LossConfig)}
            if unknown:
                raise UserError(f"loss_fn.{min(unknown)} is not a key of this loss; remove it")
            cfg = LossConfig(**cfg)
        cfg.check()
        self.cfg = cfg

    def __call__(
        self, next_token_logprobs: Tensor, data: TrainBatch, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """next_token_logprobs: [B, T-1], of input_ids[:, 1:] under the current policy, with gradient."""
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        inside = mask > 0
        advantages = torch.where(inside, data["advantages"][:, 1:], 0.0)
        prev, gen = data["prev_logprobs"][:, 1:], data["generation_logprobs"][:, 1:]

        ratio = torch.where(inside, next_token_logprobs - prev, 0.0).exp()
        clipped = ratio.clamp(1 - self.cfg.ratio_clip_min, 1 + self.cfg.ratio_clip_max)
        surrogate = torch.maximum(-advantages * ratio, -advantages * clipped)

        rho = token_importance_ratio(prev, gen, mask)
        weights, out_of_bounds = self._weights(rho)
        loss = (surrogate * weights * mask).sum() / global_valid_toks
        metrics = {
            "loss": loss,
            "probs_ratio": (ratio * mask).sum() / global_valid_toks,
            "probs_ratio_clamped": (clipped * mask).sum() / global_valid_toks,
            "approx_entropy": _entropy(next_token_logprobs, gen, inside) / global_valid_toks,
            "is_oob_ratio": (out_of_bounds * mask).sum() / global_valid_toks,
        }
        return loss, {name: float(value.detach()) for name, value in metrics.items()}

    def _weights(self, rho: Tensor) -> tuple[Tensor, Tensor]:
        """Weight of each token, and 1 where the bound changed it; both [B, T-1]."""
        cfg = self.cfg
        if not cfg.use_importance_sampling_correction:
            return torch.ones_like(rho), torch.zeros_like(rho)
        if cfg.truncated_importance_sampling_type is None:
            return rho.detach(), torch.zeros_like(rho)
        assert cfg.truncated_importance_sampling_ratio is not None  # LossConfig.check
        minimum = cfg.truncated_importance_sampling_ratio_min or 0.0
        weights = truncated_importance_weights(rho, cfg.truncated_importance_sampling_ratio, minimum)
        return weights, (weights != rho).float()


def _entropy(logprobs: Tensor, generation_logprobs: Tensor, inside: Tensor) -> Tensor:
    """Sum over tokens of -(pi / pi_rollout) log pi: NeMo RL's importance-weighted estimate."""
    weighted = (logprobs - generation_logprobs).exp() * logprobs
    return -torch.where(inside, weighted, 0.0).sum()


class NllLoss:
    """Supervised negative log-likelihood per generated token: L = -sum(mask * curr) / global_valid_toks."""

    def __call__(
        self, next_token_logprobs: Tensor, data: TrainBatch, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        loss = -torch.where(mask > 0, next_token_logprobs, 0.0).sum() / global_valid_toks
        return loss, {"loss": float(loss.detach())}
