"""Types and ranges of the keys that this package reads from a NeMo RL recipe; NeMo RL checks its other keys itself.
`normalize` then gives keys with several spellings of one value the spelling that the code reads.

A key without `| None` must have a value if its block is present, unless the block says `enabled: false`.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.typed_tree import to_block
from nemo_fp8rl.nemo_rl.recipe.keys import COPIED_KEYS, at


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("no_number", "Input should be a number")
    return value


Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, lt=2**31)]
Integer = Annotated[int, BeforeValidator(_no_bool)]
Ranks = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, le=10_000)]
Layers = Annotated[int, BeforeValidator(_no_bool), Field(ge=0, le=10_000)]
Share = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, le=1)]
Fraction = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, le=1)]
Bytes = Annotated[int, BeforeValidator(_no_bool), Field(ge=1, lt=2**63)]
Duration = Annotated[str, Field(pattern=r"^\d+:\d+:\d+:\d+$")]

TYPES: dict[str, Any] = {
    "cluster": dict,
    "cluster.num_nodes": Ranks,
    "cluster.gpus_per_node": Ranks,
    "grpo": dict,
    "grpo.num_prompts_per_step": Count,
    "grpo.num_generations_per_prompt": Count,
    "grpo.max_num_steps": Count,
    "grpo.max_num_epochs": Count,
    "grpo.val_num_generations_per_prompt": Count | None,
    "grpo.val_period": Integer | None,
    "grpo.val_batch_size": Count | None,
    "grpo.max_val_samples": Count | None,
    "grpo.async_grpo": dict | None,
    "grpo.async_grpo.enabled": bool | None,
    "loss_fn": dict,
    "data": dict,
    "data.default": dict | None,
    "logger": dict,
    "checkpointing": dict,
    "checkpointing.save_period": Count | None,
    "checkpointing.ft_save_period": Count | None,
    "checkpointing.checkpoint_must_save_by": Duration | None,
    "policy": dict,
    **{block: dict | None for block in COPIED_KEYS if "." in block},
    "policy.model_name": str | None,
    "policy.tokenizer": dict,
    "policy.generation": dict,
    "policy.train_global_batch_size": Count,
    "policy.train_micro_batch_size": Count,
    "policy.max_total_sequence_length": Count,
    "policy.logprob_chunk_size": Count | None,
    "policy.sequence_packing.enabled": bool | None,
    "policy.sequence_packing.train_mb_tokens": Count,
    "policy.dynamic_batching.enabled": bool | None,
    "policy.dynamic_batching.train_mb_tokens": Count,
    "policy.dynamic_batching.sequence_length_round": Count,
    "policy.megatron_cfg.enabled": bool | None,
    "policy.megatron_cfg.tensor_model_parallel_size": Ranks,
    "policy.megatron_cfg.pipeline_model_parallel_size": Ranks,
    "policy.megatron_cfg.context_parallel_size": Ranks | None,
    "policy.megatron_cfg.expert_model_parallel_size": Ranks | None,
    "policy.megatron_cfg.expert_tensor_parallel_size": Ranks | None,
    "policy.megatron_cfg.num_layers_in_first_pipeline_stage": Layers | None,
    "policy.megatron_cfg.num_layers_in_last_pipeline_stage": Layers | None,
    "policy.megatron_cfg.sequence_parallel": bool | None,
    "policy.megatron_cfg.activation_checkpointing": bool | None,
    "policy.megatron_cfg.use_fused_linear_logprobs": bool | None,
    "policy.megatron_cfg.fused_linear_logprobs_chunk_size": Count | None,
    "policy.megatron_cfg.env_vars": dict | None,
    "policy.generation.vllm_cfg.env_vars": dict | None,
    "policy.megatron_cfg.fp8_cfg": dict | None,
    "policy.megatron_cfg.fp8_cfg.enabled": bool | None,
    "policy.megatron_cfg.distributed_data_parallel_config": dict | None,
    "policy.megatron_cfg.optimizer": dict,
    "policy.megatron_cfg.optimizer.optimizer_cpu_offload": bool | None,
    "policy.megatron_cfg.optimizer.optimizer_offload_fraction": Fraction | None,
    "policy.megatron_cfg.scheduler": dict,
    "policy.generation.stop_token_ids": list[int] | None,
    "policy.generation.stop_strings": list[str] | None,
    "policy.generation.colocated": dict | None,
    "policy.generation.colocated.enabled": bool | None,
    "policy.generation.colocated.resources": dict | None,
    "policy.generation.colocated.resources.num_nodes": Ranks | None,
    "policy.generation.colocated.resources.gpus_per_node": Ranks | None,
    "policy.generation.vllm_cfg": dict | None,
    "policy.generation.vllm_cfg.tensor_parallel_size": Ranks,
    "policy.generation.vllm_cfg.pipeline_parallel_size": Ranks | None,
    "policy.generation.vllm_cfg.expert_parallel_size": Ranks | None,
    "policy.generation.vllm_cfg.gpu_memory_utilization": Share,
    "policy.generation.vllm_cfg.max_model_len": Count | None,
    "policy.generation.vllm_cfg.async_engine": bool | None,
    "policy.generation.vllm_cfg.num_first_layers_in_bf16": Layers | None,
    "policy.generation.vllm_cfg.num_last_layers_in_bf16": Layers | None,
    "policy.generation.vllm_cfg.quantization_ignored_layer_kws": list[str] | None,
    "policy.generation.vllm_kwargs": dict | None,
    "policy.generation.vllm_kwargs.kv_cache_memory_bytes": Bytes | None,
    "policy.generation.vllm_kwargs.attention_backend": str | None,
    "policy.generation.vllm_kwargs.max_num_seqs": Count | None,
    "policy.generation.vllm_kwargs.max_num_batched_tokens": Count | None,
    "policy.make_sequence_length_divisible_by": Count | None,  # mostly computed from other keys
}


TOP_K_KEYS = ("policy.generation.top_k", "policy.generation.val_top_k")
"""-1 stands for all tokens, as in vLLM."""


def check_values(values: dict[str, Any]) -> None:
    """Convert the values in place; a number in quotes becomes a number.

    Raises: UserError, with the key, for the first value of another type
    """
    for key, hint in TYPES.items():
        path, _, name = key.rpartition(".")
        block = at(values, path, None) if path else values
        if not isinstance(block, dict):
            continue
        if block.get(name) is not None:
            block[name] = to_block(block[name], hint, f"{key}.")
        elif type(None) not in getattr(hint, "__args__", ()) and block.get("enabled") is not False:
            require(values, key)


def normalize(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's values with one spelling of what NeMo RL takes for the same.

    data.max_input_seq_length may be null by NeMo RL's config classes, but its data sets compare with it; the engine's
    longest sequence then limits prompts.
    """
    changed = dict(values)
    for key in TOP_K_KEYS:
        if at(values, key, None) == -1:
            changed = _replace(changed, key, None)
    period = at(values, "grpo.val_period", None)
    if isinstance(period, int) and period < 0:  # NeMo RL validates where it is above 0
        changed = _replace(changed, "grpo.val_period", 0)
    if at(values, "data.max_input_seq_length", 0) is None:
        longest = at(values, "policy.generation.vllm_cfg.max_model_len", None)
        longest = longest or at(values, "policy.max_total_sequence_length", None)
        changed = _replace(changed, "data.max_input_seq_length", longest)
    return changed


def _replace(values: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return a copy of the tree with this value at a dotted key; blocks on the way to it are copied, too."""
    name, _, rest = key.partition(".")
    return {**values, name: _replace(values[name], rest, value) if rest else value}


def require(values: Mapping[str, Any], key: str) -> None:
    """Raise UserError if the dotted key is missing or null."""
    if at(values, key, None) is None:
        raise UserError(f"{key} is missing or null; set it in the recipe")
