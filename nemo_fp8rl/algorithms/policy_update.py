"""The second half of a step, for our loop and for NeMo RL's: judge a scored batch, correct it, train on it.

ScoredBatch --mismatch--> gates --rollout correction--> TrainBatch --split--> one optimizer step per global batch
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nemo_fp8rl.algorithms.correction import correct_batch
from nemo_fp8rl.algorithms.correction_config import CorrectionConfig
from nemo_fp8rl.algorithms.gates import GateConfig, GateStop, alarm, apply_gates
from nemo_fp8rl.algorithms.loss import EXTREMA, combine_metrics
from nemo_fp8rl.algorithms.mismatch import MismatchSums
from nemo_fp8rl.batch import RolloutBatch, ScoredBatch


@dataclass(frozen=True)
class Judgement:
    """A scored batch after the gates and the rollout correction.

    batch:         the batch to train on; a TrainBatch if it was corrected
    skip_update:   True when a gate forbids an update from this batch
    warnings:      one sentence for each gate that tripped
    alarm:         a sentence about a mismatch that the run's precision does not explain, or ""
    mismatch:      the metrics of trainer against engine (`MismatchSums.metrics`); empty when no token was compared
    mismatch_by_position, correction:  further metrics
    """

    batch: ScoredBatch
    skip_update: bool
    warnings: list[str]
    alarm: str
    mismatch: dict[str, float]
    mismatch_by_position: dict[str, float]
    correction: dict[str, float]


def judge_and_correct(
    batch: ScoredBatch,
    mask: Tensor,
    gates: Sequence[GateConfig],
    correction: CorrectionConfig | None,
    explained: float = math.inf,
    stops: bool = False,
) -> Judgement:
    """Measure the mismatch, apply the gates to it, and correct the batch.

    mask:        float32 [B, T], the tokens whose mismatch is measured
    correction:  None leaves the batch as it is
    explained:   the largest mismatch without an alarm, see `explained_mismatch`
    stops:       the alarm ends the run
    Raises:      GateStop where a gate or the alarm ends the run, RolloutError (see `correct_batch`)
    """
    seen = MismatchSums()
    mismatch, skip_update, warnings = dict[str, float](), False, list[str]()
    if mask.any():
        seen.observe(batch.prev_logprobs, batch.generation_logprobs, mask)
        mismatch = seen.metrics()
        skip_update, warnings = apply_gates(gates, mismatch)
    sentence = alarm(mismatch, explained)
    if sentence and stops:
        raise GateStop(sentence)
    metrics: dict[str, float] = {}
    if correction is not None:
        batch, metrics = correct_batch(batch, correction)
    return Judgement(batch, skip_update, warnings, sentence, mismatch, seen.by_position(), metrics)


def train_on_batch(
    batch: RolloutBatch, train_step: Callable[[Any], dict[str, float]], global_batch_size: int, skip_update: bool
) -> tuple[list[dict[str, float]], int]:
    """Take one optimizer step for every `global_batch_size` rows; return each step's metrics and the skipped steps.

    A step is skipped where no token is left to train on: Adam would move on a gradient of 0.

        train_step:   one optimizer step on a part of the batch; returns its metrics
        skip_update:  True skips all steps
    """
    starts = range(0, batch.num_rows, global_batch_size)
    parts = [batch.take_trimmed_rows(slice(start, start + global_batch_size)) for start in starts]
    trainable = [part for part in parts if not skip_update and part.has_tokens()]
    return [train_step(part) for part in trainable], len(parts) - len(trainable)


def average_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over optimizer steps; of metrics that end in _min or _max, the extremum."""
    total = combine_metrics(steps)
    return {name: value if name.endswith(tuple(EXTREMA)) else value / len(steps) for name, value in total.items()}
