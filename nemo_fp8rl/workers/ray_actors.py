"""Workers as Ray actors."""

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from nemo_fp8rl.common.errors import UserError, single_line
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.workers.ray_cluster import connect
from nemo_fp8rl.workers.ray_placement import (
    Location,
    add_env_vars,
    colocated_options,
    exclusive_options,
    gpu_sort_key,
)
from nemo_fp8rl.workers.worker_group import Role, WorkerDied, Workers, env_vars, shutdown_on_error

SHUTDOWN_SECONDS = 10.0
"""Seconds that engines have for `shutdown`, which removes vLLM's sockets; a killed engine would leave them."""

# advice for the user if a process does not start in time
ADVICE_AT_START = "see what `ray status` says; where nodes are only slow, raise cluster.engine_timeout_seconds"
ADVICE_AT_RESTART = "its node may be gone; bring it up, then continue with --resume"


class RayWorkers(Workers):
    """One Ray actor per worker. The places after the first `count` are empty at first.

    At first the workers are numbered node by node, so that workers that split a matrix share a node if it has room.
    """

    def __init__(
        self,
        worker_class: type,
        role: Role,
        count: int,
        cfg: Config,
        processes: int,
        shared_locations: Sequence[Location] | None = None,
        max_concurrency: int = 1,
        places: int = 0,
    ) -> None:
        connect(cfg.num_cpus)
        import ray

        places = max(places, count)
        self.role, self.count, self.most_lives = role, places, cfg.cluster.max_engine_restarts
        self.timeout = cfg.cluster.engine_timeout_seconds
        if shared_locations is None:
            options = [exclusive_options(worker_class, role, count, processes)] * places
        else:
            groups = [shared_locations[i * processes : (i + 1) * processes] for i in range(count)]
            options = [colocated_options(group) for group in groups]
        self.options = [add_env_vars(actor_options, env_vars(role, cfg)) for actor_options in options]
        self.actor_class = ray.remote(max_concurrency=max_concurrency)(worker_class)
        run = secrets.token_hex(4)
        self.names, self.lives = [f"{role}-{run}-{i}" for i in range(places)], [0] * places
        self.actors: list[Any] = [self._start_actor(i) for i in range(count)]  # None for one that was never started
        with shutdown_on_error(self):
            locations = [self._enter_folder(i, ADVICE_AT_START) for i in range(count)]
        order = sorted(range(count), key=locations.__getitem__)
        self.locations: list[Location] = [locations[i] for i in order]
        self.actors = [self.actors[i] for i in order] + [None] * (places - count)
        self.names[:count] = [self.names[i] for i in order]

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout: float | None = None) -> list[Any]:
        import ray

        batches = {id(value): value for values in arguments for value in values if isinstance(value, dict)}
        stored = {key: ray.put(batch) for key, batch in batches.items()}  # once, even if several workers share it
        references = [
            self._submit(i, method, *(stored.get(id(value), value) for value in values))
            for i, values in enumerate(arguments)
        ]
        try:
            return ray.get(references, timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise WorkerDied(f"no answer to {method} in {timeout:g} seconds") from None
        except ray.exceptions.RayError as error:
            raise _translate_error(error) from None

    def outcomes(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], timeout: float | None = None
    ) -> dict[int, Any]:
        import ray

        if not arguments:
            return {}
        references = {i: self._submit(i, method, *values) for i, values in arguments.items()}
        done, _ = ray.wait(list(references.values()), num_returns=len(references), timeout=timeout)
        return {
            i: _get_item(reference) if reference in done else self._kill_silent(i, method, timeout)
            for i, reference in references.items()
        }

    def stream(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], timeout: float | None = None
    ) -> Iterator[tuple[int, Any]]:
        import ray

        streams = {
            getattr(self.actors[i], method).options(num_returns="streaming").remote(*values): i
            for i, values in arguments.items()
        }
        while streams:
            ready, _ = ray.wait(list(streams), num_returns=1, timeout=timeout)
            for stream in ready:
                try:
                    item = _get_item(next(stream))
                except StopIteration:
                    del streams[stream]
                    continue
                index = streams.pop(stream) if isinstance(item, WorkerDied) else streams[stream]
                yield index, item
            if not ready:
                for index in streams.values():
                    yield index, self._kill_silent(index, method, timeout)
                return

    def end(self, index: int) -> None:
        import ray

        ray.kill(self.actors[index])

    def retire(self, index: int) -> None:
        import ray

        with suppress(Exception):  # of an actor that is gone
            ray.wait([self._submit(index, "shutdown")], timeout=SHUTDOWN_SECONDS)
        self.end(index)

    def restart(self, index: int) -> None:
        if self.actors[index] is not None:
            self.end(index)
        self.lives[index] += 1
        self.actors[index] = self._start_actor(index)
        self._enter_folder(index, ADVICE_AT_RESTART)

    def ask(self, index: int, method: str, within: float) -> Any:
        import ray

        reference = self._submit(index, method)
        done, _ = ray.wait([reference], timeout=within)
        item = _get_item(reference) if done else None
        return None if isinstance(item, WorkerDied) else item

    def renew(self, index: int) -> None:
        import ray

        for life in range(self.lives[index] + 1, self.most_lives + 1):
            with suppress(ValueError):  # the actor does not exist yet, or any more
                self.actors[index], self.lives[index] = ray.get_actor(self._name(index, life)), life

    def shutdown(self) -> None:
        import ray

        started = [i for i, actor in enumerate(self.actors) if actor is not None]
        try:
            if self.role == "generation":
                with suppress(Exception):  # of an actor that is gone
                    references = [self._submit(i, "shutdown") for i in started]
                    ray.wait(references, num_returns=len(references), timeout=SHUTDOWN_SECONDS)
        finally:
            for i in started:
                self.end(i)

    def _name(self, index: int, life: int) -> str:
        return f"{self.names[index]}-{life}"

    def _start_actor(self, index: int) -> Any:
        name = self._name(index, self.lives[index])
        return self.actor_class.options(**self.options[index], name=name).remote()

    def _submit(self, index: int, method: str, *arguments: Any) -> Any:
        return getattr(self.actors[index], method).remote(*arguments)

    def _enter_folder(self, index: int, advice: str) -> Location:
        """Make the driver's folder the actor's, so that relative paths of a recipe mean the same, and return its place.

        Raises: UserError, with the advice, if the actor's process does not start in time
        """
        import ray

        reference = self.actors[index].__ray_call__.remote(_change_folder, os.getcwd())
        if not ray.wait([reference], timeout=self.timeout)[0]:
            ray.kill(self.actors[index])
            raise UserError(f"Ray has started no process for {self.names[index]} for {self.timeout:g} s: {advice}")
        try:
            location: Location = ray.get(reference)
            return location
        except ray.exceptions.RayError as error:
            raise _translate_error(error) from None

    def _kill_silent(self, index: int, method: str, timeout: float | None) -> WorkerDied:
        import ray

        ray.kill(self.actors[index])
        return WorkerDied(f"no answer to {method} in {timeout:g} seconds")


def _get_item(reference: Any) -> Any:
    """Return the reference's value, or a WorkerDied if its worker died."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayError as error:
        cause = _translate_error(error)
        if isinstance(cause, WorkerDied):
            return cause
        raise cause from None


def _translate_error(error: Any) -> Exception:
    """Return the actor's own exception, a WorkerDied or a UserError where the driver distinguishes them, else Ray's."""
    from ray.exceptions import (
        ActorUnschedulableError,
        ObjectLostError,
        OutOfMemoryError,
        RayActorError,
        RayTaskError,
        WorkerCrashedError,
    )

    if isinstance(error, ActorUnschedulableError):
        return UserError(f"Ray has no place for an actor ({single_line(error)}); continue with --resume when it has")
    if isinstance(error, RayActorError | WorkerCrashedError):
        return WorkerDied("its process ended")
    if isinstance(error, ObjectLostError):
        return WorkerDied("its answer was lost with its node")
    if isinstance(error, OutOfMemoryError):  # of Ray's memory monitor
        return WorkerDied(f"Ray ended its process to free memory: {single_line(error)[:300]}")
    if isinstance(error, RayTaskError) and type(error.cause).__module__.startswith("nemo_fp8rl."):
        return error.cause
    return error


def _change_folder(worker: object, folder: str) -> Location:
    import ray

    try:
        os.chdir(folder)
    except OSError as error:
        raise UserError(
            f"a node of the Ray cluster cannot enter {folder} ({error}); start in a shared folder"
        ) from None
    return Location(ray.get_runtime_context().get_node_id(), sorted(map(str, ray.get_gpu_ids()), key=gpu_sort_key))
