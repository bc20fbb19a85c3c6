"""What workers are to their driver, wherever they run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

Role = Literal["train", "generation"]


class WorkerDied(RuntimeError):
    """A worker's process is gone, or did not answer in time; `Workers.restart` puts another in its place."""


class Workers(Protocol):
    """A fixed number of workers of one class."""

    count: int
    separate_processes: bool

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`method(*arguments[i])` on worker i, all at once; the results in order, or the first exception."""
        ...

    def outcomes(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], timeout: float | None = None
    ) -> dict[int, Any]:
        """As `call`, on these workers; of one that died, or that took longer than `timeout` seconds, a WorkerDied."""
        ...

    def stream(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], timeout: float | None = None
    ) -> Iterator[tuple[int, Any]]:
        """(i, item) for whatever the generators `method(*arguments[i])` of these workers yield, as it comes.

        The last item of a worker that died is a WorkerDied. When none has yielded anything for `timeout` seconds, all
        that still ought to have died.
        """
        ...

    def restart(self, index: int) -> None:
        """A new worker, not set up, in the place of one that died."""
        ...

    def start(self, index: int, method: str, *arguments: Any) -> Any:
        """A handle on the result of one worker's call, to be given to other workers as an argument."""
        ...

    def wait(self, handle: Any) -> None:
        """Return when the handle's result is there."""
        ...

    def shutdown(self) -> None: ...


@contextmanager
def ended_on_error(workers: Workers) -> Iterator[None]:
    """Workers whose setup fails do not outlive it."""
    try:
        yield
    except BaseException:
        workers.shutdown()
        raise
