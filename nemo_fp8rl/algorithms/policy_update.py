"""The second half of a step, for our loop and for NeMo RL's: judge a scored batch, correct it, train on it.

ScoredBatch --mismatch--> gates --rollout correction--> TrainBatch --split--> one optimizer step per global batch
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.algorithms.correction import correct_batch
from nemo_fp8rl.algorithms.correction_config import CorrectionConfig
from nemo_fp8rl.algorithms.gates import GateConfig, GateStop, alarm, apply_gates
from nemo_fp8rl.algorithms.loss import EXTREMA, combine_metrics
from nemo_fp8rl.algorithms.mismatch import MismatchSums, mismatch_by_lag, mismatch_metrics
from nemo_fp8rl.batch import Completion, RolloutBatch, ScoredBatch
from nemo_fp8rl.common.errors import StepRefused


@dataclass(frozen=True)
class Judgement:
    """A scored batch after the gates and the rollout correction.

    batch:         the batch to train on; a TrainBatch if it was corrected
    skip_update:   True when a gate forbids an update from this batch
    warnings:      one sentence for each gate that tripped
    alarm:         a sentence about a mismatch that the run's precision does not explain, or ""
    mismatch:      the metrics of trainer against engine (`MismatchSums.metrics`); empty when no token was compared
    mismatch_by_position, mismatch_by_lag, correction:  further metrics
    """

    batch: ScoredBatch
    skip_update: bool
    warnings: list[str]
    alarm: str
    mismatch: dict[str, float]
    mismatch_by_position: dict[str, float]
    correction: dict[str, float]
    mismatch_by_lag: dict[str, float] = field(default_factory=dict)


def judge_and_correct(
    batch: ScoredBatch,
    mask: Tensor,
    gates: Sequence[GateConfig],
    correction: CorrectionConfig | None,
    explained: float = math.inf,
    stops: bool = False,
    trainer_version: int | None = None,
    explained_newest: float = math.inf,
    sharpness: Mapping[str, float] | None = None,
    train_rows: Tensor | None = None,
) -> Judgement:
    """Measure the mismatch, apply the gates to it, and correct the batch.

    Where the batch has `token_versions`, gates see only the answers that are of the trainer's version from the first
    token to the last, if there are any: older weights explain every mismatch of the others.

    mask:              float32 [B, T], the tokens whose mismatch is measured
    correction:        None leaves the batch as it is
    explained:         the largest mismatch without an alarm, see `explained_mismatch`
    stops:             the alarm ends the run
    trainer_version:   the version that gave prev_logprobs; needed with `token_versions`
    explained_newest:  the same as `explained`, for the answers that gates see
    sharpness:         further metrics that gates see, of the trainer alone, whatever the versions of the answers
    train_rows:        int64 [rows], the rows to correct and to train on, some of them repeated; None: all, once each
    Raises:      GateStop where a gate or the alarm ends the run, RolloutError (see `correct_batch`)
    """
    seen = MismatchSums()
    mismatch, by_lag, skip_update, warnings = dict[str, float](), dict[str, float](), False, list[str]()
    logprobs, newest = (batch.prev_logprobs, batch.generation_logprobs), mask
    sentence, judged = "", dict[str, float]()
    if batch.token_versions is not None and trainer_version is not None and mask.any():
        by_lag = mismatch_by_lag(*logprobs, mask, batch.token_versions, trainer_version)
        newest = mask * of_version(batch, trainer_version)[:, None]
    if mask.any():
        seen.observe(*logprobs, mask)
        mismatch = seen.metrics()
        sentence = alarm(mismatch, explained)
    if newest.any():
        judged = mismatch if newest is mask else mismatch_metrics(*logprobs, newest)
        sentence = sentence or (alarm(judged, explained_newest) if newest is not mask else "")
    skip_update, warnings = apply_gates(gates, {**judged, **(sharpness or {})})
    if sentence and stops:
        raise GateStop(sentence)
    metrics: dict[str, float] = {}
    if train_rows is not None:
        batch = batch.take_rows(train_rows)
    if correction is not None:
        batch, metrics = correct_batch(batch, correction)
    batch = replace(batch, token_versions=None)  # nothing after this reads them
    return Judgement(batch, skip_update, warnings, sentence, mismatch, seen.by_position(), metrics, by_lag)


def of_version(batch: RolloutBatch, version: int) -> Tensor:
    """Return bool [B]: every token of the answer, and every key in its context, is of this version."""
    assert batch.token_versions is not None
    inside = torch.arange(batch.input_ids.size(1), device=batch.input_ids.device) < batch.input_lengths[:, None]
    return ((batch.token_versions == version) | ~inside).all(1)


def check_versions(completions: Sequence[Completion], trainer_version: int, max_age: int) -> None:
    """Raise StepRefused where a token's version was not committed, or is more than `max_age` versions old.

    A completion's versions are known by construction: an engine raises for a token without one.
    """
    versions = {version for c in completions for version in (c.policy_version, *c.token_versions)}
    if wrong := sorted(v for v in versions if not trainer_version - max_age <= v <= trainer_version or v < 0):
        raise StepRefused(
            f"answers have tokens of the versions {wrong}; the trainer is at {trainer_version}, and answers may be "
            f"grpo.async_grpo.max_trajectory_age_steps={max_age} versions old"
        )


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


def describe_overflows(steps: Sequence[dict[str, float]]) -> str:
    """Return a sentence about optimizer steps whose gradients overflowed float16; "" where there are none."""
    scales = [step["loss_scale"] for step in steps if step.get("overflow_ratio")]
    if not scales:
        return ""
    return (
        f"{len(scales)} of {len(steps)} optimizer steps were skipped, because gradients overflowed float16 at a loss "
        f"scale of {scales[-1]:g}; a lower policy.megatron_cfg.optimizer.initial_loss_scale avoids this at a start"
    )


def describe_empty_steps(count: int) -> str:
    """Return a sentence about optimizer steps that had no token to train on; "" where there are none."""
    if not count:
        return ""
    steps = "1 optimizer step was" if count == 1 else f"{count} optimizer steps were"
    return f"{steps} skipped, because nothing was left to train on: all its tokens were rejected"


def average_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over optimizer steps; of metrics that end in _min or _max, the extremum."""
    total = combine_metrics(steps)
    return {name: value if name.endswith(tuple(EXTREMA)) else value / len(steps) for name, value in total.items()}
