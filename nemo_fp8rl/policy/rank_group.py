"""The driver's side of the policy: Megatron ranks, in this process or as Ray actors."""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from threading import RLock
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from nemo_fp8rl.algorithms.loss import combined
from nemo_fp8rl.algorithms.quantization_error import weight_error
from nemo_fp8rl.batch import TrainBatch, balanced_order, num_rows, rows, shards
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.policy.interface import SHARED, Diverged, Loss, PolicyDescription
from nemo_fp8rl.policy.weights.layout import check_layout
from nemo_fp8rl.policy.worker import MegatronWorker, Place
from nemo_fp8rl.refit.bridge import Transport
from nemo_fp8rl.refit.manifest import Sources, from_json, to_json
from nemo_fp8rl.refit.reports import SendReport
from nemo_fp8rl.refit.route_plan import Capacities, Routes
from nemo_fp8rl.workers import WorkerDied, ended_on_error, start_workers

P = ParamSpec("P")
T = TypeVar("T")
PER_RANK = ("grad_norm", "lr")
"""Metrics that every rank reports alike; all others are `combined` over the ranks that answer."""

KV_CALIBRATION_SAMPLES = 64
"""Sequences of the step's batch, on each replica, from which the scales of an FP8 KV cache are taken."""


def _in_turn(method: Callable[P, T]) -> Callable[P, T]:
    """A method of the policy that uses the weights, and so waits where another thread holds them (`hold_weights`)."""

    @wraps(method)
    def in_turn(*args: P.args, **kwargs: P.kwargs) -> T:
        policy: Any = args[0]
        with policy.hold_weights():
            return method(*args, **kwargs)

    return in_turn


class MegatronPolicy:
    """`policy.base.Policy` over cluster.train_ranks ranks. Its threads use the weights one at a time."""

    def __init__(self, cfg: Config) -> None:
        hf = read_hf_config(cfg.policy.model_name)
        check_layout(hf, cfg)
        self.ranks = start_workers(MegatronWorker, "train", cfg.cluster.train_ranks, cfg)
        self.steps_taken, self.timeout, self.turn = 0, cfg.cluster.engine_timeout_seconds, RLock()
        self.offloads = cfg.policy.megatron_cfg.offload_between_phases
        # else a row costs what the longest does, wherever it is
        self.deals = cfg.policy.sequence_packing.enabled or cfg.policy.dynamic_batching.enabled
        self.replicas, count = cfg.data_parallel_size, self.ranks.count
        with ended_on_error(self.ranks):
            rendezvous = self.ranks.call_all("rendezvous")[0] if count > 1 else None
            self.places: list[Place] = self.ranks.call(
                "setup", [(cfg, rank, count, rendezvous) for rank in range(count)]
            )

    @_in_turn
    def logprobs(self, batch: TrainBatch) -> Tensor:
        return self._by_row("logprobs", batch)

    @_in_turn
    def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        return self._by_row("reference_logprobs", batch)

    @_in_turn
    def train_step(self, batch: TrainBatch, loss: Loss, schedules: bool = True) -> dict[str, float]:
        mask = batch["token_mask"][:, 1:] * batch["sample_mask"].unsqueeze(-1)
        counts = float(batch["sample_mask"].sum()), float(mask.sum())  # sequences as NeMo RL's, with a token or not
        if not counts[1]:
            raise ValueError("the batch holds no token to train on: every sample is masked out")
        self.steps_taken += 1
        try:
            results = self._on_shards("train_step", batch, self._order(batch), loss, *counts, schedules)
        except Diverged:
            self.steps_taken -= 1
            raise
        return combined(results) | {name: results[0][name] for name in PER_RANK}

    def describe(self) -> PolicyDescription:
        return PolicyDescription.union(self.ranks.call_all("describe"))

    def on_gpu(self) -> bool:
        """Whether the weights of all its ranks are on GPUs."""
        return all(self.ranks.call_all("on_gpu"))

    def step_schedule(self) -> None:
        self.ranks.call_all("step_schedule")

    @_in_turn
    def prepare_for_training(self) -> None:
        self.ranks.call_all("prepare_for_training")

    @_in_turn
    def offload_before_refit(self) -> None:
        self.ranks.call_all("offload_before_refit")

    @_in_turn
    def offload_after_refit(self) -> int:
        return max(self.ranks.call_all("offload_after_refit"))

    @_in_turn
    def calibrate_kv(self, batch: TrainBatch) -> None:
        long_enough = (batch["input_lengths"] > 1).nonzero().flatten()  # the last token of a sequence is not read
        if not len(long_enough):
            raise UserError("the FP8 KV cache cannot be calibrated: every prompt has one token; use longer prompts")
        share = min(len(long_enough) // self.replicas, KV_CALIBRATION_SAMPLES)  # as many on each: they may go in step
        few = rows(batch, long_enough[: max(1, share * self.replicas)])
        parts = shards(few, self.replicas) if share else [few] * self.replicas
        self.ranks.call("calibrate_kv", [(parts[place.shard],) for place in self.places])

    @_in_turn
    def weight_error(self) -> dict[str, float]:
        return weight_error(self.ranks.call_all("weight_squares"))

    def open_refit(self, transport: Transport, token: str) -> None:
        """Get ready for links, before all else of `refit.bridge.WeightSource`. token: engines must know it to link."""
        everyone = dict.fromkeys(range(self.ranks.count), (transport, token))
        holdings, domains = zip(*self._answers("open_refit", everyone), strict=True)
        parsed = {parts: from_json(parts) for parts in set(holdings)}  # copies say the same
        self._sources, self.senders = Sources([parsed[parts] for parts in holdings], domains), set[int]()

    def sources(self) -> Sources:
        return self._sources

    def hold_weights(self) -> AbstractContextManager[Any]:
        return self.turn

    def updates(self) -> int:
        return self.steps_taken

    def base_version(self) -> int:
        """The version of all ranks that send, or -1 where they differ."""
        versions = set(self._on_senders("base_version"))
        return versions.pop() if len(versions) == 1 else -1

    @_in_turn
    def make_room(self) -> None:
        if self.offloads:
            self._answers("offload_after_refit", dict.fromkeys(range(self.ranks.count), ()))

    def offer(self, engine: int, routes: Routes, capacities: Capacities) -> list[list[Any]]:
        arguments = {
            rank: (engine, [to_json(route) for route in to_ranks], capacities[rank])
            for rank, to_ranks in enumerate(routes)
            if any(to_ranks)
        }
        self.senders |= arguments.keys()
        answers = dict(zip(arguments, self._answers("offer", arguments), strict=True))
        return [answers.get(rank, [None] * len(to_ranks)) for rank, to_ranks in enumerate(routes)]

    def withdraw(self, engine: int) -> None:
        self._on_senders("withdraw", engine)

    def start_push(self, version: int, engines: Collection[int], whole: frozenset[str], **how: bool) -> None:
        self._on_senders("start_push", version, tuple(engines), whole, how)

    def finish_push(self) -> list[SendReport]:
        return self._on_senders("finish_push")

    @_in_turn
    def save(self, folder: Path, optimizer: bool = True) -> None:
        self.ranks.call_all("save", str(folder.resolve()), optimizer)
        if not (folder / "weights").is_dir():
            raise UserError(f"{folder}: what the ranks wrote is not here: {SHARED}")

    @_in_turn
    def load(self, folder: Path) -> None:
        self.steps_taken += 1
        self.ranks.call_all("load", str(folder.resolve()))

    def shutdown(self) -> None:
        self.ranks.shutdown()

    def _on_senders(self, method: str, *arguments: Any) -> list[Any]:
        return self._answers(method, dict.fromkeys(sorted(self.senders), arguments))

    def _answers(self, method: str, arguments: dict[int, tuple[Any, ...]]) -> list[Any]:
        """What these ranks answer, in order; the first exception is raised, a WorkerDied of one that hangs."""
        answers = self.ranks.outcomes(method, arguments, self.timeout)
        if death := next((answer for answer in answers.values() if isinstance(answer, WorkerDied)), None):
            raise death
        return [answers[rank] for rank in arguments]

    def _order(self, batch: TrainBatch) -> Tensor:
        """The order of the rows for `shards`, int64 [B]: replicas then have about as much to do."""
        return balanced_order(batch["input_lengths"], self.replicas) if self.deals else torch.arange(num_rows(batch))

    def _by_row(self, method: str, batch: TrainBatch) -> Tensor:
        """What the method answers for each row, in the batch's order."""
        order = self._order(batch)
        return torch.cat(self._on_shards(method, batch, order))[order.argsort()]

    def _on_shards(self, method: str, batch: TrainBatch, order: Tensor, *arguments: Any) -> list[Any]:
        """Call it on every rank with its part of the batch: one answer for each part, in order."""
        parts = shards(batch, self.replicas, order)
        results = self.ranks.call(method, [(parts[place.shard], *arguments) for place in self.places])
        answers = {place.shard: r for place, r in zip(self.places, results, strict=True) if place.answers}
        return [answers[shard] for shard in range(self.replicas)]


@contextmanager
def deaths_as_user_errors() -> Iterator[None]:
    """A rank that dies in the block is a UserError."""
    try:
        yield
    except WorkerDied as death:
        raise UserError(
            f"a training rank died ({death}); what it wrote says why (of a Ray actor: in its worker's log); mend that, "
            "then go on from the last checkpoint with --resume, or start again where there is none"
        ) from death
