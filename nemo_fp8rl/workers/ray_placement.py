"""Where Ray puts an actor: on nodes of its role, with CPUs and GPUs of its own, or where others are."""

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple, get_args

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.visible_gpus import shown_gpus
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.workers.worker_group import Role

ROLE = "nemo-fp8rl/role"
"""Ray's label of nodes that are for workers of one role; where no node is for a role, its workers may be anywhere."""


class Location(NamedTuple):
    """A node's ID, and the GPUs there that the actor was given."""

    node: str
    gpus: list[str]


def exclusive_options(worker_class: type, role: Role, count: int, processes: int) -> dict[str, Any]:
    """Ray's options for each of so many actors. Raises UserError where it has not enough for all of them."""
    import torch

    nodes, placed = _nodes_for(role)
    options: dict[str, Any] = {"label_selector": {ROLE: role}} if placed else {}
    gpus = processes if _take_gpus() else 0
    if not gpus and (shown_gpus() == [] or torch.cuda.is_available()):  # from an actor without any Ray hides none
        options |= _sees("")
    each = {"CPU": processes, "GPU": gpus}
    free = _free({node["NodeID"] for node in nodes})
    here = f" on nodes with {ROLE}={role}" if placed else ""
    for kind, size in each.items():
        if (all_free := sum(of_node.get(kind, 0) for of_node in free)) < count * size:
            raise UserError(
                f"cluster.backend=ray: {count} {worker_class.__name__} actors need {count * size} {kind}s, Ray has "
                f"{all_free:g} free{here}; lower cluster.train_ranks or cluster.generation_engines, or start Ray with "
                "more"
            )
    room = sum(min(int(of_node.get(kind, 0) // size) for kind, size in each.items() if size) for of_node in free)
    if room < count:
        raise UserError(
            f"cluster.backend=ray: each of {count} {worker_class.__name__} actors needs {processes} CPUs"
            f"{f' and {gpus} GPUs' if gpus else ''} of one node, and Ray has that free for {room}{here}; lower "
            "policy.generation.vllm_cfg.tensor_parallel_size, or start larger nodes"
        )
    return options | {"num_cpus": processes, "num_gpus": gpus}


def is_single_host(cfg: Config) -> bool:
    """Whether all workers share a machine, wherever they may be placed; with Ray, once workers were started."""
    if cfg.cluster.backend == "in_process":
        return True
    kinds = ("CPU", "GPU") if _take_gpus() else ("CPU",)
    roles: tuple[Role, ...] = ("train",) if cfg.policy.generation.colocated.enabled else get_args(Role)
    nodes = [node for role in roles for node in _nodes_for(role)[0]]
    able = (node for node in nodes if all(node["Resources"].get(kind) for kind in kinds))
    return len({node["NodeManagerHostname"] for node in able}) == 1


def colocated_options(places: Sequence[Location]) -> dict[str, Any]:
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


def with_variables(options: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Ray's options for an actor, with these in its environment as well."""
    own = options.get("runtime_env", {}).get("env_vars", {})
    return {**options, "runtime_env": {"env_vars": {**variables, **own}}}


def _sees(gpus: str) -> dict[str, Any]:
    # Ray before 2.56 hides all GPUs from an actor that asks for none: https://github.com/ray-project/ray/pull/62492
    return with_variables({}, {"CUDA_VISIBLE_DEVICES": gpus, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"})


def in_order(gpu: str) -> tuple[int, str]:
    """Numbers by size; a GPU may have a name instead."""
    return len(gpu), gpu


def _nodes_for(role: Role) -> tuple[list[dict[str, Any]], bool]:
    """Ray's nodes where workers of the role may be, and whether their label says so."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    own = [node for node in alive if node["Labels"].get(ROLE) == role]
    return own or alive, bool(own)


def _take_gpus() -> bool:
    """Whether each process of a worker has a GPU of its own. A user who hides them here has them hidden everywhere."""
    import ray

    return bool(ray.cluster_resources().get("GPU")) and shown_gpus() != []


def _free(nodes: Set[str]) -> list[dict[str, float]]:
    """Free resources of each of these nodes. Ray says it node by node only where vLLM asks, too."""
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()
    return [resources for node, resources in free.items() if node in nodes]
