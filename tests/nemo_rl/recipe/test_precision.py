"""One answer from NeMo RL's keys, and one sentence where trainer and engine would not agree."""

import copy

import pytest

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.fp8 import Fp8Layers
from nemo_fp8rl.nemo_rl.recipe.precision import TE_FILE, Precision, engine_fp8_layers, read_precision

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
        ({TRAINER + "fp8_recipe": "tensorwise"}, "fp8_cfg.fp8_recipe=tensorwise", "set it to blockwise or mxfp8"),
        ({"megatron_cfg.enabled": False}, "fp8_cfg.enabled=true", "policy.megatron_cfg.enabled=true"),
        ({VARIABLE: "1"}, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES='1'", "FP32_SCALES='0'"),
        ({VARIABLE: "true"}, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES='true'", "must be '0'"),
        ({**FP32, VARIABLE: "0"}, "pow2_weight_scaling_factors=false", "pow2_weight_scaling_factors=true"),
        ({ENGINE + "pow2_activation_scaling_factors": False}, "pow2_activation_scaling_factors=false", "both to true"),
        ({ENGINE + "is_mx": True}, "precision=fp8 and is_mx=true samples in MXFP8", "is_mx=false"),
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


MXFP8 = {TRAINER + "fp8_recipe": "mxfp8", ENGINE + "is_mx": True}
NO_POW2 = {ENGINE + "pow2_weight_scaling_factors": None, ENGINE + "pow2_activation_scaling_factors": None}
BF16 = {ENGINE + "precision": "bfloat16", TRAINER + "enabled": False}
FP4, NVTE = "megatron_cfg.fp4_cfg", "megatron_cfg.env_vars.NVTE_NVFP4_"
NVFP4 = BF16 | {
    FP4: {"enabled": True, "fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param": False},
    f"megatron_cfg.{TE_FILE}": "examples/configs/te_precision/attn_bf16_mlp_nvfp4.yaml",
    "megatron_cfg.first_last_layers_bf16": True,
    "megatron_cfg.num_layers_at_start_in_bf16": 2,
    "megatron_cfg.num_layers_at_end_in_bf16": 4,
    "generation.nvfp4_pertoken_rollout": {"enabled": True},
    NVTE + "DISABLE_2D_QUANTIZATION": "0",
}
BACKWARD = "megatron_cfg.env_vars.NVTE_BACKWARD_OVERRIDE"
SWITCHES = ("DISABLE_2D_QUANTIZATION", "ROW_SCALED_ACTIVATION", "DISABLE_RHT", "DISABLE_STOCHASTIC_ROUNDING")
NEMO_RLS = NVFP4 | NO_POW2 | {NVTE + name: "1" for name in SWITCHES} | {BACKWARD: "dequantized"}
"""NVFP4 from end to end as NeMo RL's own example has it."""
MLP_ONLY = "examples/modelopt/quant_configs/nvfp4_a16_mlp_only.yaml"
A16 = BF16 | {"quant_cfg": MLP_ONLY, "generation.quant_cfg": MLP_ONLY, "generation.real_quant": True}
IGNORED = [f"*.layers.{i}.mlp.experts*" for i in (0, 1, 44, 45, 46, 47)]


@pytest.mark.parametrize(
    ("changes", "precision"),
    [
        (MXFP8, Precision("mxfp8_e2e", "pow2", False)),
        (MXFP8 | NO_POW2 | {VARIABLE: "1"}, Precision("mxfp8_e2e", "pow2", False)),  # a variable of blockwise FP8
        (MXFP8 | NO_POW2 | {TRAINER + "enabled": False}, Precision("mxfp8_rollout", "pow2", False)),
        (MXFP8 | {ENGINE + "kv_cache_dtype": "fp8"}, Precision("mxfp8_e2e", "pow2", True)),
        (NVFP4, Precision("nvfp4_e2e", "pow2", False, weight_block="square")),
        (NEMO_RLS, Precision("nvfp4_e2e", "fp32", False, False, "line", "dequantized", False, False)),
        (
            NVFP4 | {NVTE + "DISABLE_RHT": "0"},
            Precision("nvfp4_e2e", "pow2", False, False, "square", None, True),
        ),
        (MXFP8 | {BACKWARD: "high_precision"}, Precision("mxfp8_e2e", "pow2", False, backward="high_precision")),
        ({BACKWARD: "dequantized"}, Precision("fp8_e2e", "pow2", False)),  # which layer_specs refuses
        (NVFP4 | NO_POW2 | {FP4: {"enabled": False}}, Precision("nvfp4_rollout", "fp32", False)),
        (A16, Precision("nvfp4_a16_e2e", "pow2", False)),
        (A16 | NO_POW2 | {"quant_cfg": None}, Precision("nvfp4_a16_rollout", "fp32", False)),
    ],
)
def test_flows_of_the_other_formats(changes, precision):
    read = read_precision(policy(**changes))
    assert read == precision
    assert read.format is not None and read.flow.startswith(read.format.name)
    assert read.complete({})["flow"] == read.flow


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        (MXFP8 | {ENGINE + "num_last_layers_in_bf16": 3, ENGINE + "quantization_ignored_layer_kws": ["o_proj"]},
         Fp8Layers(0, 45, ("o_proj",))),
        (NVFP4, Fp8Layers(2, 44, ("self_attn",))),
        (NVFP4 | {"generation.nvfp4_pertoken_rollout": {"enabled": True, "additional_ignore": IGNORED}},
         Fp8Layers(0, 48, ("self_attn", *(f"layers.{i}.mlp.experts" for i in (0, 1, 44, 45, 46, 47))))),
        (A16, Fp8Layers(0, 48, ("self_attn",))),
        (BF16, Fp8Layers.none()),
    ],
)  # fmt: skip
def test_the_linears_that_each_formats_keys_leave_in_bfloat16(changes, layers):
    assert engine_fp8_layers(policy(**changes), 48) == layers


def test_both_spellings_of_the_first_and_last_layers_name_the_same_experts():
    by_trainer = engine_fp8_layers(policy(**NVFP4), 48)
    listed = {"generation.nvfp4_pertoken_rollout": {"enabled": True, "additional_ignore": IGNORED}}
    names = [f"model.layers.{i}.mlp.experts.3.{part}_proj.weight" for i in range(48) for part in ("gate", "down")]
    by_list = engine_fp8_layers(policy(**(NVFP4 | listed)), 48)
    assert [by_trainer.quantizes(name) for name in names] == [by_list.quantizes(name) for name in names]


@pytest.mark.parametrize(
    ("changes", "key", "fix"),
    [
        # one side in another format, or the same format by another rule
        (MXFP8 | {ENGINE + "is_mx": False}, "fp8_recipe=mxfp8 trains in MXFP8", "precision=fp8 and is_mx=true"),
        (NVFP4 | {"generation.nvfp4_pertoken_rollout": None}, "fp4_cfg.enabled=true trains in NVFP4",
         "nvfp4_pertoken_rollout.enabled=true"),
        (NVFP4 | {ENGINE + "precision": "fp8", "generation.nvfp4_pertoken_rollout": None}, "samples in FP8",
         "fp4_cfg.enabled=false"),
        (A16 | {"generation.quant_cfg": None, "generation.real_quant": None}, "policy.quant_cfg trains",
         "set policy.generation.quant_cfg"),
        (NVFP4 | {NVTE + "DISABLE_2D_QUANTIZATION": None}, "DISABLE_2D_QUANTIZATION is not set", "set it to '1'"),
        (NEMO_RLS | {NVTE + "ROW_SCALED_ACTIVATION": "0"}, "ROW_SCALED_ACTIVATION is not '1'", "set it to '1'"),
        (NVFP4 | {ENGINE + "pow2_activation_scaling_factors": False}, "pow2_activation_scaling_factors=false",
         "both to true"),
        (NVFP4 | {NVTE + "4OVER6": "weights"}, "NVTE_NVFP4_4OVER6", "remove it"),
        (NVFP4 | {NVTE + "DISABLE_RHT": "yes"}, "DISABLE_RHT='yes'", "must be '0' or '1'"),
        (NVFP4 | {BACKWARD: "native"}, "NVTE_BACKWARD_OVERRIDE='native'", "must be dequantized"),
        (NVFP4 | {f"megatron_cfg.{TE_FILE}": None}, f"{TE_FILE}=None", "attn_bf16_mlp_nvfp4.yaml"),
        (NVFP4 | {"generation.nvfp4_pertoken_rollout": {"enabled": True, "additional_ignore": IGNORED[:-1]}},
         "additional_ignore leaves layers [0, 1, 44, 45, 46]", "remove additional_ignore"),
        (MXFP8 | {"megatron_cfg.first_last_layers_bf16": True}, "keeps 1 first and 1 last",
         "num_first_layers_in_bf16=1 and num_last_layers_in_bf16=1"),
        (A16 | {"generation.real_quant_ignore": ["lm_head"]}, "real_quant_ignore does not leave", "*self_attn*"),
        (A16 | {"generation.real_quant_ignore": ["*self_attn*", "*layers.3.mlp*"]}, "'*layers.3.mlp*'", "remove it"),
        # what is no format of this package
        (A16 | {"quant_cfg": "NVFP4_DEFAULT_CFG"}, "policy.quant_cfg=NVFP4_DEFAULT_CFG", "W4A16_NVFP4_CFG"),
        (NVFP4 | {FP4: {"enabled": True, "fp4_recipe": "custom"}}, "fp4_cfg.fp4_recipe=custom", "set it to nvfp4"),
        (NVFP4 | {FP4: {"enabled": True, "fp4_param": True}}, "fp4_cfg.fp4_param=True", "set it to false"),
        (MXFP8 | {TRAINER + "fp8_param": True}, "fp8_cfg.fp8_param=true with fp8_recipe=mxfp8", "set it to false"),
        (MXFP8 | {ENGINE + "pow2_weight_scaling_factors": False}, "pow2_weight_scaling_factors=false", "remove it"),
        (MXFP8 | {ENGINE + "precision": "bfloat16", TRAINER + "enabled": False}, "is_mx=true", "precision=fp8"),
        (NVFP4 | {TRAINER + "enabled": True}, "fp8_cfg.enabled=true and policy.megatron_cfg.fp4_cfg", "remove one"),
        (A16 | {ENGINE + "precision": "fp8"}, "two formats of the engine", "remove one"),
        (BF16 | {"generation.real_quant": True}, "real_quant=true", "needs policy.generation.quant_cfg"),
    ],
)  # fmt: skip
def test_a_half_of_a_format_is_refused_in_one_sentence(changes, key, fix):
    with pytest.raises(UserError) as caught:
        read_precision(policy(**changes))
    assert key in str(caught.value)
    assert fix in str(caught.value)
    assert "\n" not in str(caught.value)


def test_variables_of_the_backward_become_keys_of_the_package_and_leave_its_others():
    block = read_precision(policy(**NEMO_RLS)).complete({"align": "none", "fp4": {"estimator": "differentiable"}})
    fp4 = {"estimator": "differentiable", "hadamard": False, "stochastic_rounding": False}
    assert (block["align"], block["backward"], block["fp4"]) == ("none", "dequantized", fp4)
    assert read_precision(policy()).complete({"backward": "auto"})["backward"] == "auto"
