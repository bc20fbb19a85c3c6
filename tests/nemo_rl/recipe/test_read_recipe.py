"""Recipes for NeMo RL, read without it: inheritance, secrets, and the block nemo_fp8rl."""

import subprocess
import sys
from pathlib import Path

import pytest

from nemo_fp8rl.cli import main
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.fp8rl_schema import Fp8RlConfig
from nemo_fp8rl.nemo_rl.recipe.read_recipe import load_recipe, read_recipe
from tests.nemo_rl.conftest import write
from tests.nemo_rl.recipe.conftest import CHILD

FP8 = (
    CHILD
    + """
policy:
  megatron_cfg: {fp8_cfg: {enabled: true}, env_vars: {NVTE_FP8_BLOCK_SCALING_FP32_SCALES: '0'}}
  generation:
    vllm_cfg: {precision: fp8, pow2_weight_scaling_factors: true, pow2_activation_scaling_factors: true}
"""
)


def test_a_child_differs_from_its_parent_in_what_it_says(recipe):
    values = recipe(CHILD + "policy: {train_micro_batch_size: 2}\n").values
    assert values["policy"]["train_mb_tokens"] == 1024
    assert values["policy"]["generation"]["vllm_cfg"]["precision"] == "bfloat16"
    assert values["grpo"]["num_generations_per_prompt"] == 16


def test_the_override_marker_replaces_a_block_instead_of_merging_it(recipe):
    assert recipe(CHILD + "env: {dapo: {num_workers: 1}}\n").values["env"].keys() == {"math", "dapo"}
    assert recipe(CHILD + "env: {_override_: true, dapo: {num_workers: 1}}\n").values["env"].keys() == {"dapo"}


@pytest.mark.parametrize(
    ("resolver", "value"), [("mul:6,4", 24), ("add:6,4", 10), ("div:6,4", 1.5), ("max:6,4", 6)], ids=str
)
def test_resolvers_of_nemo_rl(recipe, resolver, value):
    assert recipe(CHILD + f"grpo: {{seed: '${{{resolver}}}'}}\n").values["grpo"]["seed"] == value


@pytest.mark.parametrize(
    "override",
    [
        "+policy.megatron_cfg.env_vars.WANDB_API_KEY=s3cret",
        "++policy.generation.vllm_cfg.env_vars.HF_TOKEN=s3cret",
        "+env.my_environment={env_vars: {PROXY: 'http://u:s3cret@h'}}",
        "++logger.mlflow.tracking_uri=http://u:s3cret@h",
    ],
)
def test_a_secret_is_refused_and_not_shown(refusal, override):
    """A job's script holds its overrides, a manifest the recipe."""
    said = refusal(CHILD, override)
    assert "looks like a secret" in said or "holds a password" in said
    assert "in the environment" in said and "s3cret" not in said


@pytest.mark.parametrize(
    "text",
    [
        "cluster: ${nope}",
        "cluster: {gpus_per_node: '${nope}'}",
        "cluster: [1]",
        "policy: {_override_: '${nope}'}",
        "policy: [1]",
        f"policy: {'{a: ' * 3000}1{'}' * 3000}",
        "policy: &policy {generation: *policy}",
    ],
    ids=lambda text: text[:40],
)
def test_a_tree_that_cannot_be_read_or_merged_is_one_line(refusal, text):
    assert "recipe.yaml" in refusal(CHILD + text + "\n")


def test_our_block_takes_flow_and_scales_from_nemo_rls_keys(recipe):
    ours = recipe(FP8 + "nemo_fp8rl: {kv: rollout, gates: [{metric: kl, max: 1, action: warn}]}\n").fp8rl
    assert (ours.flow, ours.scale_format, ours.kv, ours.gates[0].metric) == ("fp8_e2e", "pow2", "rollout", "kl")
    assert recipe(CHILD).fp8rl == Fp8RlConfig(flow="bf16")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("{flow: fp8_e2e}", "nemo_fp8rl.flow follows from policy.megatron_cfg.fp8_cfg.enabled"),
        ("{scale_format: pow2}", "nemo_fp8rl.scale_format follows from"),
        ("{kv: both}", "nemo_fp8rl.kv='both'"),
        ("{refit: {bucket_bytes: many}}", "nemo_fp8rl.refit.bucket_bytes='many'"),
        ("{gates: [{metric: ess, max: 1, action: warn}]}", "nemo_fp8rl.gates[0].metric=ess"),
        ("{correction: {preset: best}}", "nemo_fp8rl.correction.preset='best'"),
        ("3", "nemo_fp8rl must be a block"),
    ],
)
def test_a_wrong_value_in_our_block_is_named(refusal, block, message):
    assert message in refusal(FP8 + f"nemo_fp8rl: {block}\n")


def test_load_refuses_disagreeing_precisions_and_read_does_not(checkout, tmp_path):
    path = write(tmp_path / "recipe.yaml", CHILD + "policy: {megatron_cfg: {fp8_cfg: {enabled: true}}}\n")
    assert read_recipe(path).values["policy"]["megatron_cfg"]["fp8_cfg"]["enabled"]
    with pytest.raises(UserError, match=r"policy.megatron_cfg.fp8_cfg.enabled=true"):
        load_recipe(path)


def test_a_path_to_data_needs_its_variable_only_where_data_is_read(checkout, tmp_path, monkeypatch):
    monkeypatch.delenv("SOME_DATA", raising=False)
    parts = "env: {math: {data_path: '${oc.env:SOME_DATA}/train.jsonl'}}\n"
    path = write(tmp_path / "recipe.yaml", CHILD + parts)
    with pytest.raises(UserError, match=r"env.math.data_path: the environment variable SOME_DATA is not set; set it"):
        read_recipe(path)
    assert read_recipe(path, needs_data=False).values["env"]["math"]["data_path"] == "$SOME_DATA/train.jsonl"
    monkeypatch.setenv("SOME_DATA", "/data")
    assert read_recipe(path, needs_data=False).values["env"]["math"]["data_path"] == "/data/train.jsonl"
    other = write(tmp_path / "other.yaml", CHILD + "policy: {model_name: '${oc.env:SOME_MODEL}'}\n")
    monkeypatch.delenv("SOME_MODEL", raising=False)
    with pytest.raises(UserError, match=r"policy.model_name: the environment variable SOME_MODEL is not set"):
        read_recipe(other, needs_data=False)


def test_a_null_in_an_arithmetic_expression_is_named(refusal):
    assert (
        "policy.train_mb_tokens: policy.train_micro_batch_size is null, and a number is made of it; set it"
    ) in refusal(CHILD, "policy.train_micro_batch_size=null")


def test_the_warm_up_takes_no_recipe_for_nemo_rl(checkout, tmp_path, monkeypatch, capsys):
    """Nor where its parent's checkout is not there."""
    arguments = ["sft", "--config", str(write(tmp_path / "r.yaml", CHILD)), "--output", str(tmp_path / "out")]
    assert main(arguments) == 2
    monkeypatch.delenv("NEMO_RL_SRC")
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("r.yaml is a recipe for NeMo RL, and sft takes those of") == 2


def test_a_recipe_of_our_own_loop_is_told_apart():
    with pytest.raises(UserError, match="recipes of `nemo-fp8rl train` are checked when that command runs"):
        read_recipe(Path(__file__).parents[3] / "conf/tiny_cpu.yaml")


def test_reading_needs_neither_torch_nor_nemo_rl():
    code = "import sys, nemo_fp8rl.nemo_rl.recipe.read_recipe; print(sorted({'torch', 'nemo_rl'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "rm", "ppo", "distillation"])
def test_a_recipe_for_another_algorithm_is_called_that(checkout, tmp_path, algorithm):
    text = f"cluster: {{gpus_per_node: 8, num_nodes: 1}}\n{algorithm}: {{max_num_epochs: 1}}\n"
    with pytest.raises(UserError, match=f"r.yaml is a recipe for NeMo RL's {algorithm.upper()}, and this package runs"):
        read_recipe(write(tmp_path / "r.yaml", text))


def test_the_block_of_weights_is_said_once_where_transformer_engine_has_a_variable_for_it(refusal, recipe):
    mxfp8 = (
        CHILD
        + """
policy:
  megatron_cfg: {fp8_cfg: {enabled: true, fp8_recipe: mxfp8}}
  generation: {vllm_cfg: {precision: fp8, is_mx: true}}
nemo_fp8rl: {weight_block: line}
"""
    )
    assert recipe(mxfp8).fp8rl.format.weight_block == (1, 32)
    nvfp4 = (
        CHILD
        + """
policy:
  megatron_cfg:
    {fp4_cfg: {enabled: true}, te_precision_config_file: attn_bf16_mlp_nvfp4.yaml,
    env_vars: {NVTE_NVFP4_DISABLE_2D_QUANTIZATION: '1', NVTE_NVFP4_ROW_SCALED_ACTIVATION: '1'}}
  generation: {nvfp4_pertoken_rollout: {enabled: true}}
"""
    )
    read = recipe(nvfp4).fp8rl
    assert (read.flow, read.scale_format, read.format.weight_block) == ("nvfp4_e2e", "fp32", (1, 16))
    said = refusal(nvfp4 + "nemo_fp8rl: {weight_block: square}\n")
    assert "nemo_fp8rl.weight_block follows from policy.megatron_cfg.env_vars.NVTE_NVFP4_DISABLE_2D" in said
    assert "remove it" in said


def test_the_backward_is_said_by_a_variable_or_by_our_key_and_not_by_both(refusal, recipe):
    mxfp8 = (
        CHILD
        + """
policy:
  megatron_cfg: {fp8_cfg: {enabled: true, fp8_recipe: mxfp8}, env_vars: {NVTE_BACKWARD_OVERRIDE: dequantized}}
  generation: {vllm_cfg: {precision: fp8, is_mx: true}}
"""
    )
    assert recipe(mxfp8).fp8rl.resolved_backward == "dequantized"
    said = refusal(mxfp8 + "nemo_fp8rl: {backward: high_precision}\n")
    assert "nemo_fp8rl.backward and policy.megatron_cfg.env_vars.NVTE_BACKWARD_OVERRIDE say the same" in said
