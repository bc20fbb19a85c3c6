"""The driver of the training ranks: `MegatronPolicy` calls one `MegatronWorker` per rank.

The ranks run in this process or as Ray actors; `rank/worker.py` has the Megatron code of one rank.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from threading import RLock
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from nemo_fp8rl.algorithms.loss import combine_metrics
from nemo_fp8rl.algorithms.quantization_error import weight_error
from nemo_fp8rl.batch import LossTotals, RolloutBatch, SequenceBatch, balanced_order, split_shards
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.policy.interface import SHARED_FOLDER_HINT, DivergenceError, Loss, PolicyDescription
from nemo_fp8rl.policy.rank.worker import MegatronWorker, RankInfo
from nemo_fp8rl.policy.weights.layout import check_layout
from nemo_fp8rl.policy.weights.norm_noise import NormNoise
from nemo_fp8rl.refit.interface import Addresses, Transport
from nemo_fp8rl.refit.manifest import Sources
from nemo_fp8rl.refit.reports import SendReport
from nemo_fp8rl.refit.route_plan import Links
from nemo_fp8rl.workers import WorkerDied, shutdown_on_error, start_workers

P = ParamSpec("P")
T = TypeVar("T")
REPLICATED_METRICS = ("grad_norm", "lr", "grad_bytes", "loss_scale", "overflow_ratio")
"""Metrics that are equal on all ranks; all others are `combine_metrics` over the ranks that report."""

KV_CALIBRATION_SAMPLES = 64
"""Sequences per replica, from the batch of the step, that calibrate the scales of an FP8 KV cache."""


def _lock_weights(method: Callable[P, T]) -> Callable[P, T]:
    """Make a method of the policy wait while another thread holds the weights (`hold_weights`)."""

    @wraps(method)
    def call_with_lock(*args: P.args, **kwargs: P.kwargs) -> T:
        policy: Any = args[0]
        with policy.hold_weights():
            return method(*args, **kwargs)

    return call_with_lock


class MegatronPolicy:
    """A `policy.interface.Policy` over cluster.train_ranks ranks; only one thread at a time uses the weights."""

    def __init__(self, cfg: Config) -> None:
        hf = read_hf_config(cfg.policy.model_name)
        check_layout(hf, cfg)
        self.ranks = start_workers(MegatronWorker, "train", cfg.cluster.train_ranks, cfg)
        self.steps_taken, self.timeout, self.weights_lock = 0, cfg.cluster.engine_timeout_seconds, RLock()
        self.has_offload = cfg.policy.megatron_cfg.offload_between_phases
        self.has_noise = NormNoise.of(cfg).is_in_trainer
        # without these two every row costs as much as the longest one, on whatever rank it is
        self.has_balanced_shards = cfg.policy.sequence_packing.enabled or cfg.policy.dynamic_batching.enabled
        self.replicas, count = cfg.data_parallel_size, self.ranks.count
        with shutdown_on_error(self.ranks):
            rendezvous = self.ranks.call_all("rendezvous")[0] if count > 1 else None
            self.rank_infos: list[RankInfo] = self.ranks.call(
                "setup", [(cfg, rank, count, rendezvous) for rank in range(count)]
            )

    @_lock_weights
    def logprobs(self, batch: SequenceBatch) -> Tensor:
        return self._call_by_row("logprobs", batch)[0]

    @_lock_weights
    def logprobs_and_sharpness(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        logprobs, sharpness = self._call_by_row("logprobs_and_sharpness", batch)
        return logprobs, sharpness

    @_lock_weights
    def reference_logprobs(self, batch: SequenceBatch) -> Tensor:
        return self._call_by_row("reference_logprobs", batch)[0]

    @_lock_weights
    def train_step(self, batch: RolloutBatch, loss: Loss, schedules: bool = True) -> dict[str, float]:
        totals = LossTotals.of_batch(batch)
        if not totals.valid_toks:
            raise ValueError("the batch has no token to train on: every sample is masked out")
        self.steps_taken += 1
        try:
            results = self._call_on_shards("train_step", batch, self._row_order(batch), loss, totals, schedules)
        except DivergenceError:
            self.steps_taken -= 1
            raise
        return combine_metrics(results) | {name: results[0][name] for name in REPLICATED_METRICS if name in results[0]}

    def describe(self) -> PolicyDescription:
        return PolicyDescription.union(self.ranks.call_all("describe"))

    def on_gpu(self) -> bool:
        """True if the weights of all ranks are on GPUs."""
        return all(self.ranks.call_all("on_gpu"))

    def step_schedule(self) -> None:
        self.ranks.call_all("step_schedule")

    @_lock_weights
    def prepare_for_training(self) -> None:
        self.ranks.call_all("prepare_for_training")

    @_lock_weights
    def offload_before_refit(self) -> None:
        self.ranks.call_all("offload_before_refit")

    @_lock_weights
    def offload_after_refit(self) -> int:
        return max(self.ranks.call_all("offload_after_refit"))

    @_lock_weights
    def calibrate_kv(self, batch: SequenceBatch) -> None:
        # the model does not read the last token of a sequence, so a sequence of one token calibrates nothing
        long_enough = (batch.input_lengths > 1).nonzero().flatten()
        if not len(long_enough):
            raise UserError("the FP8 KV cache cannot be calibrated: every prompt has one token; use longer prompts")
        share = min(len(long_enough) // self.replicas, KV_CALIBRATION_SAMPLES)
        samples = batch.take_trimmed_rows(long_enough[: max(1, share * self.replicas)])
        # equal numbers, because replicas that share experts run their microbatches together
        parts = split_shards(samples, self.replicas) if share else [samples] * self.replicas
        self.ranks.call("calibrate_kv", [(parts[info.shard],) for info in self.rank_infos])

    @_lock_weights
    def weight_error(self) -> dict[str, float]:
        return weight_error(self.ranks.call_all("weight_squares"))

    def open_refit(self, transport: Transport, token: str) -> None:
        """Prepare the ranks for links. Call it before any other method of `refit.interface.WeightSource`.

        token:  the secret that an engine must know to link
        """
        arguments = dict.fromkeys(range(self.ranks.count), (transport, token))
        holdings, domains = zip(*self._call_ranks("open_refit", arguments), strict=True)
        shared = {parts: parts for parts in holdings}  # replicas have equal parts
        self._sources, self.senders = Sources([shared[parts] for parts in holdings], domains), set[int]()

    def sources(self) -> Sources:
        return self._sources

    def hold_weights(self) -> AbstractContextManager[Any]:
        return self.weights_lock

    def updates(self) -> int:
        return self.steps_taken

    def base_version(self) -> int:
        """Return the version that all sending ranks have, or -1 where they differ."""
        versions = set(self._call_senders("base_version"))
        return versions.pop() if len(versions) == 1 else -1

    def make_room(self) -> None:
        if self.has_offload:  # else an engine is started while a step is taken
            with self.hold_weights():
                self._call_ranks("offload_after_refit", dict.fromkeys(range(self.ranks.count), ()))

    def offer(self, engine: int, links: Links) -> Addresses:
        arguments = {
            rank: (engine, routes, links.capacities[rank]) for rank, routes in enumerate(links.routes) if any(routes)
        }
        self.senders |= arguments.keys()
        answers = dict(zip(arguments, self._call_ranks("offer", arguments), strict=True))
        return [answers.get(rank, [None] * len(routes)) for rank, routes in enumerate(links.routes)]

    def withdraw(self, engine: int) -> None:
        self._call_senders("withdraw", engine)

    def start_push(self, version: int, engines: Collection[int], full_only: frozenset[str], **how: bool) -> None:
        if self.has_noise:
            self._call_ranks("take_noise", dict.fromkeys(range(self.ranks.count), (version,)))
        self._call_senders("start_push", version, tuple(engines), full_only, how)

    def finish_push(self) -> list[SendReport]:
        return self._call_senders("finish_push")

    @_lock_weights
    def save(self, folder: Path, optimizer: bool = True) -> None:
        self.ranks.call_all("save", str(folder.resolve()), optimizer)
        if not (folder / "weights").is_dir() and not (folder / "adapter").is_dir():
            raise UserError(f"{folder} does not have what the ranks wrote: {SHARED_FOLDER_HINT}")

    @_lock_weights
    def load(self, folder: Path) -> None:
        self.steps_taken += 1
        self.ranks.call_all("load", str(folder.resolve()))

    def shutdown(self) -> None:
        self.ranks.shutdown()

    def _call_senders(self, method: str, *arguments: Any) -> list[Any]:
        return self._call_ranks(method, dict.fromkeys(sorted(self.senders), arguments))

    def _call_ranks(self, method: str, arguments: dict[int, tuple[Any, ...]]) -> list[Any]:
        """Call the ranks with their arguments and return their answers in the same order.

        Raises the first exception of a rank; WorkerDied for a rank that hangs.
        """
        answers = self.ranks.outcomes(method, arguments, self.timeout)
        if death := next((answer for answer in answers.values() if isinstance(answer, WorkerDied)), None):
            raise death
        return [answers[rank] for rank in arguments]

    def _row_order(self, batch: SequenceBatch) -> Tensor:
        """Return the order of the rows for `split_shards`, int64 [B], which gives replicas about equal work."""
        return (
            balanced_order(batch.input_lengths, self.replicas)
            if self.has_balanced_shards
            else torch.arange(batch.num_rows)
        )

    def _call_by_row(self, method: str, batch: SequenceBatch) -> list[Tensor]:
        """Call the method on every shard and return its values of each row, in the batch's order.

        method:  returns one tensor or a tuple of them, [rows, ...] each
        """
        order = self._row_order(batch)
        answers = self._call_on_shards(method, batch, order)
        shards = [answer if isinstance(answer, tuple) else (answer,) for answer in answers]
        return [torch.cat(parts)[order.argsort()] for parts in zip(*shards, strict=True)]

    def _call_on_shards(self, method: str, batch: SequenceBatch, order: Tensor, *arguments: Any) -> list[Any]:
        """Call the method on every rank with its shard; return one answer per shard, that of its reporter."""
        parts = split_shards(batch, self.replicas, order)
        results = self.ranks.call(method, [(parts[info.shard], *arguments) for info in self.rank_infos])
        answers = {info.shard: r for info, r in zip(self.rank_infos, results, strict=True) if info.is_reporter}
        return [answers[shard] for shard in range(self.replicas)]


@contextmanager
def deaths_as_user_errors() -> Iterator[None]:
    """Turn the death of a rank inside the block into a UserError."""
    try:
        yield
    except WorkerDied as death:
        raise UserError(
            f"a training rank died ({death}); its output says why (that of a Ray actor is in its worker's log); "
            "mend the cause, then continue from the last checkpoint with --resume, or start again if there is none"
        ) from death
