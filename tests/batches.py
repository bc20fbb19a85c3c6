"""Batches and counts for tests that train without a rollout, and batches as mappings of columns, which tests change."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.algorithms.correction import correct_batch
from nemo_fp8rl.algorithms.correction_config import CorrectionConfig
from nemo_fp8rl.batch import LossTotals, RolloutBatch, ScoredBatch
from nemo_fp8rl.nemo_rl.adapters.batched_data import UNFILTERED, build_batch


def rollout_batch(input_ids: Tensor, input_lengths: Tensor, token_mask: Tensor) -> RolloutBatch:
    """Every sample counts; no engine sampled a token."""
    return RolloutBatch(
        input_ids=input_ids,
        input_lengths=input_lengths,
        token_mask=token_mask,
        sample_mask=torch.ones(len(input_ids)),
        generation_logprobs=torch.zeros(token_mask.shape),
    )


def loss_totals(valid_seqs: float, valid_toks: float) -> LossTotals:
    return LossTotals(torch.tensor(float(valid_seqs)), torch.tensor(float(valid_toks)))


def stage_of(columns: Mapping[str, Tensor]) -> ScoredBatch:
    """A scored batch or, with importance weights, a training batch; what a test does not give is 0."""
    return build_batch(columns, {"rewards", "advantages", "prev_logprobs"})


def columns_of(batch: ScoredBatch) -> dict[str, Tensor]:
    return {name: column for name, column in vars(batch).items() if column is not None}


def correct_columns(columns: Mapping[str, Tensor], cfg: CorrectionConfig) -> tuple[dict[str, Tensor], dict[str, float]]:
    batch, metrics = correct_batch(stage_of(columns), cfg)
    return {**columns, **columns_of(batch)}, metrics


def loss_of_columns(
    loss: Any, curr: Tensor, columns: Mapping[str, Tensor], valid_seqs: Tensor, valid_toks: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """The loss of a batch whose mapping may also have positive_toks [] and curr_logprobs_unfiltered [B, T-1]."""
    totals = LossTotals(valid_seqs, valid_toks, columns.get("positive_toks"))
    return loss(curr, stage_of(columns), totals, columns.get(UNFILTERED))
