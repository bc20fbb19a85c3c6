"""The loop on an engine of the methods for GPUs: deltas, an FP8 KV cache, routing replay, sleep."""

import json

import pytest

from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.train import train
from tests.conftest import RECIPES

VLLM = "policy.generation.vllm_cfg"
TINY = (
    "nemo_fp8rl.flow=fp8_e2e",
    "nemo_fp8rl.refit.mode=delta",
    "grpo.max_num_steps=2",
    "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_val_samples=4",
    "policy.train_global_batch_size=8",
    "policy.train_micro_batch_size=8",
    "logger.tensorboard_enabled=false",
)
CASES = {
    "qwen3": (f"{VLLM}.kv_cache_dtype=fp8",),  # attention is the CPU's
    "qwen3_moe": ("policy.router_replay.enabled=true", f"{VLLM}.sleep_level=1"),
}


LONG = {"qwen3_moe"}


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[pytest.mark.long] * (family in LONG)) for family in CASES]
)
def test_it_trains_on_what_the_engine_samples(family, tmp_path):
    make_tiny(tmp_path / "tiny", "add", 0, family)
    paths = (
        f"policy.model_name={tmp_path}/tiny/model",
        f"data.train.data_path={tmp_path}/tiny/data.jsonl",
        f"logger.log_dir={tmp_path}/run",
        f"checkpointing.checkpoint_dir={tmp_path}/checkpoints",
    )
    assert train(load(RECIPES / "tiny_cpu.yaml", [*TINY, *paths, *CASES[family]]))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/token_mult_prob_error" in line]
    assert [step["refit/delta"] for step in steps] == [1.0, 1.0]
    assert all(step["train/token_mult_prob_error"] < 1.001 for step in steps)
    choices = json.loads((tmp_path / "run" / "environment.json").read_text())["choices"]
    assert "TritonFp8BlockScaledMMKernel" in choices["engine_kernels"]
    assert choices["trainer_kernels"] == "fp8.linear (emulated)"
    assert choices["quantizer"].startswith("cpu (numba")
