"""grpo.trajectory_sampling in the loop: which answers of a rollout get log-probs, and which rows train.

The choice comes before the log-prob pass, which is computed of the kept answers alone; rows are repeated after it.
Advantages are of whole groups, as without the choice.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nemo_fp8rl.algorithms.trajectories import draw_pairs, pair_by_contrast
from nemo_fp8rl.batch import RolloutBatch
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.generation.interface import sample_seed
from nemo_fp8rl.rollout.collect import Rollout, compute_advantages


@dataclass(frozen=True)
class Trajectories:
    """The answers that a step trains on.

    rollout:     of the kept answers; its counts stay those of all answers
    batch:       the kept answers
    advantages:  float32 [B, T] of `batch`; None where they are still to be computed
    train_rows:  int64 [rows], the rows of `batch` that train, some of them repeated; None: all, once each
    metrics:     under train/
    """

    rollout: Rollout
    batch: RolloutBatch
    advantages: Tensor | None = None
    train_rows: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def sample_trajectories(cfg: Config, rollout: Rollout, batch: RolloutBatch, step: int) -> Trajectories:
    """Choose the answers that train, by grpo.trajectory_sampling; the draw depends on grpo.seed and the step alone."""
    settings = cfg.grpo.trajectory_sampling
    if not settings.enabled:
        return Trajectories(rollout, batch)
    advantages = compute_advantages(cfg, rollout, batch)
    scores = answer_advantages(advantages, batch)
    pairs = pair_by_contrast(scores, rollout.group_ids, cfg.grpo.kept_pairs)
    rows = pairs.flatten().sort().values
    order, num_filled = rows, 0
    train_rows: Tensor | None = None
    if settings.shuffle_rounds:
        generator = torch.Generator().manual_seed(sample_seed(cfg.grpo.seed, step, "trajectories"))
        weights, count = scores[pairs].double().abs().sum(-1), len(pairs) // settings.shuffle_rounds
        draws, num_filled = draw_pairs(weights, settings.shuffle_rounds, count, generator)
        order = pairs[draws].flatten()
        train_rows = torch.searchsorted(rows, order)
    uses = torch.bincount(order, minlength=batch.num_rows)
    metrics = {
        "frac_zero_advantage": float((scores == 0).double().mean()),
        "frac_zero_advantage_trained": float((scores[order] == 0).double().mean()),
        "frac_rows_trained_once": float((uses[order] == 1).double().mean()),
        "pairs_filled": float(num_filled),
    }
    part = _take_answers(rollout, rows)
    return Trajectories(part, batch.take_rows(rows), advantages[rows], train_rows, metrics)


def answer_advantages(advantages: Tensor, batch: RolloutBatch) -> Tensor:
    """Return the advantage of each answer, float32 [B]; 0 of an answer that the loss leaves out.

    advantages: float32 [B, T], one value on all generated tokens of an answer
    """
    return advantages.gather(1, batch.input_lengths[:, None] - 1)[:, 0] * batch.sample_mask


def _take_answers(rollout: Rollout, rows: Tensor) -> Rollout:
    return replace(
        rollout,
        prompts=[rollout.prompts[row] for row in rows.tolist()],
        completions=[rollout.completions[row] for row in rows.tolist()],
        rewards=rollout.rewards[rows],
        group_ids=rollout.group_ids[rows],
    )
