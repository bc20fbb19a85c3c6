"""The interface of workers for their driver, on every backend."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from nemo_fp8rl.config.schema import Config

Role = Literal["train", "generation"]


def env_vars(role: Role, cfg: Config) -> dict[str, str]:
    """Return the variables that the recipe adds to the environment of the role's processes."""
    policy = cfg.policy
    return (policy.megatron_cfg if role == "train" else policy.generation.vllm_cfg).env_vars or {}


class WorkerDied(RuntimeError):
    """A worker's process is gone, or did not answer in time. `Workers.restart` replaces it."""


class Workers(Protocol):
    """Workers of one class, at a fixed number of places, of which some may be empty. count: the number of places."""

    count: int

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout: float | None = None) -> list[Any]:
        """Call `method(*arguments[i])` on worker i, on all at once, and return the results in order.

        timeout: in seconds
        Raises:  the first exception of a worker, immediately; WorkerDied if a worker died or exceeded the timeout
        """
        ...

    def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Call the method with the same arguments on every worker; see `call`."""
        return self.call(method, [arguments] * self.count)

    def outcomes(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], timeout: float | None = None
    ) -> dict[int, Any]:
        """Call the method on some workers; see `call`.

        Returns the result of each by its index, or a WorkerDied if the worker died or exceeded `timeout` seconds.
        """
        ...

    def stream(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], timeout: float | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Yield (i, item) for every item of the generators `method(*arguments[i])`, as the items arrive.

        The last item of a worker that died is a WorkerDied. If no generator yields for `timeout` seconds, all workers
        whose generators have not ended count as dead.
        """
        ...

    def end(self, index: int) -> None:
        """End the process of a worker that counts as dead; it may still have memory, or be gone already."""
        ...

    def retire(self, index: int) -> None:
        """End a worker in order, by its `shutdown`; its place is then empty."""
        ...

    def restart(self, index: int) -> None:
        """Replace a worker that died, or fill an empty place, by a new worker, which is not set up."""
        ...

    def ask(self, index: int, method: str, within: float) -> Any:
        """Return the worker's answer, or None if it does not answer within so many seconds or died.

        The worker is not disturbed.
        """
        ...

    def renew(self, index: int) -> None:
        """Use the worker that the original of this object started in the place of a dead one, if it did so.

        Only a copy of this object in another process needs this.
        """
        ...

    def shutdown(self) -> None: ...


@contextmanager
def shutdown_on_error(workers: Workers) -> Iterator[None]:
    """Shut the workers down if the block, which sets them up, raises."""
    try:
        yield
    except BaseException:
        workers.shutdown()
        raise
