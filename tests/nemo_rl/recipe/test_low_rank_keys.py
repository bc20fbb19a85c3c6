"""NeMo RL's keys of low-rank adapters, policy.megatron_cfg.peft, for both kinds of workers."""

import pytest

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.hf.adapters import read_adapters
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.nemo_rl.recipe.config_from_recipe import convert_recipe
from nemo_fp8rl.nemo_rl.recipe.keys import describe_ignored_values
from nemo_fp8rl.nemo_rl.stock.stock_limits import why_policy_unsupported
from tests.nemo_rl.recipe.test_config_from_recipe import BF16, master

EXAMPLE = {
    "enabled": True, "target_modules": [], "exclude_modules": [], "dim": 16, "alpha": 64, "dropout": 0.0,
    "dropout_position": "post", "lora_A_init_method": "xavier", "lora_B_init_method": "zero",
    "a2a_experimental": False, "lora_dtype": "None",
}  # fmt: skip
"""The block as examples/configs/grpo_math_1B.yaml of NeMo RL spells it, enabled."""
ALL = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


def with_adapters(tiny, changes=None, **others):
    return master(tiny, policy__megatron_cfg__peft=EXAMPLE | (changes or {}), **others)


def test_the_block_reaches_the_trainer_as_it_stands(tiny):
    cfg = convert_recipe(with_adapters(tiny))
    peft = cfg.policy.megatron_cfg.peft
    assert (peft.enabled, peft.dim, peft.alpha, peft.dropout_position) == (True, 16, 64, "post")
    adapters = read_adapters(read_hf_config(cfg.policy.model_name), peft)
    assert adapters.scale == 4 and adapters.adapts("model.layers.0.mlp.down_proj")
    fewer = convert_recipe(with_adapters(tiny, {"target_modules": ["linear_qkv"], "exclude_modules": None}))
    adapters = read_adapters(read_hf_config(cfg.policy.model_name), fewer.policy.megatron_cfg.peft)
    assert adapters.adapts("model.layers.0.self_attn.q_proj") and not adapters.adapts("model.layers.0.mlp.down_proj")


def test_a_block_that_is_off_says_nothing(tiny):
    off = with_adapters(tiny, {"enabled": False, "dim": None, "lora_dtype": "float16"})
    assert not convert_recipe(off).policy.megatron_cfg.peft.enabled
    assert list(describe_ignored_values(off)) == []


@pytest.mark.parametrize("dtype", [None, "None", "bfloat16", "torch.bfloat16"])
def test_adapters_of_the_policys_dtype(tiny, dtype):
    assert convert_recipe(with_adapters(tiny, {"lora_dtype": dtype})).policy.megatron_cfg.peft.enabled


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_dtype": "float32"}, r"lora_dtype='float32': .* policy\.precision=bfloat16, .*; set it to null"),
        ({"dim": None}, r"peft\.dim is missing or null, and policy\.megatron_cfg\.peft\.enabled=true: set a number"),
        ({"alpha": None}, r"peft\.alpha is missing or null"),
        ({"dropout_position": "before"}, r"peft\.dropout_position"),
        ({"use_dora": True}, r"policy\.megatron_cfg\.peft\.use_dora=True is not a key"),
    ],
)
def test_what_we_cannot_do_is_refused_by_its_key(tiny, changes, message):
    with pytest.raises(UserError, match=message):
        convert_recipe(with_adapters(tiny, changes))


def test_what_nemo_rls_own_workers_do_otherwise_is_said_once(tiny):
    (sentence,) = describe_ignored_values(with_adapters(tiny))
    assert "target_modules is empty: NeMo RL's own trainer then adapts the output layer and no grouped" in sentence
    assert sentence.endswith(f"target_modules=[{', '.join(ALL)}] is the same for both")
    (sentence,) = describe_ignored_values(with_adapters(tiny, {"target_modules": ALL, "a2a_experimental": True}))
    assert sentence.startswith("policy.megatron_cfg.peft.a2a_experimental=True has an effect only on NeMo RL's own")
    assert list(describe_ignored_values(with_adapters(tiny, {"target_modules": ALL}))) == []


def test_nemo_rls_own_workers_are_refused_where_they_round_other_weights(tiny):
    """With FP8 on both sides: their engine has quantize(W + BA), their trainer quantize(W) and BA beside it."""
    refusal = why_policy_unsupported(with_adapters(tiny)["policy"], survives_refit=True)
    assert refusal.startswith("policy.megatron_cfg.peft.enabled=true with FP8 in trainer and engine")
    assert "set nemo_fp8rl.workers=ours" in refusal
    rollout = with_adapters(tiny, policy__megatron_cfg__fp8_cfg={"enabled": False})["policy"]
    for policy in (with_adapters(tiny, **BF16)["policy"], rollout, with_adapters(tiny, {"enabled": False})["policy"]):
        assert why_policy_unsupported(policy, survives_refit=True) == ""


def test_a_rank_that_nemo_rls_own_trainer_cannot_split_is_refused(tiny):
    wide = with_adapters(tiny, {"dim": 6}, policy__megatron_cfg__tensor_model_parallel_size=4, **BF16)["policy"]
    assert why_policy_unsupported(wide, survives_refit=True) == (
        "policy.megatron_cfg.peft.dim=6 does not divide over policy.megatron_cfg.tensor_model_parallel_size=4 in NeMo "
        "RL's own trainer: set it to 8, or nemo_fp8rl.workers=ours"
    )
    wide["megatron_cfg"]["peft"]["dim"] = 8
    assert why_policy_unsupported(wide, survives_refit=True) == ""
