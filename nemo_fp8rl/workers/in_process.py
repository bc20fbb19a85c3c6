"""The one worker of a run in a single process."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_fp8rl.workers.base import WorkerDied


class InProcessWorker:
    """The one worker of its class, here. A handle is the result itself. Nobody watches the time."""

    count = 1
    separate_processes = False

    def __init__(self, worker_class: type) -> None:
        self.worker_class, self.worker = worker_class, worker_class()

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [self.start(0, method, *arguments[0])]

    def outcomes(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], timeout: float | None = None
    ) -> dict[int, Any]:
        try:
            return {0: self.start(0, method, *arguments[0])}
        except WorkerDied as death:
            return {0: death}

    def stream(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], timeout: float | None = None
    ) -> Iterator[tuple[int, Any]]:
        try:
            for item in self.start(0, method, *arguments[0]):
                yield 0, item
        except WorkerDied as death:
            yield 0, death

    def restart(self, index: int) -> None:
        self.worker.shutdown()
        self.worker = self.worker_class()

    def start(self, index: int, method: str, *arguments: Any) -> Any:
        return getattr(self.worker, method)(*arguments)

    def wait(self, handle: Any) -> None:
        pass

    def shutdown(self) -> None:
        self.worker.shutdown()
