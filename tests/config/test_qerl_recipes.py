"""The recipes in conf/qerl have the settings of the paper, as far as these can be read off."""

from pathlib import Path

import pytest

from nemo_fp8rl.config.recipe import load

CONF = Path(__file__).parents[2] / "conf"


@pytest.mark.parametrize(("name", "samples", "updates", "answer"), [("gsm8k", 8, 4, 4096), ("bigmath", 16, 1, 8192)])
def test_qerls_recipes_have_the_papers_settings(name, samples, updates, answer):
    """Table 4 of arXiv 2510.11696."""
    cfg = load(CONF / "qerl" / f"{name}.yaml")
    policy, noise = cfg.policy, cfg.nemo_fp8rl.noise
    assert (cfg.nemo_fp8rl.flow, cfg.nemo_fp8rl.format.weight_block) == ("nvfp4_a16_e2e", (1, 16))
    assert (cfg.grpo.num_generations_per_prompt, policy.train_global_batch_size) == (samples, 128)
    assert cfg.rollout_batch_size == updates * policy.train_global_batch_size
    assert (policy.megatron_cfg.peft.enabled, policy.megatron_cfg.peft.dim) == (True, 32)
    assert policy.megatron_cfg.optimizer.lr == 1e-5
    assert (cfg.loss_fn.ratio_clip_min, cfg.loss_fn.ratio_clip_max) == (0.2, 0.28)
    assert cfg.loss_fn.reference_policy_kl_penalty == 0
    assert (noise.enabled, noise.sigma_start, noise.sigma_end, noise.stages) == (True, 1e-2, 5e-4, 10)
    assert (policy.generation.max_new_tokens, policy.generation.temperature) == (answer, 1.0)
