"""Plans from a few keys, without NeMo RL."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from nemo_fp8rl.commands.doctor.model_shapes import shape_of
from nemo_fp8rl.commands.doctor.recipe_plan import Plan

VALUES: dict[str, Any] = {
    "cluster": {"num_nodes": 1, "gpus_per_node": 8},
    "grpo": {"num_prompts_per_step": 32, "num_generations_per_prompt": 16},
    "loss_fn": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "tis",
        "truncated_importance_sampling_ratio": 2.0,
    },
    "nemo_fp8rl": {
        "workers": "auto",
        "align": "auto",
        "kv": "unified",
        "correction": None,
        "refit": {"mode": "auto", "bucket_bytes": 2**28},
    },
    "policy": {
        "train_global_batch_size": 512,
        "train_micro_batch_size": 1,
        "max_total_sequence_length": 4096,
        "make_sequence_length_divisible_by": 1,
        "sequence_packing": {"enabled": True, "train_mb_tokens": 4096},
        "dynamic_batching": {"enabled": False},
        "megatron_cfg": {
            "enabled": True,
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "context_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "expert_tensor_parallel_size": 1,
            "sequence_parallel": False,
            "activation_checkpointing": False,
            "fp8_cfg": {"enabled": True, "fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False},
            "env_vars": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0"},
            "optimizer": {"use_distributed_optimizer": True, "use_precision_aware_optimizer": False},
        },
        "generation": {
            "colocated": {"enabled": True},
            "vllm_kwargs": {},
            "vllm_cfg": {
                "precision": "fp8",
                "kv_cache_dtype": "auto",
                "tensor_parallel_size": 1,
                "gpu_memory_utilization": 0.6,
                "max_model_len": 4096,
                "use_deep_gemm": True,
                "pow2_weight_scaling_factors": True,
                "pow2_activation_scaling_factors": True,
            },
        },
    },
}
TRAINER, ENGINE = "policy.megatron_cfg.", "policy.generation.vllm_cfg."
MXFP8 = {TRAINER + "fp8_cfg.fp8_recipe": "mxfp8", ENGINE + "is_mx": True}
BF16 = {TRAINER + "fp8_cfg.enabled": False, ENGINE + "precision": "bfloat16"}
NVFP4 = BF16 | {
    TRAINER + "fp4_cfg": {"enabled": True},
    TRAINER + "te_precision_config_file": "attn_bf16_mlp_nvfp4.yaml",
    TRAINER + "env_vars": {"NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "0"},
    "policy.generation.nvfp4_pertoken_rollout": {"enabled": True},
}
A16 = BF16 | dict.fromkeys(("policy.quant_cfg", "policy.generation.quant_cfg"), "W4A16_NVFP4_CFG")
"""Changes that make the recipe one of another format."""


@pytest.fixture
def plan() -> Callable[..., Plan]:
    """plan("model", {"dotted.key": value}) -> the plan of a sound FP8 recipe with these changes."""

    def make(model: str = "meta-llama/Llama-3.1-8B", changes: dict[str, Any] | None = None) -> Plan:
        values = copy.deepcopy(VALUES)
        for key, value in (changes or {}).items():
            *path, last = key.split(".")
            block = values
            for part in path:
                block = block[part]
            block[last] = value
        return Plan(values, shape_of(model))

    return make
