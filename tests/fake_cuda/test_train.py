"""A whole run with the trainer on the fake device; the engine is vLLM on this CPU, in a separate process."""

import json
import os
from pathlib import Path

import pytest

from nemo_fp8rl.assemble import backends, build_bridge
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.train import train
from tests.conftest import RECIPES, needs_vllms_fp8_cache
from tests.fake_cuda.rank import FAKE
from tests.generation.pair import GREEDY
from tests.generation.test_faults import core_process

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(FAKE not in os.environ, reason="make test-fake-gpu")]

ENGINE, TRAINER = "policy.generation.vllm_cfg", "policy.megatron_cfg"
TINY = (
    f"{ENGINE}.async_engine=true",
    f"{ENGINE}.enforce_eager=true",
    "nemo_fp8rl.refit.transport=shared_memory",  # the engine maps no GPU's memory
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_val_samples=4",
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=8",
    "checkpointing.save_period=2",
    "logger.tensorboard_enabled=false",
)
CASES = {
    "qwen3": (f"{ENGINE}.kv_cache_dtype=fp8", "nemo_fp8rl.refit.verify=full"),
    "qwen2": (
        "nemo_fp8rl.fp8_param=true",
        "nemo_fp8rl.refit.mode=delta",
        "policy.sequence_packing.enabled=true",
        "policy.sequence_packing.train_mb_tokens=100",
        "loss_fn.reference_policy_kl_penalty=0.01",
    ),
    "llama": (
        "nemo_fp8rl.flow=fp8_rollout",
        f"{TRAINER}.offload_between_phases=true",
        f"{TRAINER}.activation_checkpointing=true",
        "policy.generation.top_p=0.9",
    ),
    "qwen3_moe": (
        f"{ENGINE}.num_first_layers_in_bf16=1",
        "policy.dynamic_batching.enabled=true",
        "policy.dynamic_batching.sequence_length_round=7",
    ),
}


def without_clock(row: dict) -> dict:
    return {key: value for key, value in row.items() if key.startswith(("train/", "validation/", "generation/"))}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=needs_vllms_fp8_cache) if name == "qwen3" else name for name in CASES]
)
def test_a_run_trains_and_goes_on_from_its_checkpoint(family, tmp_path: Path):
    make_tiny(tmp_path / "tiny", "add", 0, family)

    def last_step(run: str, steps: int, resume: bool = False) -> dict:
        paths = (
            f"policy.model_name={tmp_path}/tiny/model",
            f"data.train.data_path={tmp_path}/tiny/data.jsonl",
            f"logger.log_dir={tmp_path}/{run}",
            f"grpo.max_num_steps={steps}",
        )
        assert train(load(RECIPES / "tiny_cpu.yaml", [*TINY, *paths, *CASES[family]]), resume=resume)
        return json.loads((tmp_path / run / "metrics.jsonl").read_text().splitlines()[-1])

    whole = last_step("whole", 3)
    last_step("parts", 2)
    assert without_clock(last_step("parts", 3, resume=True)) == pytest.approx(without_clock(whole), rel=1e-6)
    assert whole["step"] == 3
    assert 1 < whole["train/token_mult_prob_error"] < 1.1
    choices = json.loads((tmp_path / "whole" / "environment.json").read_text())["choices"]
    assert choices["trainer_kernels"].startswith("Transformer Engine") == (family != "llama")
    assert choices["quantizer"].startswith("none" if family == "qwen2" else "triton")


def test_a_new_engine_borrows_weights_that_return_to_the_host(tmp_path: Path):
    """Trainer and engine take turns: a refit begins with the parameters, and a push borrows offloaded ones."""
    make_tiny(tmp_path / "tiny", "add", 0, "llama")
    paths = (f"policy.model_name={tmp_path}/tiny/model", f"data.train.data_path={tmp_path}/tiny/data.jsonl")
    cfg = load(RECIPES / "tiny_cpu.yaml", [*TINY, *paths, f"{TRAINER}.offload_between_phases=true"])
    with backends(cfg, lambda _: None) as (policy, generation):
        offloaded = policy.ranks.worker.offload.offloaded_bytes
        bridge = build_bridge(cfg, policy, generation)
        policy.prepare_for_training()
        policy.offload_before_refit()
        generation.prepare_for_generation()
        bridge.refit()
        assert "parameters" not in offloaded
        policy.offload_after_refit()
        expected = generation.generate([(5, 6, 7)], [0], GREEDY)
        core_process().kill()
        assert generation.generate([(5, 6, 7)], [0], GREEDY) == expected
        assert generation.engine_restarts == 1
        assert {"parameters", "training"} <= offloaded.keys()
