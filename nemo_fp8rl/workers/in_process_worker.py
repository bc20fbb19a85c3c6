"""The single worker of a run in a single process."""

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.workers.library_environment import set_for_engine
from nemo_fp8rl.workers.worker_group import WorkerDied, Workers, env_vars


def prepare_process(cfg: Config) -> None:
    """Set the variables of a run in a single process, the recipe's `env_vars` first; call it before torch is imported.

    A later call warns of `env_vars` that libraries have read by then.
    """
    if cfg.cluster.backend != "in_process":
        return
    chosen = {**env_vars("train", cfg), **env_vars("generation", cfg)}
    changed = [name for name, value in chosen.items() if os.environ.get(name) != value]
    if changed and "torch" in sys.modules:
        logging.getLogger(__name__).warning(
            "policy.*.env_vars: %s changes after libraries were imported, which may have read it: set it before Python "
            "starts, or start the run by the nemo-fp8rl command",
            ", ".join(changed),
        )
    os.environ.update(chosen)
    import torch

    set_for_engine(torch.cuda.is_available())


class InProcessWorker(Workers):
    """The single worker of its class, in this process. Timeouts have no effect."""

    count = 1

    def __init__(self, worker_class: type, cfg: Config) -> None:
        prepare_process(cfg)
        self.worker_class, self.worker = worker_class, worker_class()

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout: float | None = None) -> list[Any]:
        return [self._call(method, *arguments[0])]

    def outcomes(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], timeout: float | None = None
    ) -> dict[int, Any]:
        try:
            return {0: self._call(method, *arguments[0])}
        except WorkerDied as death:
            return {0: death}

    def stream(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], timeout: float | None = None
    ) -> Iterator[tuple[int, Any]]:
        try:
            for item in self._call(method, *arguments[0]):
                yield 0, item
        except WorkerDied as death:
            yield 0, death

    def end(self, index: int) -> None:
        """Do nothing: the worker's process is this one."""

    def retire(self, index: int) -> None:
        self.worker.shutdown()

    def restart(self, index: int) -> None:
        self.worker.shutdown()
        self.worker = self.worker_class()

    def ask(self, index: int, method: str, within: float) -> Any:
        return self._call(method)

    def renew(self, index: int) -> None:
        """Do nothing: no other process has a copy of this object."""

    def shutdown(self) -> None:
        self.worker.shutdown()

    def _call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.worker, method)(*arguments)
