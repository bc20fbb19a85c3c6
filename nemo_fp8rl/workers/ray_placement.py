"""The placement of Ray actors: on nodes of their role, with CPUs and GPUs of their own, or with the GPUs of others."""

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple, get_args

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.visible_gpus import visible_gpu_names
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.workers.worker_group import Role

ROLE = "nemo-fp8rl/role"
"""Ray's label of nodes for workers of one role. If no node has a role's label, its workers may run on every node."""


class Location(NamedTuple):
    """The place of an actor. node: the node's ID; gpus: the node's GPUs that the actor has."""

    node: str
    gpus: list[str]


def exclusive_options(worker_class: type, role: Role, count: int, processes: int) -> dict[str, Any]:
    """Return Ray's options for each of `count` actors with CPUs, and where there are any GPUs, of their own.

    processes: processes of each actor; each has one CPU, and one GPU
    Raises:    UserError if Ray has not enough for all actors
    """
    import torch

    nodes, has_label = _nodes_for(role)
    options: dict[str, Any] = {"label_selector": {ROLE: role}} if has_label else {}
    gpus = processes if _workers_use_gpus() else 0
    if not gpus and (
        visible_gpu_names() == [] or torch.cuda.is_available()
    ):  # Ray hides no GPU from an actor without any
        options |= _visible_gpus("")
    resources = {"CPU": processes, "GPU": gpus}
    free = _free_resources({node["NodeID"] for node in nodes})
    where = f" on nodes with {ROLE}={role}" if has_label else ""
    for kind, size in resources.items():
        if (all_free := sum(node.get(kind, 0) for node in free)) < count * size:
            raise UserError(
                f"cluster.backend=ray: {count} {worker_class.__name__} actors need {count * size} {kind}s, Ray has "
                f"{all_free:g} free{where}; lower cluster.train_ranks or cluster.generation_engines, or start Ray with "
                "more"
            )
    room = sum(min(int(node.get(kind, 0) // size) for kind, size in resources.items() if size) for node in free)
    if room < count:
        raise UserError(
            f"cluster.backend=ray: each of {count} {worker_class.__name__} actors needs {processes} CPUs"
            f"{f' and {gpus} GPUs' if gpus else ''} of one node, and Ray has that free for {room}{where}; lower "
            "policy.generation.vllm_cfg.tensor_parallel_size, or start larger nodes"
        )
    return options | {"num_cpus": processes, "num_gpus": gpus}


def is_single_host(cfg: Config) -> bool:
    """Return True if all workers share a machine, wherever Ray places them. Ray's workers must have been started."""
    if cfg.cluster.backend == "in_process":
        return True
    kinds = ("CPU", "GPU") if _workers_use_gpus() else ("CPU",)
    roles: tuple[Role, ...] = ("train",) if cfg.policy.generation.colocated.enabled else get_args(Role)
    nodes = [node for role in roles for node in _nodes_for(role)[0]]
    usable = (node for node in nodes if all(node["Resources"].get(kind) for kind in kinds))
    return len({node["NodeManagerHostname"] for node in usable}) == 1


def colocated_options(locations: Sequence[Location]) -> dict[str, Any]:
    """Return Ray's options for an actor that uses the GPUs of these actors, which work at other times.

    Raises: UserError if the locations are on several nodes
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    first, *others = {location.node for location in locations}
    if others:
        raise UserError(
            f"policy.generation.colocated.enabled=true: an engine of tensor_parallel_size={len(locations)} would be on "
            f"{1 + len(others)} nodes; take a size that divides the ranks of a node"
        )
    options = _visible_gpus(",".join(gpu for location in locations for gpu in location.gpus))
    return options | {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(first, False)}


def add_env_vars(options: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Return Ray's options for an actor with these variables as well; variables in the options have precedence."""
    option_variables = options.get("runtime_env", {}).get("env_vars", {})
    return {**options, "runtime_env": {"env_vars": {**variables, **option_variables}}}


def _visible_gpus(gpus: str) -> dict[str, Any]:
    # Ray before 2.56 hides all GPUs from an actor that requests none: https://github.com/ray-project/ray/pull/62492
    return add_env_vars({}, {"CUDA_VISIBLE_DEVICES": gpus, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"})


def gpu_sort_key(gpu: str) -> tuple[int, str]:
    """Sort numbers by size; a GPU may have a name instead."""
    return len(gpu), gpu


def _nodes_for(role: Role) -> tuple[list[dict[str, Any]], bool]:
    """Return Ray's nodes where workers of the role may run, and True if these nodes have the role's label."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    labelled = [node for node in alive if node["Labels"].get(ROLE) == role]
    return labelled or alive, bool(labelled)


def _workers_use_gpus() -> bool:
    """Return True if each process of a worker has a GPU. GPUs that are hidden from this process are hidden from all."""
    import ray

    return bool(ray.cluster_resources().get("GPU")) and visible_gpu_names() != []


def _free_resources(nodes: Set[str]) -> list[dict[str, float]]:
    """Return the free resources of each of these nodes, by an internal function of Ray that vLLM calls, too."""
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()
    return [resources for node, resources in free.items() if node in nodes]
