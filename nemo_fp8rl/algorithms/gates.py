"""Gates: limits on the mismatch of trainer and engine, judged before a batch is trained on.

In a recipe, for instance with what NVIDIA accepts:

    nemo_fp8rl:
      gates:
        - {metric: token_mult_prob_error, max: 1.05, action: warn}
        - {metric: gen_kl_error, max: 0.015, action: stop}

The metrics are those of mismatch.py over the whole batch. A metric that is NaN trips every gate on it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from nemo_fp8rl.algorithms.metric_names import METRICS
from nemo_fp8rl.common.errors import StepRefused, UserError
from nemo_fp8rl.common.field_rules import AT_LEAST_0, Block, check_fields

Action = Literal["warn", "skip_step", "stop"]
"""Warn, do not train on this batch, or end the run. The later one wins when several gates trip."""

AGREEMENT = ("exact_logprob_fraction", "ess", "ess_seq", "probs_pearson_corr")
"""Metrics that grow with agreement, for which an upper limit means nothing."""
GATED = tuple(name for name in METRICS if name not in AGREEMENT)


@dataclass(frozen=True)
class GateConfig(Block):
    """One entry of `nemo_fp8rl.gates`."""

    metric: str
    """A metric of the mismatch. One of GATED: the mismatch metrics, without those that grow with agreement."""
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


class GateStop(StepRefused):
    """A gate of the recipe ends the run: trainer and engine disagree too much."""


def check_gates(gates: Sequence[GateConfig]) -> None:
    """Raise UserError, naming the entry, when an entry is invalid or repeats metric and action of an earlier entry."""
    first: dict[tuple[str, str], int] = {}
    for i, gate in enumerate(gates):
        key = f"nemo_fp8rl.gates[{i}]"
        gate.check(key)
        earlier = first.setdefault((gate.metric, gate.action), i)
        if earlier != i:
            raise UserError(
                f"{key} repeats nemo_fp8rl.gates[{earlier}] ({gate.metric}, {gate.action}): keep the one with the "
                "lower max"
            )


def apply_gates(gates: Sequence[GateConfig], metrics: Mapping[str, float]) -> tuple[bool, list[str]]:
    """Return whether the batch must be skipped, and a message for each gate that trips, in their order.

    metrics: of `MismatchSums.metrics`
    Raises:  GateStop where a gate ends the run
    """
    tripped = [gate for gate in gates if not metrics[gate.metric] <= gate.max]  # so that NaN trips
    actions = {gate.action for gate in tripped}
    messages = [
        f"{gate.metric} is {metrics[gate.metric]:.6g}, its gate allows at most {gate.max:.6g} ({gate.action})"
        for gate in tripped
    ]
    if "stop" in actions:
        raise GateStop("; ".join(messages))
    return "skip_step" in actions, messages
