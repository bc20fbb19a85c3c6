"""The block `nemo_fp8rl.correction:` of a recipe: rollout correction, its presets and its rules.

`correction` computes what the keys mean.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.field_rules import Block, Range, check_fields

KEY = "nemo_fp8rl.correction"

Weight = Literal["none", "token", "sequence", "geometric"]
Statistic = Literal[
    "token_k1", "token_k2", "token_k3", "token_probability_difference",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k1", "seq_max_k2", "seq_max_k3",
]  # fmt: skip
LARGEST_LOG = 40.0
"""l and its sums are clamped to +-40 before the exponential: beyond 44 a squared weight overflows float32."""


@dataclass(frozen=True)
class Rule(Block):
    """Reject the tokens, or sequences, whose statistic lies outside [min, max].

    token_k1      rho                   a token; bounds on the ratio itself (IcePop, MIS)
    token_k2      l^2 / 2               a token
    token_k3      rho - 1 - l           a token
    token_probability_difference        |pi_train - pi_rollout| of a token (ROLL; prime-rl's ipo)
    seq_sum_*     k1: e^(sum of l), k2 and k3: their sum over the sequence; rejects the whole sequence
    seq_mean_*    k1: e^(mean of l), the geometric mean (NeMo RL's seq-mask-tis), k2 and k3: their mean
    seq_max_*     k1: every rho of the sequence must lie in the bounds (slime's, SkyRL's veto), k2 and k3: the largest

    verl applies its k1 bounds to pi_rollout / pi_train; take the reciprocals of bounds that come from there.
    """

    statistic: Statistic
    """The statistic that is compared."""
    max: float | None = None
    """Upper bound; null is none."""
    min: float | None = None
    """Lower bound; null is none."""

    def limits(self) -> tuple[float, float]:
        """Return (min, max); of k1 their logarithms, so that nothing overflows in a comparison."""
        low, high = self.min if self.min is not None else 0.0, self.max if self.max is not None else math.inf
        if not self.statistic.endswith("_k1"):
            return low, high
        return math.log(low) if low else -math.inf, math.log(high) if high else -math.inf

    def check(self, key: str) -> None:
        """Raise UserError for bounds that are missing or contradict each other; `key` names the rule."""
        if self.max is None and self.min is None:
            raise UserError(f"{key} ({self.statistic}) has neither min nor max: give at least one")
        low, high = self.min if self.min is not None else 0.0, self.max if self.max is not None else math.inf
        if not 0 <= low <= high:
            raise UserError(f"{key} ({self.statistic}): 0 <= min <= max must hold, got min={self.min}, max={self.max}")
        if not self.statistic.endswith("_k1") and self.max is None:
            raise UserError(f"{key}: {self.statistic} is a distance, 0 where both policies agree: give max")


PRESET_KEYS = ("weight", "weight_max", "weight_min", "reject", "normalize", "bypass")
"""Keys that a preset sets; the others are the user's also beside a preset."""
PRESETS_WITH_A_BOUND = ("trm",)
"""Presets whose source leaves the bound to the user: `reject` beside them may have other bounds, not other rules."""


@dataclass(frozen=True)
class CorrectionConfig(Block):
    """Rollout correction; `preset` sets PRESET_KEYS by a name that users know. In Python, take PRESETS[name]."""

    preset: str | None = None
    """A preset of docs/correction.md. It sets all keys below up to bypass."""
    weight: Weight = "token"
    """The ratio that weights a token."""
    weight_max: float | None = 2.0
    """Upper bound of the weight; null is none."""
    weight_min: float | None = None
    """Lower bound of the weight; null is 0."""
    reject: tuple[Rule, ...] = ()
    """Rules that all must hold."""
    normalize: bool = False
    """Divide weights by their mean over the batch."""
    bypass: bool = False
    """Take the engine's log-probs for the trainer's. The PPO ratio is then against the rollout and needs no weight."""
    denominator: Literal["all", "kept"] = "all"
    """Tokens by whose number the loss divides: all generated ones, or those that are kept."""
    max_nonfinite_fraction: Annotated[float, Range(at_least=0, at_most=1)] = 0.01
    """Largest share of tokens without a finite log-prob. A step with more of them is refused."""

    @classmethod
    def preset_values(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        name = values.get("preset")
        if isinstance(name, str) and "${" in name:
            raise UserError(f"{KEY}.preset={name} must be a name itself: it decides the defaults of other keys")
        if not isinstance(name, str) or name not in PRESETS:
            return {}
        preset = asdict(PRESETS[name])
        return {key: preset[key] for key in PRESET_KEYS}

    def resolve(self) -> "CorrectionConfig":
        """Return the settings without the name of a preset.

        Raises: UserError, naming the key, on a value out of range, on keys that contradict each other or the preset
        """
        if self.preset is not None:
            if self.preset not in PRESETS:
                raise UserError(f"{KEY}.preset={self.preset!r} is none of {', '.join(PRESETS)}")
            preset = PRESETS[self.preset]
            for key in PRESET_KEYS:
                if getattr(self, key) != getattr(preset, key) and not (key == "reject" and self._sets_a_bound(preset)):
                    raise UserError(
                        f"{KEY}.{key} contradicts {KEY}.preset={self.preset}: give the keys with preset=null, or the "
                        "preset alone"
                    )
            return replace(self, preset=None).resolve()
        check_fields(self, f"{KEY}.")
        self._check()
        return self

    def _sets_a_bound(self, preset: "CorrectionConfig") -> bool:
        rules, given = preset.reject, self.reject
        return self.preset in PRESETS_WITH_A_BOUND and [r.statistic for r in rules] == [r.statistic for r in given]

    @property
    def of_whole_batch(self) -> str:
        """The key and value that need the weights of a whole batch at once; empty if none does."""
        if self.normalize:
            return "normalize=true"
        return "denominator=kept" if self.denominator == "kept" else ""

    def __str__(self) -> str:
        """The settings in one line, as a run logs them at its start."""
        if self.bypass:
            return "bypass"
        bounds = [f"{word} {bound}" for word, bound in (("from", self.weight_min), ("to", self.weight_max)) if bound]
        rules = [f"{r.statistic} within {r.min or 0}..{'' if r.max is None else r.max}" for r in self.reject]
        weight = " ".join([f"weight {self.weight}", *bounds, *(["normalized"] if self.normalize else [])])
        return "; ".join([weight, *rules, *([f"denominator {self.denominator}"] if rules else [])])

    def _check(self) -> None:
        low, high = self.weight_min or 0.0, math.inf if self.weight_max is None else self.weight_max
        if not (0 <= low <= high and high > 0):
            raise UserError(
                f"{KEY}: 0 <= weight_min <= weight_max must hold, and weight_max be above 0; got "
                f"weight_min={self.weight_min}, weight_max={self.weight_max}"
            )
        if self.weight == "none" and self.normalize:
            raise UserError(f"{KEY}.normalize=true has nothing to normalize: weight is none")
        if self.bypass and (self.weight != "none" or self.reject):
            raise UserError(f"{KEY}.bypass=true makes both policies one: set weight=none and no reject rules")
        for i, rule in enumerate(self.reject):
            rule.check(f"{KEY}.reject[{i}]")


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
    "mis": _preset("token", None, Rule("token_k1", 2.0, 0.5)),
    "seq-mis": _preset("sequence", None, Rule("seq_sum_k1", 2.0, 0.5)),
    "seq-mask-tis": _preset("token", None, Rule("seq_mean_k1", 1.002, 0.999)),
    "geo-rs": _preset("none", None, Rule("seq_mean_k1", 1.001, 0.999)),
    "geo-rs-token-tis": _preset("token", 2.0, Rule("seq_mean_k1", 1.001, 0.999)),
    "k3-rs": _preset("none", None, Rule("seq_mean_k3", 0.01)),
    "veto": _preset("token", 2.0, Rule("seq_max_k1", None, 1e-4)),
    "ipo": _preset("token", None, Rule("token_probability_difference", 0.1)),
    "sparse-rl": _preset("token", 1.5, Rule("token_k1", 1.5, 0.5), Rule("seq_max_k1", None, 1e-4), normalize=True),
    "trm": _preset("none", None, Rule("seq_max_k3", 0.3)),
}
"""Names that users know, with the bounds of their sources (NeMo RL, verl's recipes, slime, prime-rl, Sparse-RL's code).

sparse-rl (arXiv 2601.10079): its code divides the weights by their mean over all tokens before rejection, we by that
over the kept tokens; for all tokens of a batch the two differ by one factor.
trm (arXiv 2512.23075): the paper leaves the bound to the user; 0.3 is ours, every rho between 0.41 and 1.99.
"""
