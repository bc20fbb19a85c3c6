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
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_fp8rl.batch import TrainBatch
from nemo_fp8rl.errors import UserError

Weight = Literal["none", "token", "sequence", "geometric"]
Statistic = Literal[
    "token_k1", "token_k2", "token_k3", "token_probability_difference",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k1", "seq_max_k2", "seq_max_k3",
]  # fmt: skip
LARGEST_LOG = 40.0
"""l and its sums are clamped to +-40 before e^: beyond 44 the square of a weight overflows float32."""


CHUNK_VALUES = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Values decided at a time: the temporaries stay in a CPU's cache, so main memory is read once and written once."""


class RolloutError(RuntimeError):
    """A rollout that must not be trained on."""


@dataclass(frozen=True)
class Rule:
    """Keeps what lies in [min, max] and rejects the rest.

    token_k1      rho                   a token; bounds on the ratio itself (IcePop, MIS)
    token_k2      l^2 / 2               a token
    token_k3      rho - 1 - l           a token
    token_probability_difference        |pi_train - pi_rollout| of a token (ROLL; prime-rl)
    seq_sum_*     k1: e^(sum of l), k2 and k3: their sum over the sequence; rejects the whole sequence
    seq_mean_*    k1: e^(mean of l), the geometric mean (NeMo RL's seq-mask-tis), k2 and k3: their mean
    seq_max_*     k1: every rho of the sequence must lie in the bounds (slime's, SkyRL's veto), k2 and k3: the largest

    verl applies its k1 bounds to pi_rollout / pi_train; take the reciprocals of bounds that come from there.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    statistic: Statistic
    max: float | None = None
    min: float | None = None

    def check(self, key: str) -> None:
        if self.statistic not in get_args(Statistic):
            raise UserError(f"{key}.statistic={self.statistic!r} is none of {', '.join(get_args(Statistic))}")
        if self.max is None and self.min is None:
            raise UserError(f"{key} ({self.statistic}) has neither min nor max: give at least one")
        low, high = self.min if self.min is not None else 0.0, self.max if self.max is not None else math.inf
        if not 0 <= low <= high:
            raise UserError(f"{key} ({self.statistic}): 0 <= min <= max must hold, got min={self.min}, max={self.max}")
        if not self.statistic.endswith("_k1") and self.max is None:
            raise UserError(f"{key}: {self.statistic} is a distance, 0 where both policies agree: give max")


@dataclass(frozen=True)
class CorrectionConfig:
    """The block `nemo_fp8rl.correction`; `preset` fills the other keys by a name that users know."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    preset: str | None = None
    """One of PRESETS, instead of the keys below."""
    weight: Weight = "token"
    """What a token is weighted with."""
    weight_max: float | None = 2.0
    """Upper bound of the weight; null leaves it unbounded."""
    weight_min: float | None = None
    """Lower bound of the weight; null is 0."""
    reject: tuple[Rule, ...] = ()
    """Rules that all must hold."""
    normalize: bool = False
    """Divide weights by their mean over the batch."""
    bypass: bool = False
    """Take the engine's log-probs for the trainer's: the PPO ratio is then against the rollout and needs no weight."""
    denominator: Literal["all", "kept"] = "all"
    """Whether the loss divides by all generated tokens, rejected ones too, or by those that are kept."""
    max_nonfinite_fraction: float = 0.01
    """Share of tokens without a finite log-probability above which a step is refused."""

    def resolved(self) -> "CorrectionConfig":
        """Itself, or its preset. Raises UserError on contradictions."""
        if self.preset is not None:
            if self.preset not in PRESETS:
                raise UserError(f"nemo_fp8rl.correction.preset={self.preset!r} is none of {', '.join(PRESETS)}")
            changed = [f.name for f in fields(self) if f.name in PRESET_SETS and getattr(self, f.name) != f.default]
            if changed:
                raise UserError(
                    f"nemo_fp8rl.correction.{changed[0]} contradicts nemo_fp8rl.correction.preset={self.preset}: "
                    "give the keys with preset=null, or the preset alone"
                )
            chosen = {name: getattr(PRESETS[self.preset], name) for name in PRESET_SETS}
            return CorrectionConfig(
                **chosen, denominator=self.denominator, max_nonfinite_fraction=self.max_nonfinite_fraction
            )
        self._check()
        return self

    def __str__(self) -> str:
        """In one line, as it is logged at the start of a run."""
        if self.bypass:
            return "bypass"
        bounds = [f"{word} {bound}" for word, bound in (("from", self.weight_min), ("to", self.weight_max)) if bound]
        rules = [f"{r.statistic} within {r.min or 0}..{'' if r.max is None else r.max}" for r in self.reject]
        weight = " ".join([f"weight {self.weight}", *bounds, *(["normalized"] if self.normalize else [])])
        return "; ".join([weight, *rules, *([f"denominator {self.denominator}"] if rules else [])])

    def _check(self) -> None:
        here = "nemo_fp8rl.correction"
        if self.weight not in get_args(Weight):
            raise UserError(f"{here}.weight={self.weight!r} is none of {', '.join(get_args(Weight))}")
        low, high = self.weight_min or 0.0, math.inf if self.weight_max is None else self.weight_max
        if not (0 <= low <= high and high > 0):
            raise UserError(
                f"{here}: 0 <= weight_min <= weight_max must hold, and weight_max be above 0; got "
                f"weight_min={self.weight_min}, weight_max={self.weight_max}"
            )
        if self.denominator not in ("all", "kept"):
            raise UserError(f"{here}.denominator={self.denominator!r} is none of all, kept")
        if not 0 <= self.max_nonfinite_fraction <= 1:
            raise UserError(f"{here}.max_nonfinite_fraction={self.max_nonfinite_fraction} must lie in 0..1")
        if self.weight == "none" and self.normalize:
            raise UserError(f"{here}.normalize=true has nothing to normalize: weight is none")
        if self.bypass and (self.weight != "none" or self.reject):
            raise UserError(f"{here}.bypass=true makes both policies one: set weight=none and no reject rules")
        for i, rule in enumerate(self.reject):
            rule.check(f"{here}.reject[{i}]")


PRESET_SETS = ("weight", "weight_max", "weight_min", "reject", "normalize", "bypass")


def _preset(weight: Weight, maximum: float | None, *rules: Rule, minimum: float | None = None, **more: Any) -> Any:
    return CorrectionConfig(weight=weight, weight_max=maximum, weight_min=minimum, reject=rules, **more)


PRESETS: dict[str, CorrectionConfig] = {
    "none": _preset("none", None),
    "bypass": _preset("none", None, bypass=True),
    "is": _preset("token", None),
    "tis": _preset("token", 2.0),
    "seq-tis": _preset("sequence", 5.0),
    "geo-tis": _preset("geometric", 2.0, minimum=0.5),
    "icepop": _preset("token", None, Rule("token_k1", 5.0, 0.5)),
    "mis": _preset("token", None, Rule("token_k1", 2.0)),
    "seq-mis": _preset("sequence", None, Rule("seq_sum_k1", 2.0)),
    "seq-mask-tis": _preset("token", None, Rule("seq_mean_k1", 1.002, 0.999)),
    "geo-rs": _preset("none", None, Rule("seq_mean_k1", 1.001, 0.999)),
    "geo-rs-token-tis": _preset("token", 2.0, Rule("seq_mean_k1", 1.001, 0.999)),
    "k3-rs": _preset("none", None, Rule("seq_mean_k3", 0.01)),
    "veto": _preset("token", 2.0, Rule("seq_max_k1", None, 1e-4)),
    "dppo-tv": _preset("none", None, Rule("token_probability_difference", 0.2)),
}
"""Names that users know, with the bounds their sources give (NeMo RL, verl's recipes, slime, prime-rl)."""


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
    weights = torch.empty(mask.shape, device=mask.device)
    kept, clamped = (torch.empty(mask.shape, dtype=torch.bool, device=mask.device) for _ in range(2))
    nonfinite = torch.zeros((), device=mask.device)
    rows = max(1, CHUNK_VALUES[mask.device.type] // max(1, mask.size(-1)))
    for start in range(0, len(mask), rows):
        part = slice(start, start + rows)
        inside = mask[part] > 0
        log_ratio = prev_logprobs[part].float() - generation_logprobs[part].float()
        finite = (log_ratio.abs() < math.inf) & inside  # where both are: two infinities make NaN, which fails this too
        log_ratio = log_ratio.nan_to_num_(0.0, 0.0, 0.0) * inside
        passed = finite
        for rule in cfg.reject:
            passed = passed & _keeps(rule, log_ratio, prev_logprobs[part], generation_logprobs[part], finite)
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
            nonfinite += inside.sum() - finite.sum()
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
    tokens, kept = float(mask.sum()), float(decided.kept.sum())
    refuse_nonfinite(float(decided.nonfinite), tokens, cfg.max_nonfinite_fraction)
    sequences = (mask > 0).any(-1)
    whole = decided.kept.any(-1)
    made = {"importance_weights": decided.weights, "out_of_bounds": decided.clamped.float()}
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
    low, high = rule.min if rule.min is not None else 0.0, rule.max if rule.max is not None else math.inf
    scope, _, kind = rule.statistic.rpartition("_")
    if rule.statistic == "token_probability_difference":
        return _within((prev.float().exp() - gen.float().exp()).abs(), low, high)
    if kind == "k1":
        # compared as logarithms, so that nothing overflows
        low, high = math.log(low) if low else -math.inf, math.log(high) if high else -math.inf
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


def from_mapping(cfg: CorrectionConfig | Mapping[str, Any]) -> CorrectionConfig:
    """The resolved correction of a mapping with the keys of `nemo_fp8rl.correction`. Raises UserError."""
    if isinstance(cfg, CorrectionConfig):
        return cfg.resolved()
    known = {f.name for f in fields(CorrectionConfig)}
    if unknown := sorted(set(cfg) - known):
        raise UserError(f"nemo_fp8rl.correction.{unknown[0]} is not a key; there are {', '.join(sorted(known))}")
    rules = cfg.get("reject") or ()
    if isinstance(rules, Mapping | str):
        raise UserError(f"nemo_fp8rl.correction.reject must be a list of rules, got {rules!r}")
    made = tuple(_rule(rule, f"nemo_fp8rl.correction.reject[{i}]") for i, rule in enumerate(rules))
    return CorrectionConfig(**{**cfg, "reject": made}).resolved()


def _rule(rule: Rule | Mapping[str, Any], key: str) -> Rule:
    if isinstance(rule, Rule):
        return rule
    known = [f.name for f in fields(Rule)]
    if unknown := sorted(set(rule) - set(known)):
        raise UserError(f"{key}: {unknown[0]} is not a key of a rule; there are {', '.join(known)}")
    if "statistic" not in rule:
        raise UserError(f"{key} has no statistic: one of {', '.join(get_args(Statistic))}")
    return Rule(**rule)
