"""Where a rank or an engine runs: in this process, or as a Ray actor. The class that runs is the same.

A worker class is built without arguments and then told to `setup`, so that a failure comes back as an ordinary
exception of a call and not as the death of an actor.
"""

import atexit
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol

from nemo_fp8rl.config import Config
from nemo_fp8rl.errors import UserError

Role = Literal["train", "generation"]
ROLE = "nemo-fp8rl/role"
"""Ray's label of nodes that are for workers of one role; where no node is for a role, its workers may be anywhere."""


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


def start_workers(
    worker_class: type, role: Role, count: int, cfg: Config, processes: int = 1, beside: Workers | None = None
) -> Workers:
    """`count` workers of the class on the cluster's backend, of so many processes each.

    beside: they have the nodes and GPUs of these, the first those of as many as it has processes, and so on.
    """
    if cfg.cluster.backend == "in_process":
        assert count == 1  # config_check
        return InProcessWorker(worker_class)
    places = beside.places if isinstance(beside, RayWorkers) else None
    return RayWorkers(worker_class, role, count, cfg, processes, places)


def on_one_host(cfg: Config) -> bool:
    """Whether all workers, wherever they may be placed, share a machine; with Ray, once workers were started."""
    if cfg.cluster.backend == "in_process":
        return True
    import ray

    return len({node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}) == 1


@contextmanager
def ended_on_error(workers: Workers) -> Iterator[None]:
    """Workers whose setup fails do not outlive it."""
    try:
        yield
    except BaseException:
        workers.shutdown()
        raise


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


class RayWorkers:
    """One Ray actor a worker, numbered node by node at first, so that those that split a matrix share one where it has
    room. A handle is an object reference: what it refers to never visits the driver.
    """

    separate_processes = True

    def __init__(
        self,
        worker_class: type,
        role: Role,
        count: int,
        cfg: Config,
        processes: int,
        shared: "Sequence[Place] | None" = None,
    ) -> None:
        connect(cfg.num_cpus)
        import ray

        self.count = count
        if shared is None:
            self.options = [_own_place(worker_class, role, count, processes)] * count
        else:
            self.options = [_shared_place(shared[i * processes : (i + 1) * processes]) for i in range(count)]
        self.actor_class = ray.remote(worker_class)
        self.actors = [self.actor_class.options(**options).remote() for options in self.options]
        with ended_on_error(self):
            places = [self._enter(i) for i in range(count)]
        order = sorted(range(count), key=places.__getitem__)
        self.places: list[Place] = [places[i] for i in order]
        self.actors = [self.actors[i] for i in order]

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        import ray

        try:
            return ray.get([self.start(i, method, *args) for i, args in enumerate(arguments)])
        except ray.exceptions.RayError as error:
            raise _cause(error) from None

    def outcomes(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], timeout: float | None = None
    ) -> dict[int, Any]:
        import ray

        started = {i: self.start(i, method, *args) for i, args in arguments.items()}
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

    def restart(self, index: int) -> None:
        import ray

        ray.kill(self.actors[index])
        self.actors[index] = self.actor_class.options(**self.options[index]).remote()
        self._enter(index)

    def start(self, index: int, method: str, *arguments: Any) -> Any:
        return getattr(self.actors[index], method).remote(*arguments)

    def wait(self, handle: Any) -> None:
        import ray

        ray.wait([handle])

    def shutdown(self) -> None:
        import ray

        for actor in self.actors:
            ray.kill(actor)

    def _enter(self, index: int) -> "Place":
        """Relative paths of a recipe mean in the actor what they mean to the driver."""
        import ray

        try:
            place: Place = ray.get(self.actors[index].__ray_call__.remote(_enter_folder, os.getcwd()))
            return place
        except ray.exceptions.RayError as error:
            raise _cause(error) from None

    def _hung(self, index: int, method: str, timeout: float | None) -> WorkerDied:
        import ray

        ray.kill(self.actors[index])
        return WorkerDied(f"no answer to {method} in {timeout:g} seconds")


class Place(NamedTuple):
    """A node's ID, and the GPUs there that the actor was given."""

    node: str
    gpus: list[str]


def _own_place(worker_class: type, role: Role, count: int, processes: int) -> dict[str, Any]:
    """Ray's options for each of so many actors. Raises UserError where it has not enough for all of them."""
    import ray
    import torch

    nodes = {node["NodeID"]: node["Labels"].get(ROLE) for node in ray.nodes() if node["Alive"]}
    placed = role in nodes.values()
    options: dict[str, Any] = {"label_selector": {ROLE: role}} if placed else {}
    own = {node for node, label in nodes.items() if not placed or label == role}
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""  # by the user, who then has them hidden everywhere
    gpus = processes if ray.cluster_resources().get("GPU") and not hidden else 0
    if not gpus and (hidden or torch.cuda.is_available()):  # from an actor that asks for none Ray hides none
        options |= _sees("")
    for kind, wanted in (("CPU", count * processes), ("GPU", count * gpus)):
        if (free := _free(kind, own)) < wanted:
            raise UserError(
                f"cluster.backend=ray: {count} {worker_class.__name__} actors need {wanted} {kind}s, Ray has "
                f"{free:g} free{f' on nodes with {ROLE}={role}' if placed else ''}; lower cluster.train_ranks or "
                "cluster.generation_engines, or start Ray with more"
            )
    return options | {"num_cpus": processes, "num_gpus": gpus}


def _shared_place(places: Sequence[Place]) -> dict[str, Any]:
    """Ray's options for an actor that works where these do, while they do not. Raises UserError for two nodes."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    first, *others = {place.node for place in places}
    if others:
        raise UserError(
            f"policy.generation.colocated.enabled=true: an engine of tensor_parallel_size={len(places)} would be on "
            f"{1 + len(others)} nodes; take a size that divides the ranks of a node"
        )
    options = _sees(",".join(gpu for place in places for gpu in place.gpus))
    return options | {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(first, False)}


def _sees(gpus: str) -> dict[str, Any]:
    return {"runtime_env": {"env_vars": {"CUDA_VISIBLE_DEVICES": gpus}}}


def _in_order(gpu: str) -> tuple[int, str]:
    """Numbers by size; a GPU may have a name instead."""
    return len(gpu), gpu


def _free(kind: str, nodes: Set[str]) -> float:
    """On these nodes together. Ray says it node by node only where vLLM asks, too."""
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()
    return sum(resources.get(kind, 0) for node, resources in free.items() if node in nodes)


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
    from ray.exceptions import RayActorError, RayTaskError, WorkerCrashedError

    if isinstance(error, RayActorError | WorkerCrashedError):
        return WorkerDied("its process ended")
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, UserError | WorkerDied) else error


def _enter_folder(worker: object, folder: str) -> Place:
    import ray

    try:
        os.chdir(folder)
    except OSError as error:
        raise UserError(
            f"a node of the Ray cluster cannot enter {folder} ({error}); start in a shared folder"
        ) from None
    return Place(ray.get_runtime_context().get_node_id(), sorted(map(str, ray.get_gpu_ids()), key=_in_order))


def require_token() -> None:
    """A Ray that is started here asks for a token; it reads that when it is imported, and vLLM imports it too."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_ADDRESS" in os.environ:
        return
    if "ray" not in sys.modules:
        os.environ["RAY_AUTH_MODE"] = "token"
        if "RAY_AUTH_TOKEN" not in os.environ and "RAY_AUTH_TOKEN_PATH" not in os.environ:
            os.environ["RAY_AUTH_TOKEN_PATH"] = _token_file()
    elif os.environ.get("RAY_AUTH_MODE") != "token":
        raise UserError(
            "cluster.backend=ray: Ray was imported before it could be given a token; start the run by the nemo-fp8rl "
            "command, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before Python starts"
        )


def _token_file() -> str:
    """A new token, in a file that only this user reads: Ray writes environments to logs that everybody can."""
    folder = tempfile.TemporaryDirectory(prefix="nemo_fp8rl_")
    atexit.register(folder.cleanup)
    path = os.path.join(folder.name, "ray_token")
    with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(secrets.token_hex(32))
    return path


def connect(num_cpus: int, setup_hook: str | None = None) -> None:
    """Join the Ray cluster of RAY_ADDRESS, or start one here: on loopback, with a token of its own.

    setup_hook: name of a function that every worker process calls first.
    """
    require_token()
    import ray

    environment = {} if setup_hook is None else {"worker_process_setup_hook": setup_hook}
    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False, ignore_reinit_error=True, runtime_env=environment)
        return
    if ray.is_initialized():
        return
    ray.init(
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _node_ip_address="127.0.0.1",
        runtime_env=environment,
    )
