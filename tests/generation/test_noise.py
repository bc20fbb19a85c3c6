"""Noise on the norms through the whole circle: trainer, refit, engine."""

import pytest
import torch

from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.policy.weights.norm_noise import sigma_of
from tests.conftest import ALIGNED, RECIPES
from tests.generation.pair import Pair

NOISE = ("enabled=true", "stages=3", "sigma_start=0.02", "sigma_end=0.01")
LORA = ("policy.megatron_cfg.peft.enabled=true", "nemo_fp8rl.flow=nvfp4_a16_e2e")
CASES = {
    "both": ("nemo_fp8rl.flow=fp8_e2e", "nemo_fp8rl.noise.where=both"),
    "engine-lora": (*LORA, "nemo_fp8rl.noise.where=engine"),
    "both-lora": (*LORA, "nemo_fp8rl.noise.where=both"),
}


@pytest.fixture(scope="module", params=[pytest.param(c, marks=[pytest.mark.long] * (c == "both-lora")) for c in CASES])
def pair(request, tiny_overrides):
    keys = (*(f"nemo_fp8rl.noise.{key}" for key in NOISE), "grpo.max_num_steps=3")
    learning = ("policy.megatron_cfg.optimizer.lr=0.002", "policy.megatron_cfg.scheduler.lr_warmup_iters=0")
    pair = Pair(load(RECIPES / "tiny_cpu.yaml", [*tiny_overrides, *keys, *learning, *CASES[request.param]]))
    yield pair
    pair.close()


def test_the_engine_has_the_noise_and_the_trainer_only_computes_with_it(pair):
    noise, worker = pair.cfg.nemo_fp8rl.noise, pair.worker
    for version in range(3):
        pair.refit()
        clean = {name: weight.clone() for name, weight in worker.rank_weights.norms()}
        sigma = sigma_of(noise, version, 3)
        assert (sigma > 0) == (version > 0)
        mismatch = pair.mismatch()
        assert (mismatch < ALIGNED) == (noise.where == "both" or not sigma), mismatch
        now = dict(worker.rank_weights.norms())
        assert len(now) == 2 * worker.hf.num_hidden_layers
        assert all(torch.equal(now[name], weight) for name, weight in clean.items())
        pair.train(2)
        moves = any(not torch.equal(now[name], weight) for name, weight in clean.items())
        assert moves != bool(pair.cfg.policy.megatron_cfg.peft.enabled)  # a base is frozen, also by the noise
    if noise.where == "both" and pair.cfg.policy.megatron_cfg.peft.enabled:  # the reference is the base without noise
        batch = pair.samples()
        reference, worker.noise.version = worker.reference_logprobs(batch), None
        assert torch.equal(worker.reference_logprobs(batch), reference)
