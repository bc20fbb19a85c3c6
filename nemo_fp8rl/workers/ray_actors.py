"""Workers as Ray actors."""

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from nemo_fp8rl.common.errors import UserError, one_line
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.workers.ray_cluster import connect
from nemo_fp8rl.workers.ray_placement import Location, colocated_options, exclusive_options, in_order, with_variables
from nemo_fp8rl.workers.worker_group import Role, WorkerDied, Workers, env_vars, shutdown_on_error

TO_LEAVE = 10.0
"""Seconds that engines have for `shutdown`, which removes vLLM's sockets: killed, they would leave them."""

# what to do about a process that is not there in time
AT_FIRST = "see what `ray status` says; where nodes are only slow, raise cluster.engine_timeout_seconds"
LATER = "its node may be gone; bring it up, then continue with --resume"


class RayWorkers(Workers):
    """One Ray actor a worker, numbered node by node at first, so that those that split a matrix share one where it has
    room.
    """

    def __init__(
        self,
        worker_class: type,
        role: Role,
        count: int,
        cfg: Config,
        processes: int,
        shared: Sequence[Location] | None = None,
        max_concurrency: int = 1,
    ) -> None:
        connect(cfg.num_cpus)
        import ray

        self.role, self.count, self.most_lives = role, count, cfg.cluster.max_engine_restarts
        self.timeout = cfg.cluster.engine_timeout_seconds
        if shared is None:
            options = [exclusive_options(worker_class, role, count, processes)] * count
        else:
            options = [colocated_options(shared[i * processes : (i + 1) * processes]) for i in range(count)]
        self.options = [with_variables(one, env_vars(role, cfg)) for one in options]
        self.actor_class = ray.remote(max_concurrency=max_concurrency)(worker_class)
        run = secrets.token_hex(4)
        self.names, self.lives = [f"{role}-{run}-{i}" for i in range(count)], [0] * count
        self.actors = [self._started(i) for i in range(count)]
        with shutdown_on_error(self):
            places = [self._enter(i, AT_FIRST) for i in range(count)]
        order = sorted(range(count), key=places.__getitem__)
        self.places: list[Location] = [places[i] for i in order]
        self.actors, self.names = [self.actors[i] for i in order], [self.names[i] for i in order]

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout: float | None = None) -> list[Any]:
        import ray

        batches = {id(one): one for args in arguments for one in args if isinstance(one, dict)}
        sent = {key: ray.put(batch) for key, batch in batches.items()}  # once, whoever shares it
        started = [
            self._start(i, method, *(sent.get(id(one), one) for one in args)) for i, args in enumerate(arguments)
        ]
        try:
            return ray.get(started, timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise WorkerDied(f"no answer to {method} in {timeout:g} seconds") from None
        except ray.exceptions.RayError as error:
            raise _cause(error) from None

    def outcomes(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], timeout: float | None = None
    ) -> dict[int, Any]:
        import ray

        started = {i: self._start(i, method, *args) for i, args in arguments.items()}
        done, _ = ray.wait(list(started.values()), num_returns=len(started), timeout=timeout)
        return {
            i: _item(reference) if reference in done else self._hung(i, method, timeout)
            for i, reference in started.items()
        }

    def stream(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], timeout: float | None = None
    ) -> Iterator[tuple[int, Any]]:
        import ray

        streams = {
            getattr(self.actors[i], method).options(num_returns="streaming").remote(*args): i
            for i, args in arguments.items()
        }
        while streams:
            ready, _ = ray.wait(list(streams), num_returns=1, timeout=timeout)
            for stream in ready:
                try:
                    item = _item(next(stream))
                except StopIteration:
                    del streams[stream]
                    continue
                index = streams.pop(stream) if isinstance(item, WorkerDied) else streams[stream]
                yield index, item
            if not ready:
                for index in streams.values():
                    yield index, self._hung(index, method, timeout)
                return

    def end(self, index: int) -> None:
        import ray

        ray.kill(self.actors[index])

    def restart(self, index: int) -> None:
        self.end(index)
        self.lives[index] += 1
        self.actors[index] = self._started(index)
        self._enter(index, LATER)

    def ask(self, index: int, method: str, within: float) -> Any:
        import ray

        started = self._start(index, method)
        done, _ = ray.wait([started], timeout=within)
        item = _item(started) if done else None
        return None if isinstance(item, WorkerDied) else item

    def renew(self, index: int) -> None:
        import ray

        for life in range(self.lives[index] + 1, self.most_lives + 1):
            with suppress(ValueError):  # not there, or not any more
                self.actors[index], self.lives[index] = ray.get_actor(self._name(index, life)), life

    def shutdown(self) -> None:
        import ray

        try:
            if self.role == "generation":
                with suppress(Exception):  # of one that is gone
                    left = [self._start(i, "shutdown") for i in range(self.count)]
                    ray.wait(left, num_returns=self.count, timeout=TO_LEAVE)
        finally:
            for actor in self.actors:
                ray.kill(actor)

    def _name(self, index: int, life: int) -> str:
        return f"{self.names[index]}-{life}"

    def _started(self, index: int) -> Any:
        name = self._name(index, self.lives[index])
        return self.actor_class.options(**self.options[index], name=name).remote()

    def _start(self, index: int, method: str, *arguments: Any) -> Any:
        return getattr(self.actors[index], method).remote(*arguments)

    def _enter(self, index: int, advice: str) -> Location:
        """Relative paths of a recipe mean in the actor what they mean to the driver. Raises UserError, with the advice,
        where its process is not there in time.
        """
        import ray

        entered = self.actors[index].__ray_call__.remote(_enter_folder, os.getcwd())
        if not ray.wait([entered], timeout=self.timeout)[0]:
            ray.kill(self.actors[index])
            raise UserError(f"Ray has started no process for {self.names[index]} for {self.timeout:g} s: {advice}")
        try:
            place: Location = ray.get(entered)
            return place
        except ray.exceptions.RayError as error:
            raise _cause(error) from None

    def _hung(self, index: int, method: str, timeout: float | None) -> WorkerDied:
        import ray

        ray.kill(self.actors[index])
        return WorkerDied(f"no answer to {method} in {timeout:g} seconds")


def _item(reference: Any) -> Any:
    """What the reference refers to; a WorkerDied when its worker did."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        cause = _cause(error)
        if isinstance(cause, WorkerDied):
            return cause
        raise cause from None


def _cause(error: Any) -> Exception:
    """What happened in the actor, as itself where the driver tells such errors apart."""
    from ray.exceptions import (
        ActorUnschedulableError,
        ObjectLostError,
        OutOfMemoryError,
        RayActorError,
        RayTaskError,
        WorkerCrashedError,
    )

    if isinstance(error, ActorUnschedulableError):
        return UserError(f"Ray has no place for an actor ({one_line(error)}); continue with --resume when it has")
    if isinstance(error, RayActorError | WorkerCrashedError):
        return WorkerDied("its process ended")
    if isinstance(error, ObjectLostError):
        return WorkerDied("what it answered was lost with its node")
    if isinstance(error, OutOfMemoryError):  # of Ray's memory monitor
        return WorkerDied(f"Ray ended its process to free memory: {one_line(error)[:300]}")
    if isinstance(error, RayTaskError) and type(error.cause).__module__.startswith("nemo_fp8rl."):
        return error.cause
    return error


def _enter_folder(worker: object, folder: str) -> Location:
    import ray

    try:
        os.chdir(folder)
    except OSError as error:
        raise UserError(
            f"a node of the Ray cluster cannot enter {folder} ({error}); start in a shared folder"
        ) from None
    return Location(ray.get_runtime_context().get_node_id(), sorted(map(str, ray.get_gpu_ids()), key=in_order))
