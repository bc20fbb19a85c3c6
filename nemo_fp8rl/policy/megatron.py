"""The driver's side of the policy: data-parallel Megatron ranks, in this process or as Ray actors."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.algorithms.loss import combined
from nemo_fp8rl.batch import TrainBatch, shards
from nemo_fp8rl.config import Config
from nemo_fp8rl.policy.base import Loss
from nemo_fp8rl.policy.worker import MegatronWorker
from nemo_fp8rl.workers import ended_on_error, start_workers

PER_RANK = ("grad_norm", "lr")
"""Metrics that every rank reports alike; all others are `combined` over ranks."""


class MegatronPolicy:
    """`policy.base.Policy` over cluster.train_ranks ranks."""

    def __init__(self, cfg: Config) -> None:
        self.ranks = start_workers(MegatronWorker, cfg.cluster.train_ranks, cfg.cluster)
        count = self.ranks.count
        with ended_on_error(self.ranks):
            rendezvous = self.ranks.call("rendezvous", [()] * count)[0] if count > 1 else None
            self.ranks.call("setup", [(cfg, rank, count, rendezvous) for rank in range(count)])

    def logprobs(self, batch: TrainBatch) -> Tensor:
        return torch.cat(self.ranks.call("logprobs", [(part,) for part in shards(batch, self.ranks.count)]))

    def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        return torch.cat(self.ranks.call("reference_logprobs", [(part,) for part in shards(batch, self.ranks.count)]))

    def train_step(self, batch: TrainBatch, loss: Loss) -> dict[str, float]:
        mask = batch["token_mask"][:, 1:] * batch["sample_mask"].unsqueeze(-1)
        counts = float((mask.sum(-1) > 0).sum()), float(mask.sum())
        if not counts[1]:
            raise ValueError("the batch holds no token to train on: every sample is masked out")
        results = self.ranks.call("train_step", [(part, loss, *counts) for part in shards(batch, self.ranks.count)])
        return combined(results) | {name: results[0][name] for name in PER_RANK}

    def weight_error(self) -> dict[str, float]:
        return self.ranks.call("weight_error", [()] * self.ranks.count)[0]

    def export_update(self, version: int) -> Any:
        """Ranks are replicas, so rank 0 exports; between processes the update travels as bytes."""
        update = self.ranks.start(0, "export_update", version, self.ranks.separate_processes)
        self.ranks.wait(update)
        return update

    def save(self, folder: Path) -> None:
        self.ranks.call("save", [(str(folder.resolve()),)] * self.ranks.count)

    def load(self, folder: Path) -> None:
        self.ranks.call("load", [(str(folder.resolve()),)] * self.ranks.count)

    def shutdown(self) -> None:
        self.ranks.shutdown()
