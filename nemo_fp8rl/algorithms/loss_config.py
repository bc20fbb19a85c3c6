"""The block `loss_fn:` of a recipe: NeMo RL's keys with its meanings and defaults, five more keys, and their rules."""

from dataclasses import dataclass
from typing import Annotated, Literal

from nemo_fp8rl.algorithms.correction_config import CorrectionConfig, Rule
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.field_rules import ABOVE_0, AT_LEAST_0, Block, EarlierRuns, Range, check_fields

TruncationType = Literal["tis", "icepop", "seq-mask-tis"]
KlType = Literal["k1", "k2", "k3"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
CLAMP = Range(above=0, or_infinite=True, hint="null clamps nothing")


@dataclass(frozen=True)
class LossConfig(Block):
    """NeMo RL's `loss_fn` (algorithms/loss/loss_functions.py, ClippedPGLossConfig); the last five keys are ours."""

    ratio_clip_min: Annotated[float, Range(at_least=0, at_most=1, hint="0.2 is common")] = 0.2
    """Lower clip of the ratio, at 1 - this."""
    ratio_clip_max: Annotated[float, AT_LEAST_0] = 0.2
    """Upper clip of the ratio, at 1 + this. DAPO's clip-higher is 0.28 (arXiv 2503.14476)."""
    ratio_clip_c: Annotated[float | None, Range(above=1, hint="3 is common, null disables it")] = None
    """Dual clip (arXiv 1912.09729): where the advantage A is negative, the loss is at most -A c."""
    disable_ppo_ratio: bool = False
    """REINFORCE, RLOO: the log-prob itself instead of the ratio, no clipping."""
    force_on_policy_ratio: bool = False
    """Set the ratio to 1 with its gradient. It is for one update a rollout. prev_logprobs are not read."""
    use_cispo: bool = False
    """CISPO (arXiv 2506.13585): the clipped ratio, without gradient, weights the log-prob."""
    sequence_level_importance_ratios: bool = False
    """GSPO (arXiv 2507.18071): one ratio a sequence, the geometric mean; needs token_level_loss: false."""
    token_level_loss: bool = True
    """Mean over tokens (DAPO), not over sequences (GRPO). false: mean over sequences of their means."""
    use_importance_sampling_correction: bool = False
    """Weight by pi_train / pi_rollout of a token. sequence_level_importance_ratios makes it the sequence's product."""
    truncated_importance_sampling_type: TruncationType | None = None
    """Use of the bounds below. tis clamps weights, icepop zeroes those outside. seq-mask-tis zeroes sequences by their
    geometric mean."""
    truncated_importance_sampling_ratio: float | None = None
    """Upper bound of the type above."""
    truncated_importance_sampling_ratio_min: float | None = None
    """Lower bound of the type above; null is 0 for tis."""
    reference_policy_kl_penalty: Annotated[float, AT_LEAST_0] = 0.01
    """Weight of the KL to the reference. 0 trains without a reference policy."""
    reference_policy_kl_type: KlType = "k3"
    """Estimator of the KL. They are Schulman's (joschu.net/blog/kl-approx.html)."""
    kl_input_clamp_value: Annotated[float | None, CLAMP] = 20.0
    """Clamp of the log ratio to the reference. It is clamped to +- this."""
    kl_output_clamp_value: Annotated[float | None, CLAMP] = 10.0
    """Clamp of a token's KL. It is clamped to +- this."""
    use_kl_in_reward: bool = False
    """Put the KL into advantages, not the loss. REINFORCE++ does so. It needs reference_policy_kl_type: k1."""
    use_on_policy_kl_approximation: bool = False
    """Weight a token's KL by pi_train / pi_rollout."""
    positive_example_nll_weight: Annotated[float, AT_LEAST_0] = 0.0
    """Weight of the NLL of rewarded samples (VAPO). Their reward is positive (arXiv 2504.05118, equation 10)."""
    loss_agg_mode: Aggregation | None = None
    """verl's names; null follows token_level_loss. The two sums divide by sequences, -norm by loss_scale_factor too."""
    loss_scale_factor: Annotated[float | None, ABOVE_0] = None
    """The constant of seq-mean-token-sum-norm. It may be the longest answer (arXiv 2503.20783). It is Dr. GRPO's."""
    entropy_coefficient: Annotated[float, Range()] = 0.0
    """Weight of the entropy bonus. The estimate is `approx_entropy` with the correction's weights."""
    ratio_clip_adaptive: Annotated[bool, EarlierRuns(False)] = False
    """QuRL's clip (arXiv 2602.13953): where weight_max truncates a token's weight, the upper clip grows as the weight
    shrinks."""
    off_policy_mask_threshold: Annotated[float | None, ABOVE_0, EarlierRuns(None)] = None
    """DeepSeek-V3.2's mask (arXiv 2512.02556). Sequences of negative advantage whose mean of engine minus current
    log-prob exceeds this have no policy loss."""

    @property
    def aggregation(self) -> Aggregation:
        return self.loss_agg_mode or ("token-mean" if self.token_level_loss else "seq-mean-token-mean")

    @property
    def kl_in_loss(self) -> bool:
        return self.reference_policy_kl_penalty != 0 and not self.use_kl_in_reward

    def check(self) -> None:
        """Raise UserError, naming the key, for a value out of range and for keys that contradict each other."""
        check_fields(self, "loss_fn.")
        self._check_modes()
        self._check_truncation()

    def correction(self) -> CorrectionConfig:
        """Return NeMo RL's keys as a correction. Rejected tokens stay in the denominator, as in NeMo RL."""
        sequence = self.sequence_level_importance_ratios
        low, high = self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio
        kind = self.truncated_importance_sampling_type
        if not self.use_importance_sampling_correction:
            return CorrectionConfig(weight="none", weight_max=None).resolve()
        weight: Literal["sequence", "token"] = "sequence" if sequence else "token"
        if kind == "tis":
            return CorrectionConfig(weight=weight, weight_max=high, weight_min=low).resolve()
        rules = {
            None: (),
            "icepop": (Rule("seq_sum_k1" if sequence else "token_k1", high, low),),
            "seq-mask-tis": (Rule("seq_mean_k1", high, low),),
        }
        return CorrectionConfig(weight=weight, weight_max=None, reject=rules[kind]).resolve()

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
        if self.ratio_clip_adaptive:
            for name in ("disable_ppo_ratio", "force_on_policy_ratio", "use_cispo", "sequence_level_importance_ratios"):
                if getattr(self, name):
                    refuse("ratio_clip_adaptive", name, "it widens PPO's clip of single tokens")

    def _check_truncation(self) -> None:
        kind = self.truncated_importance_sampling_type
        low, high = self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio
        prefix = "loss_fn.truncated_importance_sampling"
        if kind is None:
            for name, value in (("ratio", high), ("ratio_min", low)):
                if value is not None:
                    raise UserError(
                        f"{prefix}_{name}={value} does nothing without {prefix}_type: give tis, icepop, ..."
                    )
            return
        if not self.use_importance_sampling_correction:
            raise UserError(f"{prefix}_type={kind} needs loss_fn.use_importance_sampling_correction=true")
        if high is None or not high > 0:
            raise UserError(f"{prefix}_type={kind} needs {prefix}_ratio above 0, got {high}: 2.0 is common for tis")
        if low is not None and not 0 <= low <= high:
            raise UserError(
                f"{prefix}_ratio_min must be <= truncated_importance_sampling_ratio, and 0 or more; got {low} and "
                f"{high}"
            )
        if low is None and kind != "tis":
            raise UserError(f"{prefix}_type={kind} needs {prefix}_ratio_min as well")
        if kind == "seq-mask-tis" and self.sequence_level_importance_ratios:
            raise UserError(
                f"{prefix}_type=seq-mask-tis contradicts loss_fn.sequence_level_importance_ratios: it weights tokens; "
                "use tis or icepop with GSPO"
            )


def resolve_correction(cfg: LossConfig, correction: CorrectionConfig | None = None) -> CorrectionConfig:
    """Return the correction of a run.

    correction:  the block `nemo_fp8rl.correction`; None follows the keys of cfg
    Raises:      UserError where the two contradict each other
    """
    if correction is not None and cfg.use_importance_sampling_correction:
        raise UserError(
            "nemo_fp8rl.correction contradicts loss_fn.use_importance_sampling_correction: give one of the two"
        )
    resolved = cfg.correction() if correction is None else correction.resolve()
    if resolved.bypass and cfg.force_on_policy_ratio:
        raise UserError("nemo_fp8rl.correction.bypass contradicts loss_fn.force_on_policy_ratio: both set the ratio")
    if resolved.bypass and cfg.disable_ppo_ratio:
        raise UserError(
            "nemo_fp8rl.correction.bypass corrects by the ratio that loss_fn.disable_ppo_ratio removes: give a weight "
            "instead"
        )
    if cfg.ratio_clip_adaptive and (resolved.weight != "token" or resolved.weight_max is None):
        raise UserError(
            "loss_fn.ratio_clip_adaptive=true needs weights of tokens that are truncated: set "
            "nemo_fp8rl.correction.preset=tis, or its weight=token with a weight_max"
        )
    return resolved
