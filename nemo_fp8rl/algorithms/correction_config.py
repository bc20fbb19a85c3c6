"""The settings of rollout correction, the presets that users know by name, and what is refused.

`correction` says what they mean.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, get_args

from nemo_fp8rl.common.errors import UserError

Weight = Literal["none", "token", "sequence", "geometric"]
Statistic = Literal[
    "token_k1", "token_k2", "token_k3", "token_probability_difference",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k1", "seq_max_k2", "seq_max_k3",
]  # fmt: skip
LARGEST_LOG = 40.0
"""l and its sums are clamped to +-40 before e^: beyond 44 the square of a weight overflows float32."""


@dataclass(frozen=True)
class Rule:
    """Keeps what lies in [min, max] and rejects the rest.

    token_k1      rho                   a token; bounds on the ratio itself (IcePop, MIS)
    token_k2      l^2 / 2               a token
    token_k3      rho - 1 - l           a token
    token_probability_difference        |pi_train - pi_rollout| of a token (ROLL; prime-rl's ipo)
    seq_sum_*     k1: e^(sum of l), k2 and k3: their sum over the sequence; rejects the whole sequence
    seq_mean_*    k1: e^(mean of l), the geometric mean (NeMo RL's seq-mask-tis), k2 and k3: their mean
    seq_max_*     k1: every rho of the sequence must lie in the bounds (slime's, SkyRL's veto), k2 and k3: the largest

    verl applies its k1 bounds to pi_rollout / pi_train; take the reciprocals of bounds that come from there.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    statistic: Statistic
    max: float | None = None
    min: float | None = None

    def limits(self) -> tuple[float, float]:
        """(min, max), of k1 their logarithms: compared as such nothing overflows."""
        low, high = self.min if self.min is not None else 0.0, self.max if self.max is not None else math.inf
        if not self.statistic.endswith("_k1"):
            return low, high
        return math.log(low) if low else -math.inf, math.log(high) if high else -math.inf

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


_LEFT_OUT: Any = object()


def _preset_or(default: Any) -> Any:
    """A key that, where it is left out, is what the preset sets, and `default` without a preset."""
    return field(default_factory=lambda: _LEFT_OUT, metadata={"without_preset": default})


@dataclass(frozen=True)
class CorrectionConfig:
    """The block `nemo_fp8rl.correction`; `preset` fills the keys that are left out, by a name that users know."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    preset: str | None = None
    """One of PRESETS, instead of the keys below up to `bypass`: one that says something else is refused."""
    weight: Weight = _preset_or("token")  # noqa: RUF009, a field as those below
    """What a token is weighted with."""
    weight_max: float | None = _preset_or(2.0)
    """Upper bound of the weight; null leaves it unbounded."""
    weight_min: float | None = _preset_or(None)
    """Lower bound of the weight; null is 0."""
    reject: tuple[Rule, ...] = _preset_or(())
    """Rules that all must hold."""
    normalize: bool = _preset_or(False)
    """Divide weights by their mean over the batch."""
    bypass: bool = _preset_or(False)
    """Take the engine's log-probs for the trainer's: the PPO ratio is then against the rollout and needs no weight."""
    denominator: Literal["all", "kept"] = "all"
    """Whether the loss divides by all generated tokens, rejected ones too, or by those that are kept."""
    max_nonfinite_fraction: float = 0.01
    """Share of tokens without a finite log-probability above which a step is refused."""

    def __post_init__(self) -> None:
        preset = None if self.preset is None else PRESETS.get(self.preset)
        for key in fields(self):
            if getattr(self, key.name) is _LEFT_OUT:
                value = getattr(preset, key.name) if preset else key.metadata["without_preset"]
                object.__setattr__(self, key.name, value)

    def resolved(self) -> "CorrectionConfig":
        """These settings, or where a preset is named the preset's. Raises UserError on contradictions."""
        if self.preset is not None:
            if self.preset not in PRESETS:
                raise UserError(f"nemo_fp8rl.correction.preset={self.preset!r} is none of {', '.join(PRESETS)}")
            preset = PRESETS[self.preset]
            for key in (f.name for f in fields(self) if f.metadata):
                if getattr(self, key) != getattr(preset, key):
                    raise UserError(
                        f"nemo_fp8rl.correction.{key} contradicts nemo_fp8rl.correction.preset={self.preset}: "
                        "give the keys with preset=null, or the preset alone"
                    )
            return replace(self, preset=None).resolved()
        self._check()
        return self

    @property
    def of_whole_batch(self) -> str:
        """The key and value that need the weights of a whole batch at once, if any does."""
        if self.normalize:
            return "normalize=true"
        return "denominator=kept" if self.denominator == "kept" else ""

    def __str__(self) -> str:
        """The settings in one line, as it is logged at the start of a run."""
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
}
"""Names that users know, with the bounds their sources give (NeMo RL, verl's recipes, slime, prime-rl)."""


def from_mapping(cfg: CorrectionConfig | Mapping[str, Any]) -> CorrectionConfig:
    """The resolved correction of a mapping with the keys of `nemo_fp8rl.correction`. Raises UserError."""
    if isinstance(cfg, CorrectionConfig):
        return cfg.resolved()
    known = {f.name for f in fields(CorrectionConfig)}
    if unknown := sorted(set(cfg) - known):
        raise UserError(f"nemo_fp8rl.correction.{unknown[0]} is not a key; there are {', '.join(sorted(known))}")
    if "reject" in cfg:
        cfg = {**cfg, "reject": _rules(cfg["reject"] or ())}
    return CorrectionConfig(**cfg).resolved()


def _rules(rules: Any) -> tuple[Rule, ...]:
    if isinstance(rules, Mapping | str):
        raise UserError(f"nemo_fp8rl.correction.reject must be a list of rules, got {rules!r}")
    return tuple(_rule(rule, f"nemo_fp8rl.correction.reject[{i}]") for i, rule in enumerate(rules))


def _rule(rule: Rule | Mapping[str, Any], key: str) -> Rule:
    if isinstance(rule, Rule):
        return rule
    known = [f.name for f in fields(Rule)]
    if unknown := sorted(set(rule) - set(known)):
        raise UserError(f"{key}: {unknown[0]} is not a key of a rule; there are {', '.join(known)}")
    if "statistic" not in rule:
        raise UserError(f"{key} has no statistic: one of {', '.join(get_args(Statistic))}")
    return Rule(**rule)
