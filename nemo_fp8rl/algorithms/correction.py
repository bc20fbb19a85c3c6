"""Rollout correction: weights and rejections for tokens that were sampled by another policy than the trainer's.

    l = log pi_train - log pi_rollout          trainer minus rollout, always in this direction
    rho = e^l                                  so a weight above 1 means: the trainer likes this token more

pi_train is the trainer's own recomputation before the update (`prev_logprobs`), pi_rollout the engine's
(`generation_logprobs`). A correction is a weight for every token and a list of rules that reject tokens or sequences;
all rules must hold. Nothing in this module has a gradient.

    weight       token      w = rho                                      NeMo RL, verl, SkyRL
                 sequence   w = e^(sum of l over the sequence)           verl
                 geometric  w = e^(mean of l over the sequence)          slime, AReaL
    bounds       w is clamped to [weight_min, weight_max]                truncated importance sampling, TIS
    reject       see `Rule`; a rejected token has weight 0
    normalize    w / mean of w over the batch                            verl

A token whose log-probability is not finite in either policy (for example because the engine sampled outside the
trainer's top-k) is rejected and counted. More than `max_nonfinite_fraction` of such tokens are an error.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_fp8rl.algorithms.correction_config import LARGEST_LOG, CorrectionConfig, Rule, Weight
from nemo_fp8rl.batch import ScoredBatch, TrainBatch
from nemo_fp8rl.common.errors import StepRefused

VALUES_AT_ONCE = {"cpu": 1 << 17}
"""Values of a chunk of rows: on a CPU the temporaries stay in the cache. On other devices 2^24, which bounds memory."""


class RolloutError(StepRefused):
    """A rollout that must not be trained on."""


@dataclass(frozen=True)
class Correction:
    """The decision about every token of a batch.

    weights:    float32 [B, T], 0 where a token is rejected or outside the mask
    kept:       bool [B, T], tokens that take part in the loss
    nonfinite:  float32 [], number of tokens of the mask without a finite log-probability; these are not kept
    clamped:    bool [B, T], tokens whose weight was outside its bounds, and tokens that a rule rejected
    """

    weights: Tensor
    kept: Tensor
    nonfinite: Tensor
    clamped: Tensor


@torch.no_grad()
def correct(prev_logprobs: Tensor, generation_logprobs: Tensor, mask: Tensor, cfg: CorrectionConfig) -> Correction:
    """Return weight and decision of every token.

    prev_logprobs, generation_logprobs: floating point [B, T], of the trainer and of the engine; not read outside `mask`
    mask:    float32 or bool [B, T], nonzero where a token was generated
    cfg:     the resolved correction (`CorrectionConfig.resolve`)
    Raises:  ValueError on a tensor of another shape or dtype
    """
    check_fields(mask.shape, {"prev_logprobs": prev_logprobs, "generation_logprobs": generation_logprobs})
    weights = torch.empty(mask.shape, dtype=torch.float32, device=mask.device)
    kept, clamped = (torch.empty(mask.shape, dtype=torch.bool, device=mask.device) for _ in range(2))
    nonfinite = torch.zeros((), device=mask.device)
    num_rows = max(1, VALUES_AT_ONCE.get(mask.device.type, 1 << 24) // max(1, mask.size(-1)))
    for start in range(0, len(mask), num_rows):
        rows = slice(start, start + num_rows)
        weights[rows], kept[rows], clamped[rows], lost = _decide(
            prev_logprobs[rows], generation_logprobs[rows], mask[rows] > 0, cfg
        )
        nonfinite += lost
    if cfg.normalize:
        weights /= _mean_weight(weights, kept, of_sequences=cfg.weight != "token")
    return Correction(weights, kept, nonfinite, clamped)


def correct_batch(batch: ScoredBatch, cfg: CorrectionConfig) -> tuple[TrainBatch, dict[str, float]]:
    """Return the batch with its importance weights, and metrics of the correction.

    With denominator=kept, rejected tokens and samples also leave the masks, so that the loss does not count them.
    Metrics: the shares of tokens and of sequences (with a token in the mask) that are rejected, the mean and the
    largest weight of the others, the number of kept tokens, and the share of tokens without a finite log-probability.
    Raises: RolloutError when the last share is above cfg.max_nonfinite_fraction
    """
    if not batch.num_rows:
        raise ValueError("there is no sample in this batch to correct")
    mask, gen = batch.loss_mask, batch.generation_logprobs
    decision = correct(gen if cfg.bypass else batch.prev_logprobs, gen, mask, cfg)
    lengths, kept_lengths = mask.sum(-1), decision.kept.sum(-1)  # tokens of each sequence
    tokens, kept = float(lengths.sum()), float(kept_lengths.sum())
    refuse_nonfinite(float(decision.nonfinite), tokens, cfg.max_nonfinite_fraction)
    sequences, kept_sequences = lengths > 0, kept_lengths > 0
    columns = vars(batch) | {"importance_weights": decision.weights, "out_of_bounds": decision.clamped}
    if cfg.denominator == "kept":
        columns |= {"token_mask": batch.token_mask * decision.kept, "sample_mask": batch.sample_mask * kept_sequences}
    rejected_sequences = float((sequences & ~kept_sequences).sum())
    return TrainBatch(**columns), {
        "correction/rejected_token_ratio": (tokens - kept) / max(tokens, 1.0),
        "correction/rejected_sequence_ratio": rejected_sequences / max(float(sequences.sum()), 1.0),
        "correction/weight_mean": float(decision.weights.sum()) / max(kept, 1.0),
        "correction/weight_max": float(decision.weights.max()),
        "correction/kept_tokens": kept,
        "correction/nonfinite_logprob_ratio": float(decision.nonfinite) / max(tokens, 1.0),
    }


def check_fields(shape: torch.Size, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError, naming the field, for a tensor that is not floating point or not of `shape`: it would
    broadcast.
    """
    for name, tensor in tensors.items():
        if tensor.shape != shape or not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")


def refuse_nonfinite(nonfinite: float, tokens: float, limit: float) -> None:
    """Raise RolloutError when more than `limit` of the tokens have no finite log-probability."""
    if nonfinite > limit * tokens:
        raise RolloutError(
            f"{int(nonfinite)} of {int(tokens)} generated tokens have a log-probability that is not finite in "
            f"generation_logprobs or prev_logprobs, more than nemo_fp8rl.correction.max_nonfinite_fraction={limit} "
            "allows; check the last refit, the sampling parameters, and in float16 whether activations are above 65504"
        )


def _decide(
    prev: Tensor, gen: Tensor, inside: Tensor, cfg: CorrectionConfig
) -> tuple[Tensor, Tensor, Tensor, int | Tensor]:
    """(weights, kept, clamped, number of tokens inside without a finite log-probability) of some rows."""
    log_ratio = prev.float() - gen.float()
    finite = (log_ratio.abs() < math.inf) & inside  # of both: two infinities make NaN, which fails the comparison
    log_ratio = log_ratio.nan_to_num_(0.0, 0.0, 0.0) * inside
    kept = finite
    for rule in cfg.reject:
        kept = kept & _keeps(rule, log_ratio, prev, gen, finite)
    weights = _weights(cfg.weight, log_ratio, finite)
    clamped = ~kept
    for bound, clamp, is_beyond in (
        (cfg.weight_max, torch.Tensor.clamp_max, torch.Tensor.gt),
        (cfg.weight_min, torch.Tensor.clamp_min, torch.Tensor.lt),
    ):
        if bound is not None:
            clamped = clamped | is_beyond(weights, bound)
            weights = clamp(weights, bound)
    lost = 0 if torch.equal(finite, inside) else inside.sum() - finite.sum()
    return weights * kept, kept, clamped & finite, lost


def _weights(weight: Weight, log_ratio: Tensor, finite: Tensor) -> Tensor:
    """float32 [B, T] or, for sequences, [B, 1]; for a token that is not finite it is any number."""
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


def _mean_weight(weights: Tensor, kept: Tensor, *, of_sequences: bool) -> Tensor:
    """Mean over the kept tokens or sequences, float32 []; 1 where nothing is kept."""
    if of_sequences:
        weights, kept = weights.amax(-1), kept.any(-1)
    mean = weights.double().sum() / kept.double().sum().clamp(min=1)
    return torch.where(mean > 0, mean, 1.0).float()
