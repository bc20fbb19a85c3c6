"""Where Ray puts an actor: on nodes of its role, with CPUs and GPUs of its own, or where others are."""

import os
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from nemo_fp8rl.errors import UserError
from nemo_fp8rl.workers.base import Role

ROLE = "nemo-fp8rl/role"
"""Ray's label of nodes that are for workers of one role; where no node is for a role, its workers may be anywhere."""


class Location(NamedTuple):
    """A node's ID, and the GPUs there that the actor was given."""

    node: str
    gpus: list[str]


def own_place(worker_class: type, role: Role, count: int, processes: int) -> dict[str, Any]:
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


def shared_place(places: Sequence[Location]) -> dict[str, Any]:
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


def in_order(gpu: str) -> tuple[int, str]:
    """Numbers by size; a GPU may have a name instead."""
    return len(gpu), gpu


def _free(kind: str, nodes: Set[str]) -> float:
    """On these nodes together. Ray says it node by node only where vLLM asks, too."""
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()
    return sum(resources.get(kind, 0) for node, resources in free.items() if node in nodes)
