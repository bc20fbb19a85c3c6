"""One answer from NeMo RL's keys, and one sentence where trainer and engine would not agree."""

import copy

import pytest

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.nemo_rl.recipe.precision import Precision, read_precision

E2E = {
    "megatron_cfg": {
        "enabled": True,
        "fp8_cfg": {"enabled": True, "fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": False},
        "env_vars": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0"},
    },
    "generation": {
        "vllm_cfg": {
            "precision": "fp8",
            "kv_cache_dtype": "auto",
            "pow2_weight_scaling_factors": True,
            "pow2_activation_scaling_factors": True,
        }
    },
}
TRAINER, ENGINE = "megatron_cfg.fp8_cfg.", "generation.vllm_cfg."
VARIABLE = "megatron_cfg.env_vars.NVTE_FP8_BLOCK_SCALING_FP32_SCALES"


def policy(**changes: object) -> dict:
    """E2E with other values at dotted keys; None removes the key."""
    tree = copy.deepcopy(E2E)
    for key, value in changes.items():
        *path, last = key.split(".")
        block = tree
        for part in path:
            block = block[part]
        block.pop(last, None)
        if value is not None:
            block[last] = value
    return tree


FP32 = {VARIABLE: "1", ENGINE + "pow2_weight_scaling_factors": None, ENGINE + "pow2_activation_scaling_factors": None}


@pytest.mark.parametrize(
    ("changes", "precision"),
    [
        ({}, Precision("fp8_e2e", "pow2", False)),
        ({VARIABLE: None}, Precision("fp8_e2e", "pow2", False)),
        ({"megatron_cfg.env_vars": None}, Precision("fp8_e2e", "pow2", False)),
        (FP32, Precision("fp8_e2e", "fp32", False)),
        ({**FP32, VARIABLE: 1}, Precision("fp8_e2e", "fp32", False)),
        ({ENGINE + "kv_cache_dtype": "fp8"}, Precision("fp8_e2e", "pow2", True)),
        ({ENGINE + "kv_cache_dtype": "fp8_e4m3"}, Precision("fp8_e2e", "pow2", True)),
        ({TRAINER + "enabled": False}, Precision("fp8_rollout", "pow2", False)),
        ({**FP32, TRAINER + "enabled": False}, Precision("fp8_rollout", "fp32", False)),
        ({"megatron_cfg": None}, Precision("fp8_rollout", "pow2", False)),  # the DTensor trainer
        ({TRAINER + "enabled": False, ENGINE + "precision": "bfloat16"}, Precision("bf16", "pow2", False)),
        ({TRAINER + "enabled": False, TRAINER + "fp8": "hybrid"}, Precision("fp8_rollout", "pow2", False)),
        ({TRAINER + "fp8_param": True}, Precision("fp8_e2e", "pow2", False, fp8_param=True)),
        ({TRAINER + "enabled": False, TRAINER + "fp8_param": True}, Precision("fp8_rollout", "pow2", False)),
    ],
)
def test_flow_scales_and_cache(changes, precision):
    assert read_precision(policy(**changes)) == precision


def test_a_policy_that_says_nothing_is_bfloat16():
    assert read_precision({}) == Precision("bf16", "pow2", False)
    assert read_precision({"megatron_cfg": None, "generation": None}).flow == "bf16"


@pytest.mark.parametrize(
    ("changes", "key", "fix"),
    [
        ({ENGINE + "precision": "bfloat16"}, "policy.megatron_cfg.fp8_cfg.enabled=true", "precision=fp8"),
        ({TRAINER + "fp8": "hybrid"}, "fp8_cfg.fp8=hybrid", "set it to e4m3"),
        ({TRAINER + "fp8_recipe": "tensorwise"}, "fp8_cfg.fp8_recipe=tensorwise", "set it to blockwise"),
        ({"megatron_cfg.enabled": False}, "fp8_cfg.enabled=true", "policy.megatron_cfg.enabled=true"),
        ({VARIABLE: "1"}, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES='1'", "FP32_SCALES='0'"),
        ({VARIABLE: "true"}, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES='true'", "must be '0'"),
        ({**FP32, VARIABLE: "0"}, "pow2_weight_scaling_factors=false", "pow2_weight_scaling_factors=true"),
        ({ENGINE + "pow2_activation_scaling_factors": False}, "pow2_activation_scaling_factors=false", "both to true"),
        ({ENGINE + "is_mx": True}, "vllm_cfg.is_mx=true", "set it to false"),
        ({ENGINE + "kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype=fp8_e5m2", "set it to auto or fp8"),
        (
            {TRAINER + "enabled": False, ENGINE + "precision": "bfloat16", ENGINE + "kv_cache_dtype": "fp8"},
            "kv_cache_dtype=fp8",
            "precision=fp8",
        ),
        ({TRAINER + "enabled": False, ENGINE + "precision": "float16"}, "precision=float16", "precision=bfloat16"),
        ({ENGINE + "num_first_layers_in_bf16": -1}, "num_first_layers_in_bf16=-1", "0 or more"),
        ({ENGINE + "quantization_ignored_layer_kws": "o_proj"}, "quantization_ignored_layer_kws", "list of words"),
    ],
)
def test_a_disagreement_is_one_sentence_with_the_key_and_the_fix(changes, key, fix):
    with pytest.raises(UserError) as caught:
        read_precision(policy(**changes))
    assert key in str(caught.value)
    assert fix in str(caught.value)
    assert "\n" not in str(caught.value)
