"""The `loss_fn` block: NeMo RL's keys with its meanings and defaults, a few of ours, and what contradicts what."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from nemo_fp8rl.algorithms.correction_config import CorrectionConfig, Rule, from_mapping
from nemo_fp8rl.common.errors import UserError

TruncationType = Literal["tis", "icepop", "seq-mask-tis"]
KlType = Literal["k1", "k2", "k3"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@dataclass(frozen=True)
class LossConfig:
    """NeMo RL's `loss_fn` block (algorithms/loss/loss_functions.py, ClippedPGLossConfig); the last three are ours."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    ratio_clip_min: float = 0.2
    """The ratio is clipped below at 1 - ratio_clip_min."""
    ratio_clip_max: float = 0.2
    """The ratio is clipped above at 1 + ratio_clip_max; 0.28 is DAPO's clip-higher (arXiv 2503.14476)."""
    ratio_clip_c: float | None = None
    """Dual clip (arXiv 1912.09729): where the advantage is negative the loss is at most -A c; above 1, 3 is common."""
    disable_ppo_ratio: bool = False
    """REINFORCE, RLOO: the log-prob itself instead of the ratio, no clipping."""
    force_on_policy_ratio: bool = False
    """The ratio is 1 and keeps its gradient: for one update a rollout. prev_logprobs are not read."""
    use_cispo: bool = False
    """CISPO (arXiv 2506.13585): the clipped ratio, without gradient, weights the log-prob."""
    sequence_level_importance_ratios: bool = False
    """GSPO (arXiv 2507.18071): one ratio a sequence, the geometric mean; needs token_level_loss: false."""
    token_level_loss: bool = True
    """Mean over all tokens (DAPO); false: mean over sequences of their means (GRPO)."""
    use_importance_sampling_correction: bool = False
    """Weight by pi_train / pi_rollout: a token's, or with sequence_level_importance_ratios the sequence's product."""
    truncated_importance_sampling_type: TruncationType | None = None
    """tis clamps weights, icepop zeroes those outside the bounds, seq-mask-tis sequences by their geometric mean."""
    truncated_importance_sampling_ratio: float | None = None
    """Upper bound of what truncated_importance_sampling_type clamps or masks by."""
    truncated_importance_sampling_ratio_min: float | None = None
    """Lower bound of the same; null is 0 for tis."""
    reference_policy_kl_penalty: float = 0.01
    """Weight of the KL to the reference policy; 0 trains without one."""
    reference_policy_kl_type: KlType = "k3"
    """Schulman's estimators (joschu.net/blog/kl-approx.html)."""
    kl_input_clamp_value: float | None = 20.0
    """The log ratio to the reference is clamped to +- this."""
    kl_output_clamp_value: float | None = 10.0
    """A token's KL is clamped to +- this."""
    use_kl_in_reward: bool = False
    """The KL goes into the advantages (REINFORCE++), not into the loss; needs reference_policy_kl_type: k1."""
    use_on_policy_kl_approximation: bool = False
    """Weight a token's KL by pi_train / pi_rollout."""
    positive_example_nll_weight: float = 0.0
    """Weight of the NLL of samples with a positive reward (VAPO, arXiv 2504.05118, eq. 10)."""
    loss_agg_mode: Aggregation | None = None
    """verl's names; null follows token_level_loss. The two sums divide by sequences, -norm by loss_scale_factor too."""
    loss_scale_factor: float | None = None
    """Dr. GRPO's constant (arXiv 2503.20783), such as the longest answer; for seq-mean-token-sum-norm."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus, by the estimate `approx_entropy` with the correction's weights."""

    @property
    def aggregation(self) -> Aggregation:
        return self.loss_agg_mode or ("token-mean" if self.token_level_loss else "seq-mean-token-mean")

    @property
    def kl_in_loss(self) -> bool:
        return self.reference_policy_kl_penalty != 0 and not self.use_kl_in_reward

    def check(self) -> None:
        """Raise UserError on values out of range and on keys that contradict each other."""
        self._check_ranges()
        self._check_modes()
        self._check_truncation()

    def correction(self) -> CorrectionConfig:
        """What NeMo RL's keys mean as a correction. It keeps rejected tokens in the denominator, and so do we here."""
        sequence = self.sequence_level_importance_ratios
        low, high = self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio
        kind = self.truncated_importance_sampling_type
        if not self.use_importance_sampling_correction:
            return CorrectionConfig(weight="none", weight_max=None).resolved()
        weight: Literal["sequence", "token"] = "sequence" if sequence else "token"
        if kind == "tis":
            return CorrectionConfig(weight=weight, weight_max=high, weight_min=low).resolved()
        rules = {
            None: (),
            "icepop": (Rule("seq_sum_k1" if sequence else "token_k1", high, low),),
            "seq-mask-tis": (Rule("seq_mean_k1", high, low),),
        }
        return CorrectionConfig(weight=weight, weight_max=None, reject=rules[kind]).resolved()

    def _check_ranges(self) -> None:
        if not 0 <= self.ratio_clip_min <= 1:
            raise UserError(f"loss_fn.ratio_clip_min={self.ratio_clip_min} must lie in 0..1: 0.2 is common")
        for name in ("ratio_clip_max", "reference_policy_kl_penalty", "positive_example_nll_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"loss_fn.{name}={getattr(self, name)} must be a finite number, 0 or more")
        if not math.isfinite(self.entropy_coefficient):
            raise UserError(f"loss_fn.entropy_coefficient={self.entropy_coefficient} must be a finite number")
        for name in ("kl_input_clamp_value", "kl_output_clamp_value"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise UserError(f"loss_fn.{name}={value} must be above 0; null clamps nothing")
        if self.ratio_clip_c is not None and not 1 < self.ratio_clip_c < math.inf:
            raise UserError(f"loss_fn.ratio_clip_c={self.ratio_clip_c} must be above 1: 3 is common, null disables it")
        for name, choices in (
            ("reference_policy_kl_type", get_args(KlType)),
            ("truncated_importance_sampling_type", (None, *get_args(TruncationType))),
            ("loss_agg_mode", (None, *get_args(Aggregation))),
        ):
            if getattr(self, name) not in choices:
                raise UserError(f"loss_fn.{name}={getattr(self, name)!r} is none of {', '.join(map(str, choices))}")

    def _check_modes(self) -> None:
        def refuse(first: str, second: str, why: str) -> None:
            raise UserError(f"loss_fn.{first} contradicts loss_fn.{second}: {why}")

        agg, token_means = self.loss_agg_mode, self.aggregation == "token-mean"
        if agg is not None and agg != "token-mean" and self.token_level_loss:
            refuse(f"loss_agg_mode={agg}", "token_level_loss=true", "set token_level_loss=false")
        if agg == "token-mean" and not self.token_level_loss:
            refuse("loss_agg_mode=token-mean", "token_level_loss=false", "set token_level_loss=true")
        if (agg == "seq-mean-token-sum-norm") != (self.loss_scale_factor is not None):
            refuse(f"loss_scale_factor={self.loss_scale_factor}", f"loss_agg_mode={agg}", "one needs the other")
        if self.loss_scale_factor is not None and not 0 < self.loss_scale_factor < math.inf:
            raise UserError(f"loss_fn.loss_scale_factor={self.loss_scale_factor} must be a finite number above 0")
        if self.sequence_level_importance_ratios and token_means:
            refuse("sequence_level_importance_ratios", "token_level_loss=true", "GSPO averages over sequences")
        if self.disable_ppo_ratio and self.force_on_policy_ratio:
            refuse("disable_ppo_ratio", "force_on_policy_ratio", "one removes the ratio, the other sets it to 1")
        if self.use_cispo:
            for name in ("disable_ppo_ratio", "force_on_policy_ratio", "sequence_level_importance_ratios"):
                if getattr(self, name):
                    refuse("use_cispo", name, "CISPO weights tokens by the clipped ratio")
            if self.ratio_clip_c is not None:
                refuse("use_cispo", "ratio_clip_c", "CISPO has no dual clip; set ratio_clip_c=null")
            if not token_means:
                refuse("use_cispo", "token_level_loss=false", "CISPO averages over tokens")

    def _check_truncation(self) -> None:
        kind = self.truncated_importance_sampling_type
        low, high = self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio
        here = "loss_fn.truncated_importance_sampling"
        if kind is None:
            for name, value in (("ratio", high), ("ratio_min", low)):
                if value is not None:
                    raise UserError(f"{here}_{name}={value} does nothing without {here}_type: give tis, icepop, ...")
            return
        if not self.use_importance_sampling_correction:
            raise UserError(f"{here}_type={kind} needs loss_fn.use_importance_sampling_correction=true")
        if high is None or not high > 0:
            raise UserError(f"{here}_type={kind} needs {here}_ratio above 0, got {high}: 2.0 is common for tis")
        if low is not None and not 0 <= low <= high:
            raise UserError(
                f"{here}_ratio_min must be <= truncated_importance_sampling_ratio, and 0 or more; got {low} and {high}"
            )
        if low is None and kind != "tis":
            raise UserError(f"{here}_type={kind} needs {here}_ratio_min as well")
        if kind == "seq-mask-tis" and self.sequence_level_importance_ratios:
            raise UserError(
                f"{here}_type=seq-mask-tis contradicts loss_fn.sequence_level_importance_ratios: it weights tokens; "
                "use tis or icepop with GSPO"
            )


def loss_config(cfg: LossConfig | Mapping[str, Any]) -> LossConfig:
    """The checked config of a mapping with NeMo RL's keys. Raises UserError, naming the key."""
    if not isinstance(cfg, LossConfig):
        known = {f.name for f in fields(LossConfig)}
        if unknown := sorted(set(cfg) - known):
            raise UserError(f"loss_fn.{unknown[0]} is not a key of this loss; remove it")
        cfg = LossConfig(**cfg)
    cfg.check()
    return cfg


def resolved_correction(
    cfg: LossConfig, correction: CorrectionConfig | Mapping[str, Any] | None = None
) -> CorrectionConfig:
    """What `nemo_fp8rl.correction` says; None takes what the keys of cfg mean. Raises UserError where they disagree."""
    if correction is not None and cfg.use_importance_sampling_correction:
        raise UserError(
            "nemo_fp8rl.correction contradicts loss_fn.use_importance_sampling_correction: give one of the two"
        )
    resolved = cfg.correction() if correction is None else from_mapping(correction)
    if resolved.bypass and cfg.force_on_policy_ratio:
        raise UserError("nemo_fp8rl.correction.bypass contradicts loss_fn.force_on_policy_ratio: both set the ratio")
    if resolved.bypass and cfg.disable_ppo_ratio:
        raise UserError(
            "nemo_fp8rl.correction.bypass corrects by the ratio that loss_fn.disable_ppo_ratio removes: give a weight "
            "instead"
        )
    return resolved
