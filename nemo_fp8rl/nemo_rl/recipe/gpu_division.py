"""How a recipe for NeMo RL divides its GPUs, and which ones can run its flow. No torch, so that `doctor` may ask."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.schema import Flow
from nemo_fp8rl.fp8.gpu_support import ADA, Capability, why_no_fp8
from nemo_fp8rl.nemo_rl.recipe.keys import at
from nemo_fp8rl.nemo_rl.recipe.precision import ENGINE, TRAINER


class Gpus(NamedTuple):
    """GPUs of the trainer, and of all engines together: the same ones when they are colocated. There may be none."""

    trainer: int
    engines: int


def divide(values: Mapping[str, Any]) -> Gpus:
    """values: the resolved recipe. Engines that are not colocated have whole nodes, or a part of the only one."""
    cluster, generation = values["cluster"], values["policy"]["generation"]
    total = cluster["num_nodes"] * cluster["gpus_per_node"] - _of_reward_model(values)
    if is_colocated(generation):
        return Gpus(total, total)
    resources = generation["colocated"].get("resources") or {}
    engines = (resources.get("num_nodes") or 1) * (resources.get("gpus_per_node") or cluster["gpus_per_node"])
    return Gpus(total - engines, engines)


def check_division(values: Mapping[str, Any]) -> None:
    """Raise UserError, naming the key, where the trainer, or engines beside it, have no GPUs by NeMo RL's rules."""
    colocated = is_colocated(values["policy"]["generation"])
    if not colocated:
        _check_resources(values)
    trainer, engines = divide(values)
    if trainer <= 0 and colocated:
        raise UserError(
            "env.reward_model.resources takes all of the cluster's GPUs and leaves none to train on: lower it, or "
            "raise cluster.num_nodes"
        )
    if trainer <= 0:
        raise UserError(
            f"policy.generation.colocated.resources takes {engines} of the cluster's {trainer + engines} GPUs and "
            "leaves none to train on: lower it, or raise cluster.num_nodes"
        )


def _check_resources(values: Mapping[str, Any]) -> None:
    """Raise UserError, naming the key, for resources of engines beside the trainer that NeMo RL refuses."""
    cluster, generation = values["cluster"], values["policy"]["generation"]
    resources, nodes = generation["colocated"].get("resources") or {}, cluster["num_nodes"]
    rewards = at(values, "env.reward_model.resources.num_nodes", 0) if nodes > 1 and _of_reward_model(values) else 0
    here, one = "policy.generation.colocated.resources", nodes - rewards == 1
    if resources.get("gpus_per_node") is None:
        raise UserError(f"{here}.gpus_per_node is null, and engines that are not colocated need a number: set it")
    if one and resources.get("num_nodes") not in (None, 1):
        raise UserError(f"{here}.num_nodes={resources['num_nodes']} beside the trainer's one node: set it to null")
    if not one and resources.get("num_nodes") is None:
        raise UserError(f"{here}.num_nodes is null, and on {nodes} nodes engines have nodes of their own: set it")
    if not one and resources["gpus_per_node"] != (whole := cluster["gpus_per_node"]):
        raise UserError(
            f"{here}.gpus_per_node={resources['gpus_per_node']}, and on {nodes} nodes engines have whole ones: set it "
            f"to cluster.gpus_per_node={whole}"
        )


def _of_reward_model(values: Mapping[str, Any]) -> int:
    """GPUs of NeMo RL's environment `reward_model`, where the data asks for it: of the only node, else whole nodes.

    Raises UserError where the recipe does not say how many.
    """
    data = values.get("data") or {}
    blocks = [data.get(name) or {} for name in ("default", "train", "validation")]
    sets = [block for given in blocks for block in (given if isinstance(given, list) else [given])]
    resources = at(values, "env.reward_model.resources", None)
    if resources is None or not any(at(block, "env_name", None) == "reward_model" for block in sets):
        return 0
    cluster = values["cluster"]
    asked = "gpus_per_node" if cluster["num_nodes"] == 1 else "num_nodes"
    if (count := resources.get(asked)) is None:
        raise UserError(f"env.reward_model.resources.{asked} is not set, and data asks for that environment: set it")
    return int(count if asked == "gpus_per_node" else count * cluster["gpus_per_node"])


def is_asynchronous(master: Mapping[str, Any]) -> bool:
    """Whether NeMo RL's loop generates while it trains."""
    return bool(at(master, "grpo.async_grpo.enabled", False))


def is_colocated(generation: Mapping[str, Any]) -> bool:
    return bool((generation.get("colocated") or {}).get("enabled", True))


def why_not(flow: Flow, gpu: str, capability: Capability) -> str:
    """Why a GPU of this name and compute capability cannot run the flow, in a sentence; empty if it can."""
    refusal = "" if flow == "bf16" else why_no_fp8(gpu, capability, training=flow == "fp8_e2e")
    if not refusal:
        return ""
    if capability < ADA:
        return f"{refusal}: take a bfloat16 recipe, or set {ENGINE}.precision=bfloat16 and {TRAINER}.enabled=false"
    return f"{refusal}: set {TRAINER}.enabled=false, which leaves FP8 to the engine"
