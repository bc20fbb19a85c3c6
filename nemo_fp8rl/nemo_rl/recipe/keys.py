"""Meaning of NeMo RL's keys for this package's trainer and engines.

    COPIED_KEYS      keys of the same name and meaning
    REQUIRED_VALUES  keys of which one value is supported, and the reason
    READ_PREFIXES    keys that are converted to keys of another name
    UNUSED_PREFIXES  keys of speed, of memory, or of code that is not run: no value of theirs changes a number
    IGNORED_VALUES   unused keys whose value is reported if the package behaves otherwise
    MODEL_PREFIXES   keys that would change the model

Any other key under `policy` that has a value is refused, because it might change a number.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.field_rules import NEMO_RL, NemoRl, all_fields
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.config.typed_tree import short_repr


def _keys_of_same_name() -> dict[str, tuple[str, ...]]:
    names: dict[str, list[str]] = {}
    for field in all_fields(Config):
        if field.marker(NemoRl) == NEMO_RL:
            names.setdefault(field.key.rpartition(".")[0], []).append(field.name)
    return {block: tuple(keys) for block, keys in names.items()}


COPIED_KEYS = _keys_of_same_name()
"""Block -> its keys that carry `NEMO_RL` at the field."""
MOVED_KEYS = {
    field.key: marker.spelling
    for field in all_fields(Config)
    if (marker := field.marker(NemoRl)) and marker.spelling.rpartition(".")[2] == field.name
}
"""Key of `Config` -> NeMo RL's key of the same name and meaning in another block."""
REQUIRED_VALUES = {
    "policy.megatron_cfg.enabled": (True, "the trainer is Megatron Core"),
    "policy.dtensor_cfg.enabled": (False, "the trainer is Megatron Core"),
    "policy.megatron_cfg.mtp_num_layers": (0, "the trainer has no multi-token prediction"),
    "policy.megatron_cfg.moe_router_bias_update_rate": (0.0, "the trainer's routers have no bias of load balancing"),
    "policy.megatron_cfg.moe_router_load_balancing_type": ("none", "the trainer adds no load-balancing loss"),
    "policy.megatron_cfg.optimizer.params_dtype": ("float32", "the optimizer keeps its weights in float32"),
    "policy.megatron_cfg.scheduler.weight_decay_incr_style": ("constant", "the weight decay is constant"),
    "policy.draft.enabled": (False, "there is no draft model"),
    "policy.generation.backend": ("vllm", "the engine is vLLM"),
    "policy.generation.vllm_cfg.pipeline_parallel_size": (1, "an engine is not cut into stages"),
    "policy.generation.vllm_cfg.logprobs_mode": (
        "processed_logprobs",
        "log-probs are of the distribution sampled from",
    ),
    "checkpointing.pretrained_checkpoint": (None, "weights come from policy.model_name"),
    "checkpointing.save_optimizer": (True, "a run resumes from its optimizer's state, too"),
}
KV_WINDOW = "policy.generation.vllm_cfg.kv_window"
"""A key of the package's engines, which NeMo RL does not have."""
PEFT = "policy.megatron_cfg.peft"
LORA_DTYPE = f"{PEFT}.lora_dtype"
ALL_LINEARS = "[linear_qkv, linear_proj, linear_fc1, linear_fc2]"
VALUES_IF_ABSENT = {"policy.megatron_cfg.enabled": False}
"""NeMo RL's default of a required key, if it differs from the required value."""
READ_PREFIXES = (
    *("policy.logprob_chunk_size", "policy.generation.colocated.", "policy.generation.stop_"),
    *("policy.generation.vllm_cfg.expert_parallel_size", "policy.generation.vllm_kwargs.kv_cache_memory_bytes"),
    *MOVED_KEYS.values(),
    *("policy.megatron_cfg.scheduler.start_weight_decay", "policy.megatron_cfg.scheduler.end_weight_decay"),
    *("policy.megatron_cfg.fp8_cfg.", "policy.megatron_cfg.fp4_cfg.", "policy.megatron_cfg.te_precision_config_file"),
    *("policy.megatron_cfg.first_last_layers_bf16", "policy.megatron_cfg.num_layers_at_"),
    *("policy.quant_cfg", "policy.generation.quant_cfg", "policy.generation.nvfp4_pertoken_rollout."),
    *("policy.generation.real_quant", "policy.generation.vllm_cfg.is_mx"),
    *("policy.megatron_cfg.env_vars.", "policy.generation.vllm_cfg.env_vars."),
    *("policy.generation.vllm_cfg.precision", "policy.generation.val_"),
    *("policy.generation.vllm_cfg.kv_cache_dtype", KV_WINDOW, "policy.generation.vllm_cfg.pow2_"),
    *("policy.megatron_cfg.train_iters", LORA_DTYPE, "policy.megatron_cfg.optimizer.fp16"),
)
UNUSED_PREFIXES = (
    *("policy.dtensor_cfg.", "policy.optimizer", "policy.scheduler", "policy.draft.", "policy.generation_batch_size"),
    "policy.max_grad_norm",  # for NeMo RL's other trainers; Megatron's key is megatron_cfg.optimizer.clip_grad
    *("policy.make_sequence_length_divisible_by", "policy.offload_optimizer_for_logprob"),
    *("policy.refit_buffer_size_gb", "policy.sequence_packing.", "policy.tokenizer.use_fastokens"),
    "policy.tokenizer.chat_template",  # the prompts come from NeMo RL's loop
    *("policy.megatron_cfg.apply_rope_fusion", "policy.megatron_cfg.attention_backend"),
    *("policy.megatron_cfg.bias_activation_fusion", "policy.megatron_cfg.checkpoint."),
    *("policy.megatron_cfg.converter_type", "policy.megatron_cfg.cuda_graph_", "policy.megatron_cfg.defer_fp32_logits"),
    *(
        f"policy.megatron_cfg.distributed_data_parallel_config.{name}"
        for name in ("overlap_", "use_custom_fsdp", "data_parallel_sharding_strategy", "average_in_collective")
    ),
    *("policy.megatron_cfg.empty_unused_memory_level", "policy.megatron_cfg.fine_grained_activation_offloading"),
    *("policy.megatron_cfg.force_overwrite_initial_ckpt", "policy.megatron_cfg.force_reconvert_from_hf"),
    *("policy.megatron_cfg.fused_linear_logprobs_chunk_size", "policy.megatron_cfg.gradient_accumulation_fusion"),
    *("policy.megatron_cfg.moe_enable_deepep", "policy.megatron_cfg.moe_flex_dispatcher_backend"),
    "policy.megatron_cfg.moe_hybridep_num_sms",
    "policy.megatron_cfg.moe_per_layer_logging",
    "policy.megatron_cfg.moe_grouped_gemm",  # one matmul for all experts or one per expert: the same FP8 blocks
    *("policy.megatron_cfg.moe_permute_fusion", "policy.megatron_cfg.moe_shared_expert_overlap"),
    "policy.megatron_cfg.moe_router_dtype",  # nemo_fp8rl.align decides where the router rounds
    *(
        "policy.megatron_cfg.moe_token_dispatcher_type",
        "policy.megatron_cfg.mtp_",
        "policy.megatron_cfg.offload_modules",
    ),
    *(f"policy.megatron_cfg.optimizer.{name}" for name in ("bf16", "sgd_momentum", "use_distributed_optimizer")),
    *("policy.megatron_cfg.optimizer.optimizer_", "policy.megatron_cfg.optimizer.overlap_cpu_"),
    "policy.megatron_cfg.peft.a2a_experimental",  # how ranks exchange the values of an adapter
    *("policy.megatron_cfg.pipeline_dtype", "policy.megatron_cfg.recompute_"),
    *("policy.megatron_cfg.use_fused_linear_logprobs", "policy.megatron_cfg.use_gloo_process_groups"),
    *("policy.generation._", "policy.generation.mcore_generation_config.", "policy.generation.port_range_"),
    "policy.generation.refit_",
    *("policy.quant_", "policy.disable_modelopt_layer_spec"),  # ModelOpt's calibration; 4-bit weights alone need none
    *("policy.generation.vllm_cfg.enable_", "policy.generation.vllm_cfg.http_"),
    *("policy.generation.vllm_cfg.load_format", "policy.generation.vllm_cfg.reset_"),
    "policy.generation.vllm_cfg.use_deep_gemm",
    *("policy.generation.vllm_cfg.use_tqdm", "policy.generation.vllm_cfg.vllm_", "policy.generation.vllm_cfg.zmq_"),
    *("policy.generation.vllm_kwargs.enable_chunked_prefill", "policy.generation.vllm_kwargs.moe_backend"),
)
IGNORED_VALUES = {
    "policy.megatron_cfg.optimizer.optimizer_cpu_offload": (False, "the optimizer stays on the GPU while it trains"),
    "policy.megatron_cfg.fine_grained_activation_offloading": (False, "activations stay on the GPU"),
    "policy.megatron_cfg.peft.a2a_experimental": (False, "matrix A is whole on every rank"),
    "policy.generation.vllm_cfg.enable_prefix_caching": (True, "engines cache prefixes where vLLM can"),
    "checkpointing.is_async": (False, "a checkpoint is complete before training continues"),
    "checkpointing.model_save_format": ("safetensors", "weights are saved as safetensors"),
}
"""Key of memory, speed or files -> (the value that the package follows, what it does)."""
MODEL_PREFIXES = ("policy.hf_config_overrides.", "policy.megatron_cfg.model_overrides.")
"""Other names for keys of the model's config.json, which is read unchanged: any value of theirs is refused."""


def check_keys(master: Mapping[str, Any]) -> None:
    """Raise UserError, with the key, for a value that trainer or engines do not support."""
    for key, (required, why) in REQUIRED_VALUES.items():
        value = at(master, key, VALUES_IF_ABSENT.get(key, required))
        if value != required and (required or value is not None):  # null equals a required false or 0
            fix = required if isinstance(required, str) else json.dumps(required)
            raise UserError(f"{key}={value}: {why}; set it to {fix}")
    _check_adapters(master)
    if refusal := why_dtype_unclear(master["policy"]):
        raise UserError(refusal)
    known = {f"{block}.{name}" for block, names in COPIED_KEYS.items() for name in names} | REQUIRED_VALUES.keys()
    for key, value in _leaves(master["policy"], "policy."):
        is_set = value not in (None, {}) if key.startswith(MODEL_PREFIXES) else bool(value)
        if is_set and key not in known and not key.startswith((*READ_PREFIXES, *UNUSED_PREFIXES)):
            raise UserError(
                f"{key}={short_repr(value)} is not a key that this trainer or engine knows: remove it, or set it to "
                "null"
            )


def why_dtype_unclear(policy: Mapping[str, Any]) -> str:
    """Return a sentence about a key of a block `policy` that leaves float16 on one side, or without a loss scale.

    It is empty where there is no such key.

    NeMo RL gives its model the dtype of policy.precision, and Megatron's optimizer, which scales the loss, the keys of
    the recipe (nemo_rl/models/megatron/setup.py); its engine takes vllm_cfg.precision, in which auto is the
    checkpoint's dtype.
    """
    precision = policy.get("precision") or "bfloat16"
    optimizer, in_half = at(policy, "megatron_cfg.optimizer", None) or {}, precision == "float16"
    key, engine = "policy.megatron_cfg.optimizer", "policy.generation.vllm_cfg.precision"
    if not in_half:
        if optimizer.get("fp16"):
            return f"{key}.fp16=true with policy.precision={precision}: the trainer has no float16; set it to false"
        return ""
    if not optimizer.get("fp16") or optimizer.get("bf16"):
        return (
            f"policy.precision=float16 with {key}.fp16={str(bool(optimizer.get('fp16'))).lower()} and bf16="
            f"{str(bool(optimizer.get('bf16'))).lower()}: NeMo RL's trainer then scales no loss, and small gradients "
            f"become 0; set {key}.fp16=true and {key}.bf16=false"
        )
    if (at(policy, "generation.vllm_cfg.precision", None) or "auto") == "auto":
        return (
            f"policy.precision=float16 with {engine}=auto: NeMo RL's engine then samples in the checkpoint's dtype; "
            f"set {engine}=float16"
        )
    return ""


def _check_adapters(master: Mapping[str, Any]) -> None:
    """Raise UserError, with the key, for low-rank adapters that NeMo RL refuses, or of another dtype than here."""
    peft = at(master, PEFT, None) or {}
    if not peft.get("enabled"):
        return
    for name in ("dim", "alpha"):
        if peft.get(name) is None:
            raise UserError(f"{PEFT}.{name} is missing or null, and {PEFT}.enabled=true: set a number")
    dtype, precision = peft.get("lora_dtype"), at(master, "policy.precision", "bfloat16")
    if str(dtype).removeprefix("torch.") not in ("None", precision):
        raise UserError(
            f"{LORA_DTYPE}={short_repr(dtype)}: adapters have the dtype of policy.precision={precision}, and the "
            "optimizer keeps them in float32; set it to null"
        )


def describe_ignored_values(master: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each key whose value the package's trainer and engines ignore."""
    for key, (followed, instead) in IGNORED_VALUES.items():
        if (value := at(master, key, None)) not in (None, followed):
            yield f"{key}={short_repr(value)} has an effect only on NeMo RL's own workers; {instead}"
    peft = at(master, PEFT, None) or {}
    if peft.get("enabled") and not peft.get("target_modules"):
        yield (
            f"{PEFT}.target_modules is empty: NeMo RL's own trainer then adapts the output layer and no grouped "
            f"experts, this package's every linear of the layers, experts too; {PEFT}.target_modules={ALL_LINEARS} is "
            "the same for both"
        )


def at(tree: Mapping[str, Any], key: str, default: Any) -> Any:
    """Return the value of a dotted key, or the default if a part of the key is missing."""
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return default
        tree = tree[part]
    return tree


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
