"""How a recipe for NeMo RL divides its GPUs, and which ones can run its flow. No torch, so that `doctor` may ask."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from nemo_fp8rl.config import Flow
from nemo_fp8rl.fp8.gpus import ADA, Capability, why_no_fp8
from nemo_fp8rl.nemo_rl.keys import at
from nemo_fp8rl.nemo_rl.precision import ENGINE, TRAINER


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


def is_asynchronous(master: Mapping[str, Any]) -> bool:
    """Whether it generates while it trains."""
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
