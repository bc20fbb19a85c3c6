"""The checkpoint of one rank: weights or adapters, the optimizer's state, and what else decides the engine's bytes."""

import shutil
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.hf.adapter_folder import base_digest
from nemo_fp8rl.hf.hub import checkpoint_folder
from nemo_fp8rl.policy.interface import SHARED_FOLDER_HINT
from nemo_fp8rl.policy.weights.adapters import check_kind, load_adapters, save_adapters
from nemo_fp8rl.policy.weights.checkpoint import load_hf, save_hf
from nemo_fp8rl.policy.weights.global_scales import FOLDER as GLOBAL_SCALES
from nemo_fp8rl.policy.weights.global_scales import GlobalScales
from nemo_fp8rl.policy.weights.optimizer_state import load_optimizer, save_optimizer
from nemo_fp8rl.policy.weights.rank_weights import RankWeights


class CacheScales(Protocol):
    """The scales of an FP8 KV cache, in files of their own."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class RankCheckpoint:
    """Saves and loads the state of a rank; parameters must not be offloaded.

    weights:      the rank's model and optimizer
    kv_cache:     None without an FP8 cache
    """

    def __init__(
        self,
        cfg: Config,
        rank: int,
        weights: RankWeights,
        scheduler: Any,
        global_scales: GlobalScales,
        kv_cache: CacheScales | None,
    ) -> None:
        self.cfg, self.rank, self.weights, self.layout = cfg, rank, weights, weights.layout
        self.state = weights.layout, weights.model, weights.optimizer, scheduler
        self.global_scales, self.kv_cache = global_scales, kv_cache
        self.model = checkpoint_folder(cfg.policy.model_name, weights=bool(self.layout.adapters))
        self.tokenizer = checkpoint_folder(cfg.policy.tokenizer.name, "policy.tokenizer.name")
        self.base_digest = base_digest(self.model) if self.layout.adapters else ""

    def save(self, path: Path, optimizer: bool) -> None:
        """Write an HF checkpoint, or the adapters, and the optimizer's state; all ranks call it together.

        Earlier weights and optimizer state in the folder are removed first, because a killed save may have been that of
        more ranks. Raises UserError on a full disk, and if a rank's node does not share the folder.
        """
        errors: list[Exception | None] = []  # raised only at the end, because the other ranks wait for this one's part
        try:
            if self.rank == 0:
                path.mkdir(parents=True, exist_ok=True)
                for part in (path / "weights", path / "adapter", path / "optimizer", path / GLOBAL_SCALES):
                    if part.exists():
                        shutil.rmtree(part)
                if self.kv_cache is not None:
                    self.kv_cache.save(path)
        except OSError as error:
            errors.append(error)
        dist.barrier()
        if self.rank and not path.is_dir():
            errors.append(UserError(f"rank {self.rank} does not see it: {SHARED_FOLDER_HINT}"))
        try:
            if not self.layout.adapters:  # a base has the scales that its weights had at the start
                self.global_scales.save(path, self.rank)
        except OSError as error:
            errors.append(error)
        weights = self.weights.for_checkpoint()
        if self.layout.adapters:
            of_base = self.tokenizer, self.cfg.policy.model_name, self.base_digest
            errors.append(save_adapters(path / "adapter", weights, self.layout, self.rank, *of_base))
        else:
            sources = self.layout, self.rank, self.model, self.tokenizer
            errors.append(save_hf(path / "weights", weights, self.cfg.policy.precision, *sources))
        if optimizer:
            errors.append(save_optimizer(path / "optimizer", self.rank, *self.state))
        dist.barrier()  # after it no rank writes, so a caller may remove the files
        if any(errors):
            raise UserError(f"{path}: {next(filter(None, errors))}") from None

    def load(self, path: Path) -> None:
        """Restore what `save` wrote. Raises UserError where the folder is damaged, or of another kind of run."""
        check_kind(path, self.layout.adapters)
        if self.layout.adapters:
            load_adapters(path / "adapter", self.weights.model, self.layout, self.base_digest)
        else:
            load_hf(path / "weights", self.weights.model, self.layout)
            self.global_scales.load(path)
        if self.kv_cache is not None:
            self.kv_cache.load(path)
        load_optimizer(path / "optimizer", *self.state)
