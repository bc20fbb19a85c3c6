"""What NeMo RL's own workers cannot have with FP8 on the wire; no torch, so that `doctor` may ask."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from nemo_fp8rl.algorithms.correction_config import from_mapping
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.nemo_rl.compat import engines_survive_fp8_refit
from nemo_fp8rl.nemo_rl.recipe.gpu_division import is_asynchronous
from nemo_fp8rl.nemo_rl.recipe.keys import at
from nemo_fp8rl.nemo_rl.recipe.precision import ENGINE, read_precision
from nemo_fp8rl.nemo_rl.stock.layout_limits import why_no_layout, why_no_shares

OURS = "or nemo_fp8rl.workers=ours"
IGNORED = "quantization_ignored_layer_kws"
DRAFTERS = ("mtp", "deepseek_mtp")
KV_CACHE = "policy.generation.vllm_cfg.kv_cache_dtype"
NO_LATENT_CACHE = (
    f"{KV_CACHE}=fp8 with NeMo RL's own workers: its trainer calibrates no scales for latent attention (kv_lora_rank "
    f"in the model's config.json): set {KV_CACHE}=auto"
)
"""The refusal of latent attention; else the engine would say so in its set-up, when both sides are loaded."""


def check_stock(values: Mapping[str, Any], version: str) -> None:
    """Raise UserError for what NeMo RL of this version cannot have of the resolved recipe `values`."""
    policy = values["policy"]
    if refusal := why_no_correction(values) or why_not(policy, version):
        raise UserError(refusal)
    megatron = at(values, "policy.megatron_cfg.enabled", False)  # else the block is there and unused
    if megatron and (refusal := next(chain(why_no_layout(values), why_no_shares(values)), "")):
        raise UserError(refusal)
    if read_precision(policy).kv_fp8 and (refusal := next(why_no_kv_scales(values), "")):
        raise UserError(f"{refusal}, {OURS}")


def why_no_correction(values: Mapping[str, Any]) -> str:
    """Why a loss that sees a microbatch at a time cannot correct as the recipe says, in a sentence; empty if it can."""
    correction = at(values, "nemo_fp8rl.correction", None)
    if correction is None or not (key := from_mapping(correction).of_whole_batch):
        return ""
    return (
        f"nemo_fp8rl.correction.{key} needs the whole batch, and NeMo RL's workers give a loss one microbatch at a "
        "time: leave it out, or set nemo_fp8rl.workers=ours"
    )


def why_not(policy: Mapping[str, Any], version: str) -> str:
    """Why NeMo RL of this version cannot run the recipe's block `policy`, in a sentence; empty if it can.

    Raises UserError where trainer and engine would not agree.
    """
    precision = read_precision(policy)
    if precision.flow == "bf16":
        return ""
    if not engines_survive_fp8_refit(version):
        return (
            f"NeMo RL {version} processes an engine's weights once more after a refit, which FP8 ones do not survive: "
            f"use its main, {OURS}"
        )
    if precision.fp8_param and (words := policy["generation"]["vllm_cfg"].get(IGNORED)):
        return (
            f"{ENGINE}.{IGNORED}={list(words)} are bfloat16 in the engine, and with policy.megatron_cfg.fp8_cfg."
            f"fp8_param=true NeMo RL's own trainer holds them in FP8 alone: leave either out, {OURS}"
        )
    if not policy["megatron_cfg"].get("enabled"):
        return "FP8 on the wire needs NeMo RL's Megatron worker: set policy.megatron_cfg.enabled=true"
    if (method := at(policy, "generation.vllm_kwargs.speculative_config.method", None)) in DRAFTERS:
        return (
            f"policy.generation.vllm_kwargs.speculative_config.method={method}: FP8 on the wire carries no drafter's "
            f"weights; leave speculative_config out, {OURS}"
        )
    if (transport := policy["generation"].get("refit_transport")) is not None:
        return f"policy.generation.refit_transport={transport} does not carry FP8: set it to null"
    if at(policy, "draft.enabled", False):
        return f"policy.draft.enabled=true: FP8 on the wire carries no drafter's weights; set it to false, {OURS}"
    if at(policy, "generation.vllm_kwargs.kv_cache_dtype", None) is not None:
        return "policy.generation.vllm_kwargs.kv_cache_dtype: say it in policy.generation.vllm_cfg.kv_cache_dtype"
    return ""


def why_no_kv_scales(values: Mapping[str, Any]) -> Iterator[str]:
    """What keeps NeMo RL from calibrating its engines' FP8 KV cache, each in a sentence.

    The first two it refuses where it is told of such a cache, as it is not of ours; with the last it would validate
    with scales of 1.
    """
    here = f"{KV_CACHE}=fp8 with NeMo RL's own workers"
    if is_asynchronous(values):
        yield f"{here} is not calibrated by its asynchronous loop: set {KV_CACHE}=auto"
    elif at(values, "policy.generation.vllm_cfg.async_engine", False):
        yield f"{here} has no asynchronous rollouts: set policy.generation.vllm_cfg.async_engine=false"
    key = "policy.megatron_cfg.pipeline_model_parallel_size"
    if (pipeline := at(values, key, 1)) > 1:
        yield f"{here} is calibrated on one pipeline stage, got {pipeline}: set {key}=1"
    key = "grpo.val_at_start"
    if at(values, key, False):
        yield f"{here} is calibrated after the first validation, {key}=true: set that to false"
