"""Trainer ranks for tests: processes that meet on loopback, with one `MegatronWorker` each."""

import gc
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.batch import RolloutBatch, split_shards
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from tests.batches import loss_totals

worker = MegatronWorker()
"""The rank of this process."""


class Ranks:
    """Processes of trainer ranks; functions that `run` calls find their rank in `ranks.worker`.

    initializers:  one function per rank, which its process calls first
    prepare:       a function that each process calls with (rank, where the ranks meet), also after a restart
    """

    def __init__(
        self,
        count: int,
        initializers: Sequence[Callable[[], Any]] | None = None,
        prepare: Callable[[int, tuple[str, int]], None] | None = None,
    ) -> None:
        self.count, self.initializers, self.prepare = count, initializers or [None] * count, prepare
        self._start()

    def _start(self) -> None:
        self.processes = [
            ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=initializer)
            for initializer in self.initializers
        ]
        self.rendezvous = self.processes[0].submit(_listen).result()
        if self.prepare:
            ready = [process.submit(self.prepare, rank, self.rendezvous) for rank, process in enumerate(self.processes)]
            for future in ready:
                future.result()

    def run(self, function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> list[Any]:
        futures = [p.submit(function, *args) for p, args in zip(self.processes, arguments, strict=True)]
        finished, others = wait(futures, return_when=FIRST_EXCEPTION)
        if others:  # they may wait for the rank that raised, and would block the next test
            self.close()
            self._start()
        for future in finished:
            future.result()
        return [future.result() for future in futures]

    def setup(self, cfg: Config) -> list[Any]:
        """Build the policy anew on all ranks; return their RankInfo."""
        return self.run(_setup, [(cfg, rank, self.count, self.rendezvous) for rank in range(self.count)])

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call the method on every rank."""
        return self.run(_call, [(method, *arguments)] * self.count)

    def on(self, ranks: list[int], method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Call the method on these ranks, each with its own arguments."""
        futures = [
            self.processes[rank].submit(_call, method, *values) for rank, values in zip(ranks, arguments, strict=True)
        ]
        return [future.result() for future in futures]

    def rest(self) -> None:
        """Drop the policy and its process groups, whose threads wake a hundred times a second."""
        self.run(_rest, [()] * self.count)

    def close(self) -> None:
        for process in self.processes:
            for worker in list(process._processes.values()):
                worker.kill()  # an orderly shutdown takes seconds, or waits for another rank
            process.shutdown()


def logprobs_and_norm(pool: Ranks, cfg: Config, batch: RolloutBatch) -> tuple[Tensor, float]:
    """Return the log-probs of the batch, [B, T], and the gradient norm of a step on its NLL, from a pool's policy."""
    infos = pool.setup(cfg)
    parts = split_shards(batch, cfg.data_parallel_size)
    tokens = float(batch.token_mask[:, 1:].sum())
    results = pool.run(_logprobs_and_norm, [(parts[info.shard], float(batch.num_rows), tokens) for info in infos])
    answers = {info.shard: logprobs for info, (logprobs, _) in zip(infos, results, strict=True) if info.is_reporter}
    return torch.cat([answers[shard] for shard in sorted(answers)]), results[0][1]


def _logprobs_and_norm(part: RolloutBatch, sequences: float, tokens: float) -> tuple[Tensor, float]:
    return worker.logprobs(part), worker.train_step(part, NllLoss(), loss_totals(sequences, tokens))["grad_norm"]


def _listen() -> tuple[str, int]:
    gc.freeze()  # collections then skip the imported objects
    worker.listener = socket.create_server(("127.0.0.1", 0))
    return worker.listener.getsockname()[:2]


def _setup(cfg: Config, rank: int, count: int, rendezvous: tuple[str, int]) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    worker.shutdown()
    return worker.setup(cfg, rank, count, rendezvous)


def _rest() -> None:
    worker.shutdown()
    for name in vars(worker).keys() - {"listener"}:
        delattr(worker, name)
    gc.collect()


def _call(method: str, *arguments: Any) -> Any:
    return getattr(worker, method)(*arguments)
