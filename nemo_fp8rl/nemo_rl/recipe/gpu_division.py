"""Divide the GPUs of a NeMo RL recipe between trainer and engines. Free of torch, for `doctor`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.fp8rl_schema import Flow
from nemo_fp8rl.fp8.gpu_support import Capability, nearest_flow, why_flow_unsupported
from nemo_fp8rl.nemo_rl.recipe.keys import at
from nemo_fp8rl.nemo_rl.recipe.precision import BF16_TRAINER, FP8_CFG, VLLM_CFG


class GpuCounts(NamedTuple):
    """GPUs of the trainer and of all engines together; colocated ones share the same GPUs. Both may be 0 or less."""

    trainer: int
    engines: int


def divide_gpus(values: Mapping[str, Any]) -> GpuCounts:
    """Return the GPUs of trainer and engines in the resolved recipe `values`.

    Engines beside the trainer get whole nodes, or a part of the only node.
    """
    cluster, generation = values["cluster"], values["policy"]["generation"]
    total = cluster["num_nodes"] * cluster["gpus_per_node"] - _count_reward_model_gpus(values)
    if is_colocated(generation):
        return GpuCounts(total, total)
    resources = generation["colocated"].get("resources") or {}
    engines = (resources.get("num_nodes") or 1) * (resources.get("gpus_per_node") or cluster["gpus_per_node"])
    return GpuCounts(total - engines, engines)


def check_division(values: Mapping[str, Any]) -> None:
    """Raise UserError, with the key, if NeMo RL's rules leave the trainer, or engines beside it, without GPUs."""
    colocated = is_colocated(values["policy"]["generation"])
    if not colocated:
        _check_resources(values)
    trainer, engines = divide_gpus(values)
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
    """Raise UserError, with the key, for resources of engines beside the trainer that NeMo RL refuses."""
    cluster, generation = values["cluster"], values["policy"]["generation"]
    resources, nodes = generation["colocated"].get("resources") or {}, cluster["num_nodes"]
    uses_reward_nodes = nodes > 1 and _count_reward_model_gpus(values)
    reward_nodes = at(values, "env.reward_model.resources.num_nodes", 0) if uses_reward_nodes else 0
    key_prefix, single_node = "policy.generation.colocated.resources", nodes - reward_nodes == 1
    if resources.get("gpus_per_node") is None:
        raise UserError(f"{key_prefix}.gpus_per_node is null, and engines beside the trainer need a number: set it")
    if single_node and resources.get("num_nodes") not in (None, 1):
        raise UserError(f"{key_prefix}.num_nodes={resources['num_nodes']} beside a trainer on one node: set it to null")
    if not single_node and resources.get("num_nodes") is None:
        raise UserError(f"{key_prefix}.num_nodes is null, and on {nodes} nodes engines need whole nodes: set it")
    if not single_node and resources["gpus_per_node"] != (whole := cluster["gpus_per_node"]):
        raise UserError(
            f"{key_prefix}.gpus_per_node={resources['gpus_per_node']}, and on {nodes} nodes engines need whole nodes: "
            f"set it to cluster.gpus_per_node={whole}"
        )


def _count_reward_model_gpus(values: Mapping[str, Any]) -> int:
    """Return the GPUs of NeMo RL's environment `reward_model`, 0 if the data does not use it.

    They are a part of the only node, else whole nodes.
    Raises: UserError if the recipe does not say how many
    """
    data = values.get("data") or {}
    blocks = [data.get(name) or {} for name in ("default", "train", "validation")]
    datasets = [dataset for block in blocks for dataset in (block if isinstance(block, list) else [block])]
    resources = at(values, "env.reward_model.resources", None)
    if resources is None or not any(at(dataset, "env_name", None) == "reward_model" for dataset in datasets):
        return 0
    cluster = values["cluster"]
    unit = "gpus_per_node" if cluster["num_nodes"] == 1 else "num_nodes"
    if (count := resources.get(unit)) is None:
        raise UserError(f"env.reward_model.resources.{unit} is not set, and data uses that environment: set it")
    return int(count if unit == "gpus_per_node" else count * cluster["gpus_per_node"])


def is_asynchronous(master: Mapping[str, Any]) -> bool:
    """Return whether NeMo RL's loop generates while it trains."""
    return bool(at(master, "grpo.async_grpo.enabled", False)) or is_single_controller(master)


def is_single_controller(master: Mapping[str, Any]) -> bool:
    """Return whether the recipe is for NeMo RL's single controller: only its recipes have this block."""
    return bool(at(master, "async_rl", None))


def is_colocated(generation: Mapping[str, Any]) -> bool:
    return bool((generation.get("colocated") or {}).get("enabled", True))


def why_gpu_unsupported(flow: Flow, gpu: str, capability: Capability) -> str:
    """Return why a GPU of this name and compute capability cannot run the flow; empty if it can."""
    refusal = why_flow_unsupported(flow, gpu, capability, trains=True)
    if not refusal:
        return ""
    instead, name = nearest_flow(flow, capability), flow.rpartition("_")[0]
    if instead == "bf16":
        off = f"{VLLM_CFG}.precision=bfloat16 and {FP8_CFG}.enabled=false"
        return f"{refusal}: take a bfloat16 recipe" + (f", or set {off}" if name in ("fp8", "mxfp8") else "")
    return f"{refusal}: set {BF16_TRAINER.get(name, f'{FP8_CFG}.enabled=false')}, which leaves FP8 to the engine"
