"""Recipes that NeMo RL's own workers cannot run with FP8 on the wire. Free of torch, for `doctor`."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from nemo_fp8rl.algorithms.correction_config import CorrectionConfig
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.typed_tree import read_block
from nemo_fp8rl.nemo_rl.recipe.gpu_division import is_asynchronous, is_colocated
from nemo_fp8rl.nemo_rl.recipe.keys import KV_WINDOW, PEFT, at
from nemo_fp8rl.nemo_rl.recipe.precision import SPELLINGS, VLLM_CFG, read_precision
from nemo_fp8rl.nemo_rl.refit_transport.settings import ENGINE, settings_of_recipe
from nemo_fp8rl.nemo_rl.stock.layout_limits import why_batch_indivisible, why_layout_unsupported

STOCK_FLOWS = ("bf16", "fp8_rollout", "fp8_e2e")
"""The precisions between which this package refits NeMo RL's own workers."""
OR_PACKAGE_WORKERS = "or nemo_fp8rl.workers=ours"
IGNORED = "quantization_ignored_layer_kws"
DRAFTERS = ("mtp", "deepseek_mtp")
STATE_DTYPES = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype", "main_grads_dtype")
KV_CACHE = "policy.generation.vllm_cfg.kv_cache_dtype"
FLOAT32_SUM = "policy.megatron_cfg.distributed_data_parallel_config.reduce_scatter_with_fp32_accumulation"
LATENT_CACHE_UNSUPPORTED = (
    f"{KV_CACHE}=fp8 with NeMo RL's own workers: its trainer calibrates no scales for latent attention (kv_lora_rank "
    f"in the model's config.json): set {KV_CACHE}=auto"
)
"""Refusal of latent attention with an FP8 cache; the engine would refuse it only when both sides are loaded."""


def check_stock(values: Mapping[str, Any], survives_refit: bool) -> None:
    """Raise UserError if NeMo RL cannot run the resolved recipe `values` with its own workers.

    survives_refit: as `Checkout.engines_survive_fp8_refit`
    """
    policy = values["policy"]
    if at(values, "nemo_fp8rl.noise.enabled", False):
        raise UserError(
            "nemo_fp8rl.noise.enabled=true: NeMo RL's own trainer sends its weights as they are: set "
            "nemo_fp8rl.workers=ours"
        )
    limits = why_correction_unsupported(values) or why_gradients_unsupported(values)
    if refusal := limits or why_policy_unsupported(policy, survives_refit):
        raise UserError(refusal)
    megatron = at(values, "policy.megatron_cfg.enabled", False)  # a recipe for the other trainer keeps the block
    if megatron and (refusal := next(chain(why_layout_unsupported(values), why_batch_indivisible(values)), "")):
        raise UserError(refusal)
    if read_precision(policy).kv_fp8 and (refusal := next(why_kv_scales_unsupported(values), "")):
        raise UserError(f"{refusal}, {OR_PACKAGE_WORKERS}")


def why_correction_unsupported(values: Mapping[str, Any]) -> str:
    """Return why a loss that sees one microbatch at a time cannot apply the recipe's correction; empty if it can."""
    correction = at(values, "nemo_fp8rl.correction", None)
    if correction is None:
        return ""
    if not (key := read_block(correction, CorrectionConfig, "nemo_fp8rl.correction.").resolve().of_whole_batch):
        return ""
    return (
        f"nemo_fp8rl.correction.{key} needs the whole batch, and NeMo RL's workers give a loss one microbatch at a "
        "time: leave it out, or set nemo_fp8rl.workers=ours"
    )


def why_gradients_unsupported(values: Mapping[str, Any]) -> str:
    """Return why NeMo RL's own trainer cannot sum gradients as the recipe says; empty if it can."""
    if at(values, "nemo_fp8rl.grad_reduce", "auto") == "fp8":
        return (
            "nemo_fp8rl.grad_reduce=fp8: NeMo RL's own trainer sums gradients as Megatron does: set it to auto, "
            f"{OR_PACKAGE_WORKERS}"
        )
    if at(values, FLOAT32_SUM, False):  # (`MegatronDDPConfig` in NeMo RL's models/policy has no such key)
        return f"{FLOAT32_SUM}=true: NeMo RL does not tell its own trainer: set it to false, {OR_PACKAGE_WORKERS}"
    return ""


def why_policy_unsupported(policy: Mapping[str, Any], survives_refit: bool) -> str:
    """Return why NeMo RL cannot run the recipe's block `policy`; empty if it can.

    survives_refit: as `Checkout.engines_survive_fp8_refit`
    Raises: UserError if the precisions of trainer and engine do not agree
    """
    precision = read_precision(policy)
    if (window := at({"policy": policy}, KV_WINDOW, None)) is not None:
        return f"{KV_WINDOW}={window}: NeMo RL's own engines keep the whole cache: set it to null, {OR_PACKAGE_WORKERS}"
    if refusal := why_rank_indivisible(policy) or why_dtype_unsupported(policy):
        return refusal
    if precision.flow == "bf16":  # then any transport of NeMo RL's does
        return why_transport_unsupported(policy["generation"], only_ours=True)
    if precision.flow not in STOCK_FLOWS:
        return (
            f"{SPELLINGS[precision.flow.rpartition('_')[0]][2]}: with NeMo RL's own workers this package refits FP8 "
            "and bfloat16 alone, by its checkpoint engine as well: set nemo_fp8rl.workers=ours, or use NeMo RL's own "
            "launcher"
        )
    if precision.flow == "fp8_e2e" and has_adapters(policy):
        return (
            f"{PEFT}.enabled=true with FP8 in trainer and engine: NeMo RL's own trainer computes with its FP8 base and "
            "adapters beside it, and sends their bfloat16 sum, which FP8 rounds to other weights: set "
            "nemo_fp8rl.workers=ours, or policy.megatron_cfg.fp8_cfg.enabled=false"
        )
    if not survives_refit:
        return (
            "this NeMo RL processes an engine's weights once more after a refit, as v0.7.x does, and FP8 ones do not "
            f"survive that: use its main, {OR_PACKAGE_WORKERS}"
        )
    if precision.fp8_param and (words := policy["generation"]["vllm_cfg"].get(IGNORED)):
        return (
            f"{VLLM_CFG}.{IGNORED}={list(words)} are bfloat16 in the engine, and with policy.megatron_cfg.fp8_cfg."
            f"fp8_param=true NeMo RL's own trainer holds them in FP8 alone: leave either out, {OR_PACKAGE_WORKERS}"
        )
    if not policy["megatron_cfg"].get("enabled"):
        return "FP8 on the wire needs NeMo RL's Megatron worker: set policy.megatron_cfg.enabled=true"
    if (method := at(policy, "generation.vllm_kwargs.speculative_config.method", None)) in DRAFTERS:
        return (
            f"policy.generation.vllm_kwargs.speculative_config.method={method}: FP8 on the wire carries no drafter's "
            f"weights; leave speculative_config out, {OR_PACKAGE_WORKERS}"
        )
    if refusal := why_transport_unsupported(policy["generation"]):
        return refusal
    if at(policy, "draft.enabled", False):
        return (
            "policy.draft.enabled=true: FP8 on the wire carries no drafter's weights; set it to false, "
            f"{OR_PACKAGE_WORKERS}"
        )
    if at(policy, "generation.vllm_kwargs.kv_cache_dtype", None) is not None:
        return "policy.generation.vllm_kwargs.kv_cache_dtype: say it in policy.generation.vllm_cfg.kv_cache_dtype"
    return ""


def has_adapters(policy: Mapping[str, Any]) -> bool:
    """Return whether the block `policy` trains low-rank adapters with Megatron."""
    return bool(at(policy, "megatron_cfg.enabled", False) and at(policy, "megatron_cfg.peft.enabled", False))


def why_rank_indivisible(policy: Mapping[str, Any]) -> str:
    """Return why NeMo RL's trainer cannot split the adapters' matrix A over its ranks; empty if it can.

    It splits the rows of A (Megatron-Bridge, peft/utils.py); the package's trainer has A whole on every rank.
    """
    tensor, rank = (at(policy, f"megatron_cfg.{key}", None) for key in ("tensor_model_parallel_size", "peft.dim"))
    if not has_adapters(policy) or not tensor or not rank or rank % tensor == 0:
        return ""
    return (
        f"{PEFT}.dim={rank} does not divide over policy.megatron_cfg.tensor_model_parallel_size={tensor} in NeMo RL's "
        f"own trainer: set it to {-(-rank // tensor) * tensor}, {OR_PACKAGE_WORKERS}"
    )


def why_dtype_unsupported(policy: Mapping[str, Any]) -> str:
    """Return why NeMo RL's trainer cannot keep optimizer states in the recipe's dtypes; empty if it can.

    It hands YAML's text to Megatron's OptimizerConfig (nemo_rl/models/megatron/setup.py), which needs a torch.dtype.
    """
    optimizer = at(policy, "megatron_cfg.optimizer", None) or {}
    name = next((name for name in STATE_DTYPES if optimizer.get(name) is not None), "")
    if not name or not at(policy, "megatron_cfg.enabled", False):
        return ""
    return (
        f"policy.megatron_cfg.optimizer.{name}={optimizer[name]}: NeMo RL's own trainer takes no dtype from a recipe, "
        "and fails when it has loaded the model: leave it out, or set nemo_fp8rl.workers=ours"
    )


def why_transport_unsupported(generation: Mapping[str, Any], only_ours: bool = False) -> str:
    """Return why the transport of a refit that the block policy.generation names carries no FP8; empty if it does.

    only_ours: judge the checkpoint engine of this package alone, whatever the precision
    """
    if (transport := generation.get("refit_transport")) is None or (only_ours and transport != ENGINE):
        return ""
    if transport != ENGINE:
        return f"policy.generation.refit_transport={transport} does not carry FP8: set it to null, or to {ENGINE}"
    try:
        settings_of_recipe(generation)
    except UserError as error:
        return str(error)
    if is_colocated(generation):
        return (
            f"policy.generation.refit_transport={ENGINE}: NeMo RL has it for engines with GPUs of their own; set it to "
            "null, or policy.generation.colocated.enabled=false"
        )
    return ""


def why_kv_scales_unsupported(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each reason why NeMo RL would not calibrate the FP8 KV cache of its engines.

    NeMo RL refuses the first two reasons itself if its config names the cache, which it does not with our worker class.
    With the last reason it would validate with scales of 1.
    """
    subject = f"{KV_CACHE}=fp8 with NeMo RL's own workers"
    if is_asynchronous(values):
        yield f"{subject} is not calibrated by its asynchronous loop: set {KV_CACHE}=auto"
    elif at(values, "policy.generation.vllm_cfg.async_engine", False):
        yield f"{subject} has no asynchronous rollouts: set policy.generation.vllm_cfg.async_engine=false"
    key = "policy.megatron_cfg.pipeline_model_parallel_size"
    if (pipeline := at(values, key, 1)) > 1:
        yield f"{subject} is calibrated on one pipeline stage, got {pipeline}: set {key}=1"
    key = "grpo.val_at_start"
    if at(values, key, False):
        yield f"{subject} is calibrated after the first validation, {key}=true: set that to false"
