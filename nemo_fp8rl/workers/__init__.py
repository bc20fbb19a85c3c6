"""The processes of a run: a rank or an engine runs in this process or as a Ray actor, with the same class.

A worker class is built without arguments, and a call of `setup` follows, so that a failure is an ordinary exception of
a call and not the death of an actor.
"""

from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.workers.in_process_worker import InProcessWorker, prepare_process
from nemo_fp8rl.workers.ray_actors import RayWorkers
from nemo_fp8rl.workers.ray_cluster import (
    check_address,
    connect,
    find_cluster,
    is_in_cluster,
    joins_cluster,
    require_token,
    shorten_folder,
)
from nemo_fp8rl.workers.ray_placement import ROLE, is_single_host
from nemo_fp8rl.workers.worker_group import Role, WorkerDied, Workers, shutdown_on_error

__all__ = [
    "ROLE",
    "RayWorkers",
    "Role",
    "WorkerDied",
    "Workers",
    "check_address",
    "connect",
    "find_cluster",
    "is_in_cluster",
    "is_single_host",
    "joins_cluster",
    "prepare_process",
    "require_token",
    "shorten_folder",
    "shutdown_on_error",
    "start_workers",
]


def start_workers(
    worker_class: type,
    role: Role,
    count: int,
    cfg: Config,
    processes: int = 1,
    colocated_with: Workers | None = None,
    max_concurrency: int = 1,
    places: int = 0,
) -> Workers:
    """Start workers on the cluster's backend, with the role's `env_vars` in their environment.

    worker_class:    the class of each worker
    count:           the number of workers
    processes:       processes of each worker
    colocated_with:  workers whose nodes and GPUs the new ones share: worker 0 those of the first `processes` of them,
                     and so on
    max_concurrency: calls that a worker in its own process serves at once, each in a thread
    places:          places for workers, where more than `count` may be started later (`Workers.restart`)
    """
    if cfg.cluster.backend == "in_process":
        assert count == 1  # config/validate/recipe.py
        return InProcessWorker(worker_class, cfg)
    locations = colocated_with.locations if isinstance(colocated_with, RayWorkers) else None
    return RayWorkers(worker_class, role, count, cfg, processes, locations, max_concurrency, places)
