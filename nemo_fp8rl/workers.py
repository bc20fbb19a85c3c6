"""Where a rank or an engine runs: in this process, or as a Ray actor. The class that runs is the same.

A worker class is built without arguments and then told to `setup`, so that a failure comes back as an ordinary
exception of a call and not as the death of an actor.
"""

import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from nemo_fp8rl.config import ClusterConfig
from nemo_fp8rl.errors import UserError


class Workers(Protocol):
    """A fixed number of workers of one class."""

    count: int
    separate_processes: bool

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`method(*arguments[i])` on worker i, all at once; the results in order, or the first exception."""
        ...

    def start(self, index: int, method: str, *arguments: Any) -> Any:
        """A handle on the result of one worker's call, to be given to other workers as an argument."""
        ...

    def wait(self, handle: Any) -> None:
        """Return when the handle's result is there."""
        ...

    def shutdown(self) -> None: ...


def start_workers(worker_class: type, count: int, cluster: ClusterConfig) -> Workers:
    """`count` workers of the class on the cluster's backend."""
    if cluster.backend == "in_process":
        assert count == 1  # config_check
        return InProcessWorker(worker_class)
    return RayWorkers(worker_class, count, cluster)


@contextmanager
def ended_on_error(workers: Workers) -> Iterator[None]:
    """Workers whose setup fails do not outlive it."""
    try:
        yield
    except BaseException:
        workers.shutdown()
        raise


class InProcessWorker:
    """The one worker of its class, here. A handle is the result itself."""

    count = 1
    separate_processes = False

    def __init__(self, worker_class: type) -> None:
        self.worker = worker_class()

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [self.start(0, method, *arguments[0])]

    def start(self, index: int, method: str, *arguments: Any) -> Any:
        return getattr(self.worker, method)(*arguments)

    def wait(self, handle: Any) -> None:
        pass

    def shutdown(self) -> None:
        self.worker.shutdown()


class RayWorkers:
    """One Ray actor a worker. A handle is an object reference: what it refers to never visits the driver."""

    separate_processes = True

    def __init__(self, worker_class: type, count: int, cluster: ClusterConfig) -> None:
        _connect(cluster)
        import ray

        self.count = count
        free = ray.available_resources().get("CPU", 0)
        if free < count:
            raise UserError(
                f"cluster.backend=ray: {count} {worker_class.__name__} actors need a CPU each, Ray has {free:g} free; "
                "lower cluster.train_ranks or cluster.generation_engines, or start Ray with more"
            )
        self.actors = [ray.remote(num_cpus=1)(worker_class).remote() for _ in range(count)]
        with ended_on_error(self):
            _results([actor.__ray_call__.remote(_enter, os.getcwd()) for actor in self.actors])

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return _results([self.start(i, method, *args) for i, args in enumerate(arguments)])

    def start(self, index: int, method: str, *arguments: Any) -> Any:
        return getattr(self.actors[index], method).remote(*arguments)

    def wait(self, handle: Any) -> None:
        import ray

        ray.wait([handle])

    def shutdown(self) -> None:
        import ray

        for actor in self.actors:
            ray.kill(actor)


def _results(references: list[Any]) -> list[Any]:
    """What the references refer to; a UserError raised in an actor is raised here as itself."""
    import ray
    from ray.exceptions import RayTaskError

    try:
        return ray.get(references)
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        raise


def _enter(worker: object, folder: str) -> None:
    """In the actor: relative paths of a recipe mean what they mean to the driver."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise UserError(
            f"a node of the Ray cluster cannot enter {folder} ({error}); start in a shared folder"
        ) from None


def _connect(cluster: ClusterConfig) -> None:
    """Join the Ray cluster of RAY_ADDRESS, or start one here: on loopback, with a token of its own."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_ADDRESS" in os.environ:
        import ray

        ray.init(log_to_driver=False, ignore_reinit_error=True)
        return
    if "ray" not in sys.modules:  # Ray reads these when it is imported, and vLLM imports it too
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    elif os.environ.get("RAY_AUTH_MODE") != "token":
        raise UserError(
            "cluster.backend=ray: Ray was imported before it could be given a token; start the run by the nemo-fp8rl "
            "command, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before Python starts"
        )
    import ray

    if ray.is_initialized():
        return
    ray.init(
        num_cpus=cluster.train_ranks + cluster.generation_engines,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
    )
