"""Rollout correction: what to do about tokens that another policy than the trainer's sampled.

    l = log pi_train - log pi_rollout          trainer minus rollout, always in this direction
    rho = e^l                                  so a weight above 1 means: the trainer likes this token more

pi_train is the trainer's own recomputation before the update (`prev_logprobs`), pi_rollout the engine's
(`generation_logprobs`). A correction is a weight for every token and a list of rules that reject tokens or sequences;
all rules hold at once. Everything here is without gradient.

    weight       token      w = rho                                      NeMo RL, verl, SkyRL
                 sequence   w = e^(sum of l over the sequence)           verl
                 geometric  w = e^(mean of l over the sequence)          slime, AReaL
    bounds       w is clamped to [weight_min, weight_max]                truncated importance sampling, TIS
    reject       see `Rule`; a rejected token has weight 0
    normalize    w / mean of w over the batch, across ranks              verl

A token whose log-probability is not finite in either policy (a rollout that sampled outside the trainer's top-k, say)
is treated as rejected and counted; more than `max_nonfinite_fraction` of them are an error.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_fp8rl.algorithms.correction_config import LARGEST_LOG, CorrectionConfig, Rule, Weight
from nemo_fp8rl.batch import TrainBatch
from nemo_fp8rl.common.errors import StepRefused

CHUNK_VALUES = 1 << 24
"""Values decided at a time on an accelerator, which bounds the temporaries."""


class RolloutError(StepRefused):
    """A rollout that must not be trained on."""


@dataclass(frozen=True)
class Correction:
    """What was decided about the tokens of a batch.

    weights:    float32 [B, T], 0 where a token is rejected or masked out
    kept:       bool [B, T], tokens that take part
    nonfinite:  float32 [], tokens of the mask without a finite log-probability; they are not kept
    clamped:    bool [B, T], kept or rejected tokens whose weight was outside the bounds, or that a rule rejected
    """

    weights: Tensor
    kept: Tensor
    nonfinite: Tensor
    clamped: Tensor


@torch.no_grad()
def correct(
    prev_logprobs: Tensor,
    generation_logprobs: Tensor,
    mask: Tensor,
    cfg: CorrectionConfig,
    group: "dist.ProcessGroup | None" = None,
) -> Correction:
    """Weights and decisions for every token; all tensors [B, T]. What lies outside the mask is never read.

    cfg: resolved. group: ranks that hold the rest of the batch, for `normalize`; None where this is all of it.
    """
    check_fields(mask.shape, {"prev_logprobs": prev_logprobs, "generation_logprobs": generation_logprobs})
    weights = torch.empty(mask.shape, dtype=torch.float32, device=mask.device)
    kept, clamped = (torch.empty(mask.shape, dtype=torch.bool, device=mask.device) for _ in range(2))
    made = weights, kept, clamped
    if mask.device.type == "cpu":
        from nemo_fp8rl.algorithms.correction_loops import decide

        nonfinite = decide(prev_logprobs, generation_logprobs, mask, cfg, *made)
    else:
        nonfinite = decide_by_torch(prev_logprobs, generation_logprobs, mask, cfg, *made)
    if cfg.normalize:
        weights /= _mean_weight(weights, kept, cfg.weight != "token", group)
    return Correction(weights, kept, nonfinite, clamped)


def corrected_batch(
    batch: TrainBatch, cfg: CorrectionConfig, group: "dist.ProcessGroup | None" = None
) -> tuple[TrainBatch, dict[str, float]]:
    """The batch with `importance_weights` float32 [B, T], and what was done to it.

    With denominator=kept, rejected tokens and samples leave the masks, so that the loss does not count them. The
    metrics: shares of tokens and of sequences (those with a token in the mask) that take no part, the mean and the
    largest weight of those that do, tokens that are left, the share without a finite log-probability. Raises
    RolloutError when that share is too large.
    """
    if not len(batch["token_mask"]):
        raise ValueError("there is no sample in this batch to correct")
    mask = batch["token_mask"] * batch["sample_mask"].unsqueeze(-1)
    gen = batch["generation_logprobs"]
    decided = correct(gen if cfg.bypass else batch["prev_logprobs"], gen, mask, cfg, group)
    asked, left = mask.sum(-1), decided.kept.sum(-1)  # tokens of each sequence
    tokens, kept = float(asked.sum()), float(left.sum())
    refuse_nonfinite(float(decided.nonfinite), tokens, cfg.max_nonfinite_fraction)
    sequences, whole = asked > 0, left > 0
    made = {"importance_weights": decided.weights, "out_of_bounds": decided.clamped}
    batch = cast(TrainBatch, {**batch, **made})
    if cfg.denominator == "kept":
        batch["token_mask"] = batch["token_mask"] * decided.kept
        batch["sample_mask"] = batch["sample_mask"] * whole
    return batch, {
        "correction/rejected_token_ratio": (tokens - kept) / max(tokens, 1.0),
        "correction/rejected_sequence_ratio": float((sequences & ~whole).sum()) / max(float(sequences.sum()), 1.0),
        "correction/weight_mean": float(decided.weights.sum()) / max(kept, 1.0),
        "correction/weight_max": float(decided.weights.max()),
        "correction/kept_tokens": kept,
        "correction/nonfinite_logprob_ratio": float(decided.nonfinite) / max(tokens, 1.0),
    }


def check_fields(shape: torch.Size, fields_: Mapping[str, Tensor]) -> None:
    """Raise ValueError, naming the field, on one that is not floating point or of another shape: it would broadcast."""
    for name, field in fields_.items():
        if field.shape != shape or not field.is_floating_point():
            raise ValueError(f"{name} must be floating point {list(shape)}, got {field.dtype} {list(field.shape)}")


def refuse_nonfinite(nonfinite: float, tokens: float, limit: float) -> None:
    """Raise RolloutError when more than `limit` of the tokens have no finite log-probability."""
    if nonfinite > limit * tokens:
        raise RolloutError(
            f"{int(nonfinite)} of {int(tokens)} generated tokens have a log-probability that is not finite in "
            f"generation_logprobs or prev_logprobs, more than nemo_fp8rl.correction.max_nonfinite_fraction={limit} "
            "allows; check the last refit and the sampling parameters"
        )


def decide_by_torch(
    prev: Tensor, gen: Tensor, mask: Tensor, cfg: CorrectionConfig, weights: Tensor, kept: Tensor, clamped: Tensor
) -> Tensor:
    """Fill the last three, [B, T]; returns how many tokens of the mask have no finite log-probability."""
    lost = torch.zeros((), device=mask.device)
    rows = max(1, CHUNK_VALUES // max(1, mask.size(-1)))
    for start in range(0, len(mask), rows):
        part = slice(start, start + rows)
        inside = mask[part] > 0
        log_ratio = prev[part].float() - gen[part].float()
        finite = (log_ratio.abs() < math.inf) & inside  # where both are: two infinities make NaN, which fails this too
        log_ratio = log_ratio.nan_to_num_(0.0, 0.0, 0.0) * inside
        passed = finite
        for rule in cfg.reject:
            passed = passed & _keeps(rule, log_ratio, prev[part], gen[part], finite)
        raw = _weights(cfg.weight, log_ratio, finite)
        changed = ~passed
        for bound, clamp, beyond in (
            (cfg.weight_max, torch.Tensor.clamp_max, torch.Tensor.gt),
            (cfg.weight_min, torch.Tensor.clamp_min, torch.Tensor.lt),
        ):
            if bound is not None:
                changed |= beyond(raw, bound)
                raw = clamp(raw, bound)
        torch.mul(raw, passed, out=weights[part])
        kept[part], clamped[part] = passed, changed & finite
        if not torch.equal(finite, inside):
            lost += inside.sum() - finite.sum()
    return lost


def _weights(weight: Weight, log_ratio: Tensor, finite: Tensor) -> Tensor:
    """float32 [B, T] or, for sequences, [B, 1]; of tokens that are not finite it is any number."""
    if weight == "none":
        return torch.ones_like(log_ratio[:, :1])
    if weight == "token":
        return log_ratio.clamp(-LARGEST_LOG, LARGEST_LOG).exp_()
    total = log_ratio.sum(-1, keepdim=True)
    if weight == "geometric":
        total = total / finite.sum(-1, keepdim=True).clamp(min=1)
    return total.clamp_(-LARGEST_LOG, LARGEST_LOG).exp_()


def _keeps(rule: Rule, log_ratio: Tensor, prev: Tensor, gen: Tensor, finite: Tensor) -> Tensor:
    """bool [B, T] or, for sequences, [B, 1]."""
    low, high = rule.limits()
    scope, _, kind = rule.statistic.rpartition("_")
    if rule.statistic == "token_probability_difference":
        return _within((prev.float().exp() - gen.float().exp()).abs(), low, high)
    if kind == "k1":
        values = log_ratio
    else:
        values = log_ratio.square() / 2 if kind == "k2" else torch.expm1(log_ratio) - log_ratio
    if scope == "token":
        return _within(values, low, high)
    if scope == "seq_max" and kind == "k1":
        return (_within(values, low, high) | ~finite).all(-1, keepdim=True)
    if scope == "seq_max":
        return _within(values.amax(-1, keepdim=True), low, high)
    total = values.sum(-1, keepdim=True)
    return _within(total if scope == "seq_sum" else total / finite.sum(-1, keepdim=True).clamp(min=1), low, high)


def _within(values: Tensor, low: float, high: float) -> Tensor:
    return (values >= low) & (values <= high)


def _mean_weight(weights: Tensor, kept: Tensor, of_sequences: bool, group: "dist.ProcessGroup | None") -> Tensor:
    """Mean over the kept tokens, or sequences, of all ranks; 1 where nothing is kept."""
    if of_sequences:
        weights, kept = weights.amax(-1), kept.any(-1)
    sums = torch.stack([weights.double().sum(), kept.double().sum()])
    if group is not None:
        dist.all_reduce(sums, group=group)
    mean = sums[0] / sums[1].clamp(min=1)
    return torch.where(mean > 0, mean, 1.0).float()
