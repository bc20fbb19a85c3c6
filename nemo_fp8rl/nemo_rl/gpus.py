"""How a recipe for NeMo RL divides its GPUs."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Gpus(NamedTuple):
    """Of the trainer, and of all engines together: the same ones when they are colocated. A recipe may leave none."""

    trainer: int
    engines: int


def divide(values: Mapping[str, Any]) -> Gpus:
    """values: the resolved recipe. Engines that are not colocated have whole nodes, or a part of the only one."""
    cluster, generation = values["cluster"], values["policy"]["generation"]
    total = cluster["num_nodes"] * cluster["gpus_per_node"]
    if is_colocated(generation):
        return Gpus(total, total)
    resources = generation["colocated"].get("resources") or {}
    engines = (resources.get("num_nodes") or 1) * (resources.get("gpus_per_node") or cluster["gpus_per_node"])
    return Gpus(total - engines, engines)


def is_colocated(generation: Mapping[str, Any]) -> bool:
    return bool((generation.get("colocated") or {}).get("enabled", True))
