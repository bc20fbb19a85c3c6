"""Random combinations of options: each run works, and resumes to the same numbers."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_fp8rl.commands.tiny_model import make_tiny
from tests.conftest import BATCH_INVARIANT, RECIPES
from tests.test_train import results

TRAINER, ENGINE, PACKAGE = "policy.megatron_cfg.", "policy.generation.vllm_cfg.", "nemo_fp8rl."
RAY, TWO_RANKS = "cluster.backend=ray", "cluster.train_ranks=2"
LAYOUTS = {
    "in process": (),
    "actors": (RAY,),
    "data": (RAY, TWO_RANKS),
    "tensor": (RAY, TWO_RANKS, f"{TRAINER}tensor_model_parallel_size=2", f"{TRAINER}sequence_parallel=true"),
    "pipeline": (RAY, TWO_RANKS, f"{TRAINER}pipeline_model_parallel_size=2"),
    "context": (RAY, TWO_RANKS, f"{TRAINER}context_parallel_size=2"),
    "expert": (RAY, TWO_RANKS, f"{TRAINER}expert_model_parallel_size=2"),
    "engines": (RAY, "cluster.generation_engines=2", f"{PACKAGE}refit.transport=collective"),
    "tensor engine": (RAY, f"{ENGINE}tensor_parallel_size=2", f"{PACKAGE}refit.transport=shared_memory"),
}
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
FITTING_FAMILIES = {"expert": ("qwen3_moe",), "tensor": ("llama", "qwen3"), "tensor engine": ("llama", "qwen3")}
"""The tiny models that fit a layout, if not all of them fit."""
NONE: tuple[str, ...] = ()
OPTIONS: tuple[tuple[tuple[str, ...], ...], ...] = (
    ((f"{PACKAGE}flow=fp8_e2e",), (f"{PACKAGE}flow=fp8_rollout",), (f"{PACKAGE}flow=bf16",)),
    ((f"{PACKAGE}align=vllm",), (f"{PACKAGE}align=none",)),
    (NONE, (f"{PACKAGE}scale_format=fp32",)),
    (NONE, (f"{ENGINE}async_engine=true",)) if BATCH_INVARIANT else (NONE,),
    (NONE, (f"{ENGINE}kv_cache_dtype=fp8",), (f"{ENGINE}kv_cache_dtype=fp8", f"{PACKAGE}kv=rollout")),
    (NONE, (f"{ENGINE}sleep_level=1",), (f"{ENGINE}sleep_level=2", f"{TRAINER}offload_between_phases=true")),
    (NONE, (f"{TRAINER}activation_checkpointing=true",)),
    (
        NONE,
        ("policy.sequence_packing.enabled=true", "policy.sequence_packing.train_mb_tokens=100"),
        ("policy.dynamic_batching.enabled=true", "policy.dynamic_batching.sequence_length_round=7"),
    ),
    (("policy.logprob_batch_size=3",), ("policy.logprob_chunk_size=7",)),
    (("policy.train_global_batch_size=32",), ("policy.train_global_batch_size=16",)),
    (NONE, ("policy.generation.top_p=0.9",), ("policy.generation.top_k=5", "policy.generation.temperature=0.7")),
    (NONE, (f"{ENGINE}num_first_layers_in_bf16=1",), (f"{ENGINE}quantization_ignored_layer_kws=[o_proj]",)),
    ((f"{PACKAGE}refit.mode=full",), (f"{PACKAGE}refit.mode=delta",), (f"{PACKAGE}refit.mode=auto",)),
    ((f"{PACKAGE}refit.verify=digest",), (f"{PACKAGE}refit.verify=full",), (f"{PACKAGE}refit.verify=off",)),
    (NONE, (f"{PACKAGE}refit.bucket_bytes=70000",)),
    (NONE, ("policy.router_replay.enabled=true",), (f"{TRAINER}freeze_moe_router=true",)),
    (NONE, ("loss_fn.reference_policy_kl_penalty=0.01",)),
    (
        NONE,
        ("loss_fn.use_cispo=true",),
        ("loss_fn.sequence_level_importance_ratios=true", "loss_fn.token_level_loss=false"),
        ("grpo.overlong_filtering=true", "grpo.adv_estimator.name=reinforce_plus_plus"),
    ),
    ((f"{PACKAGE}correction.preset=tis",), (f"{PACKAGE}correction.preset=icepop",)),
)
"""The draw takes one alternative of each option."""
EXPERT_KEY = "router"
SMALL = (
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=8",
    "grpo.max_val_samples=8",
    "grpo.val_period=2",
    "policy.train_micro_batch_size=8",
    "checkpointing.save_period=2",
    f"{ENGINE}kv_cache_memory_gib=0.1",
)


def draw_options(layout: str) -> tuple[str, list[str]]:
    """Return (family, overrides), always the same for a layout."""
    generator = random.Random(layout)
    family = generator.choice(FITTING_FAMILIES.get(layout, FAMILIES))
    options = [key for alternatives in OPTIONS for key in generator.choice(alternatives)]
    if family != "qwen3_moe":
        options = [key for key in options if EXPERT_KEY not in key]
    return family, [*LAYOUTS[layout], *options]


def train(tiny: Path, overrides: list[str], run: Path, *more: str) -> "subprocess.CompletedProcess[str]":
    paths = (f"policy.model_name={tiny}/model", f"data.train.data_path={tiny}/data.jsonl", f"logger.log_dir={run}")
    command = [sys.executable, "-m", "nemo_fp8rl.cli", "train", "--config", str(RECIPES / "tiny_cpu.yaml")]
    return subprocess.run(
        [*command, *paths, *SMALL, *overrides, *more], capture_output=True, text=True, check=False, timeout=600
    )


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_random_recipe_resumes_to_the_same_numbers(tmp_path, layout):
    family, overrides = draw_options(layout)
    make_tiny(tmp_path / "tiny", "add", family=family)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    three = "grpo.max_num_steps=3"
    for run, *more in ((whole, three), (parts, "grpo.max_num_steps=2"), (parts, three, "--resume")):
        process = train(tmp_path / "tiny", overrides, run, *more)
        assert process.returncode == 0, f"{family} {overrides} {more}\n{process.stderr}"
    expected, resumed = ([row for row in results(run) if row["step"] == 3] for run in (whole, parts))
    assert resumed == expected
