"""What workers are to their driver, wherever they run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from nemo_fp8rl.config.schema import Config

Role = Literal["train", "generation"]


def env_vars(role: Role, cfg: Config) -> dict[str, str]:
    """What the recipe adds to the environment of the role's processes."""
    policy = cfg.policy
    return (policy.megatron_cfg if role == "train" else policy.generation.vllm_cfg).env_vars or {}


class WorkerDied(RuntimeError):
    """A worker's process is gone, or did not answer in time; `Workers.restart` puts another in its place."""


class Workers(Protocol):
    """A fixed number of workers of one class."""

    count: int

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout: float | None = None) -> list[Any]:
        """`method(*arguments[i])` on worker i, all at once; the results in order, or the first exception, at once.

        Raises WorkerDied where one died, or took longer than `timeout` seconds.
        """
        ...

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """`call`, with the same arguments for each."""
        return self.call(method, [arguments] * self.count)

    def outcomes(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], timeout: float | None = None
    ) -> dict[int, Any]:
        """`call` on some workers, by index; a WorkerDied for one that died or took longer than `timeout` seconds."""
        ...

    def stream(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], timeout: float | None = None
    ) -> Iterator[tuple[int, Any]]:
        """(i, item) for whatever the generators `method(*arguments[i])` of these workers yield, as it comes.

        The last item of a worker that died is a WorkerDied. When none has yielded anything for `timeout` seconds, all
        that still ought to have died.
        """
        ...

    def end(self, index: int) -> None:
        """End the process of a worker that counts as dead, which may still have memory; it may be gone."""
        ...

    def restart(self, index: int) -> None:
        """A new worker, not set up, in the place of one that died."""
        ...

    def ask(self, index: int, method: str, within: float) -> Any:
        """What a worker answers within so many seconds; None where it does not, or died. It goes on undisturbed."""
        ...

    def renew(self, index: int) -> None:
        """Take, in a copy of another process, the worker that the original has started in the place of this one, if
        there is one.
        """
        ...

    def shutdown(self) -> None: ...


@contextmanager
def shutdown_on_error(workers: Workers) -> Iterator[None]:
    """Workers whose setup fails do not outlive it."""
    try:
        yield
    except BaseException:
        workers.shutdown()
        raise
