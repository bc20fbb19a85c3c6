"""Where a rank or an engine runs: in this process, or as a Ray actor. The class that runs is the same.

A worker class is built without arguments and then told to `setup`, so that a failure comes back as an ordinary
exception of a call and not as the death of an actor.
"""

from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.workers.in_process_worker import InProcessWorker
from nemo_fp8rl.workers.ray_actors import RayWorkers
from nemo_fp8rl.workers.ray_cluster import (
    check_address,
    connect,
    find_cluster,
    is_in_cluster,
    joins_cluster,
    require_token,
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
    "require_token",
    "shutdown_on_error",
    "start_workers",
]


def start_workers(
    worker_class: type,
    role: Role,
    count: int,
    cfg: Config,
    processes: int = 1,
    beside: Workers | None = None,
    max_concurrency: int = 1,
) -> Workers:
    """`count` workers of the class on the cluster's backend, of so many processes each, with the role's `env_vars` in
    their environment.

    beside: they have the nodes and GPUs of these, the first those of as many as it has processes, and so on.
    max_concurrency: that a worker with a process of its own takes, each in a thread.
    """
    if cfg.cluster.backend == "in_process":
        assert count == 1  # config_check
        return InProcessWorker(worker_class, role, cfg)
    places = beside.places if isinstance(beside, RayWorkers) else None
    return RayWorkers(worker_class, role, count, cfg, processes, places, max_concurrency)
