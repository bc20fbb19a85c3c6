"""The single worker of a run in a single process."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.workers.worker_group import Role, WorkerDied, Workers, env_vars


class InProcessWorker(Workers):
    """The single worker of its class, in this process. Timeouts have no effect."""

    count = 1

    def __init__(self, worker_class: type, role: Role, cfg: Config) -> None:
        os.environ.update(env_vars(role, cfg))  # too late for variables that libraries read when they are imported
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
