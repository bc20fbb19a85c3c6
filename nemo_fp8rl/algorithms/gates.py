"""Gates: limits on the mismatch of trainer and engine, judged before a batch is trained on.

In a recipe, for instance with what NVIDIA accepts:

    nemo_fp8rl:
      gates:
        - {metric: token_mult_prob_error, max: 1.05, action: warn}
        - {metric: gen_kl_error, max: 0.015, action: stop}

The metrics are those of mismatch.py over the whole batch, and at the steps that measure it the trainer's sharpness. A
metric that is NaN trips every gate on it.

Without any gate there is an alarm (`alarm`): a mismatch that the run's precision does not explain is never silent. It
warns and does not stop, because a limit for all models can only be a rough one; `mismatch_alarm: stop` makes it stop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from nemo_fp8rl.algorithms.metric_names import METRICS, SHARPNESS
from nemo_fp8rl.common.errors import StepRefused, UserError
from nemo_fp8rl.common.field_rules import AT_LEAST_0, Block, check_fields

Action = Literal["warn", "skip_step", "stop"]
"""Warn, do not train on this batch, or end the run. The later one wins when several gates trip."""

AGREEMENT = ("exact_logprob_fraction", "ess", "ess_seq", "probs_pearson_corr")
"""Metrics that grow with agreement, for which an upper limit means nothing."""
GATED = (*(name for name in METRICS if name not in AGREEMENT), *SHARPNESS)


@dataclass(frozen=True)
class GateConfig(Block):
    """One entry of `nemo_fp8rl.gates`."""

    metric: str
    """A metric of the mismatch, or sharpness. One of GATED: without those that grow with agreement."""
    max: Annotated[float, AT_LEAST_0]
    """Largest value that passes."""
    action: Action
    """Reaction to a larger value."""

    def check(self, key: str) -> None:
        """Raise UserError on an unknown metric or action and on a limit that is not a number of 0 or more.

        key: the entry in the recipe, such as nemo_fp8rl.gates[0]
        """
        if self.metric in AGREEMENT:
            raise UserError(
                f"{key}.metric={self.metric} grows with agreement, so that a max says nothing: gate gen_kl_error or "
                "token_mult_prob_error instead"
            )
        if self.metric not in GATED:
            raise UserError(f"{key}.metric={self.metric!r} is none of {', '.join(GATED)}")
        check_fields(self, f"{key}.")


ALARM_METRIC = "token_mult_prob_error"
ROUNDING = 0.02
"""Excess of the metric over 1 that bfloat16 kernels with other rounding points explain. This and the next numbers are
about four times the largest step in docs/results.md."""
ALIGNED = 0.01
"""Excess where the trainer rounds as the engine does."""
KERNELS = {"fp8": 0.06, "mxfp8": 0.06, "nvfp4": 0.12, "nvfp4_a16": 0.06}
"""Further excess, by format, with kernels that round differently. Where a step of a format is four times as large, as
between E2M1 and E4M3, a rounding point elsewhere moves fewer values by more: twice the excess, which is an estimate."""
ENGINE = {"fp8": 0.14, "mxfp8": 0.14, "nvfp4": 0.98, "nvfp4_a16": 0.54}
"""Further excess with the format in the engine alone. NVFP4 of the tiny model gave up to 1.25 with 4-bit activations,
and up to 1.14 with bfloat16 ones."""
FP8_CACHE = 0.06
"""Further excess with an FP8 KV cache."""
EXPERTS = 10
"""Factor for a mixture of experts: a token whose router decides otherwise in the engine gets other experts."""
STALENESS = 1.0
"""Further excess where engines generate from older weights."""


def explained_mismatch(
    flow: str,
    *,
    aligned: bool = False,
    fp8_cache: bool = False,
    experts: bool = False,
    temperature: float = 1.0,
    asynchronous: bool = False,
) -> float:
    """Return the largest ALARM_METRIC of a step that a run's precision explains.

    flow:         nemo_fp8rl.flow
    aligned:      the trainer rounds where the engine does, and reads what an FP8 cache holds
    fp8_cache:    the engine has an FP8 KV cache
    experts:      the model is a mixture of experts
    temperature:  of sampling; both sides divide logits by it
    asynchronous: engines generate from older weights
    """
    name, _, side = flow.rpartition("_")
    same = aligned and side != "rollout"
    excess = ALIGNED if same else ROUNDING + (ENGINE if side == "rollout" else KERNELS).get(name, 0.0)
    excess += FP8_CACHE if fp8_cache and not same else 0.0
    excess *= EXPERTS if experts else 1
    return 1 + excess / min(temperature or 1.0, 1.0) + (STALENESS if asynchronous else 0.0)


def alarm(metrics: Mapping[str, float], explained: float) -> str:
    """Return a sentence about a mismatch above `explained_mismatch`, "" without one.

    metrics:  without ALARM_METRIC nothing was compared
    """
    value = metrics.get(ALARM_METRIC, 1.0)
    if value <= explained:
        return ""
    return (
        f"MISMATCH: {ALARM_METRIC} is {value:.4g}, and the precision of this run explains at most {explained:.3g}: "
        "trainer and engine do not compute the same model, or the weights have diverged; compare the model's "
        "config.json with its weights, set nemo_fp8rl.refit.verify=full, and see docs/troubleshooting.md"
    )


class GateStop(StepRefused):
    """A gate of the recipe ends the run: trainer and engine disagree too much."""


def check_gates(gates: Sequence[GateConfig], sharpness_period: int) -> None:
    """Raise UserError, naming the entry, when an entry is invalid, repeats metric and action of an earlier entry, or
    limits a sharpness that no step measures.

    sharpness_period:  nemo_fp8rl.sharpness.period
    """
    first: dict[tuple[str, str], int] = {}
    for i, gate in enumerate(gates):
        key = f"nemo_fp8rl.gates[{i}]"
        gate.check(key)
        if gate.metric in SHARPNESS and not sharpness_period:
            raise UserError(
                f"{key}.metric={gate.metric} is never measured with nemo_fp8rl.sharpness.period=0: set the period to "
                "the number of steps between measurements"
            )
        earlier = first.setdefault((gate.metric, gate.action), i)
        if earlier != i:
            raise UserError(
                f"{key} repeats nemo_fp8rl.gates[{earlier}] ({gate.metric}, {gate.action}): keep the one with the "
                "lower max"
            )


def apply_gates(gates: Sequence[GateConfig], metrics: Mapping[str, float]) -> tuple[bool, list[str]]:
    """Return whether the batch must be skipped, and a message for each gate that trips, in their order.

    metrics: of `MismatchSums.metrics`, and sharpness; a gate on a metric that this step did not measure does not trip
    Raises:  GateStop where a gate ends the run
    """
    measured = [gate for gate in gates if gate.metric in metrics]
    tripped = [gate for gate in measured if not metrics[gate.metric] <= gate.max]  # so that NaN trips
    actions = {gate.action for gate in tripped}
    messages = [
        f"{gate.metric} is {metrics[gate.metric]:.6g}, its gate allows at most {gate.max:.6g} ({gate.action})"
        for gate in tripped
    ]
    if "stop" in actions:
        raise GateStop("; ".join(messages))
    return "skip_step" in actions, messages
