"""A trainer in a process of its own, which a test can kill."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from typing import Any

import torch

from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.policy.rank_group import MegatronPolicy
from nemo_fp8rl.workers import WorkerDied

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.generation.far_trainer"])  # Megatron is imported once


class FarTrainer:
    """A MegatronPolicy there: a `refit.interface.WeightSource`. Raises WorkerDied once its process is gone."""

    def __init__(self, cfg: Config) -> None:
        self._calls, theirs = _processes.Pipe()
        self.process = _processes.Process(target=_serve, args=(theirs, cfg), daemon=True)
        self.process.start()
        theirs.close()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **how: self._call(name, args, how)

    def hold_weights(self) -> AbstractContextManager[None]:
        return nullcontext()

    def do(self, function: Callable[[MegatronPolicy], Any]) -> Any:
        """function(policy), there."""
        return self._call(function, (), {})

    def close(self) -> None:
        self.process.kill()
        self.process.join()

    def _call(self, what: Any, args: tuple[Any, ...], how: dict[str, Any]) -> Any:
        try:
            self._calls.send((what, args, how))
            outcome = self._calls.recv()
        except (EOFError, OSError):
            raise WorkerDied("the trainer's process ended") from None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def move_weights(policy: MegatronPolicy) -> None:
    with torch.no_grad():
        for parameter in policy.ranks.worker.model.parameters():
            parameter.mul_(1.5)


def die_in_the_next_refit(policy: MegatronPolicy) -> None:
    """By SIGKILL, with some of the version's buckets sent."""
    refit = policy.ranks.worker.refit
    for key, link in refit.link_ends.items():
        refit.link_ends[key] = Future()
        refit.link_ends[key].set_result(_Dying(link.result()))


class _Dying:
    def __init__(self, end: Any) -> None:
        self.end, self.sent = end, 0
        self.has_free_buffer, self.acquire_buffer, self.close = end.has_free_buffer, end.acquire_buffer, end.close
        self.wait_for_places = end.wait_for_places

    def send(self, header: bytes, nbytes: int) -> None:
        if self.sent == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        self.end.send(header, nbytes)
        self.sent += 1


def _serve(calls: Connection, cfg: Config) -> None:
    policy = MegatronPolicy(cfg)
    while True:
        try:
            what, args, how = calls.recv()
        except EOFError:
            return
        try:
            outcome = getattr(policy, what)(*args, **how) if isinstance(what, str) else what(policy)
        except Exception as error:
            outcome = error
        calls.send(outcome)
