"""The recipes in conf/infir2 have the settings of InfiR2 (arXiv 2509.22536 and its scripts)."""

import pytest

from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.config.recipe_names import command_of
from tests.conftest import RECIPES

SIZES = ("1.5b", "7b")


def recipe(stage: str, size: str):
    name = f"infir2/{stage}-qwen2.5-{size}"
    assert command_of(name) == ("train" if stage == "rl" else "sft")
    cfg = load(RECIPES / f"{name}.yaml")
    assert (cfg.nemo_fp8rl.flow, cfg.nemo_fp8rl.scale_format) == ("fp8_e2e", "pow2")
    assert size in cfg.logger.log_dir
    return cfg


@pytest.mark.parametrize("size", SIZES)
def test_continual_pre_training_sees_168e9_tokens(size):
    cfg = recipe("cpt", size)
    optimizer, schedule = cfg.policy.megatron_cfg.optimizer, cfg.policy.megatron_cfg.scheduler
    tokens = cfg.sft.max_num_steps * cfg.policy.train_global_batch_size * cfg.policy.max_total_sequence_length
    assert round(tokens / 1e9) == 168
    assert (optimizer.lr, optimizer.weight_decay, optimizer.clip_grad) == (1e-4, 0.1, 1.0)
    assert (optimizer.adam_beta1, optimizer.adam_beta2) == (0.9, 0.95)
    steps = schedule.lr_warmup_iters, schedule.lr_wsd_decay_iters, schedule.lr_decay_iters
    assert (schedule.lr_decay_style, schedule.lr_wsd_decay_style, steps) == ("WSD", "cosine", (5000, 5000, 40000))
    assert cfg.data.train.kind == "text"


@pytest.mark.parametrize("size", SIZES)
def test_supervised_training_has_five_epochs_of_a_cosine(size):
    cfg = recipe("sft", size)
    optimizer, schedule = cfg.policy.megatron_cfg.optimizer, cfg.policy.megatron_cfg.scheduler
    assert (optimizer.lr, optimizer.min_lr, optimizer.weight_decay) == (2e-5, 2e-6, 0)
    assert (cfg.sft.max_num_epochs, cfg.policy.train_global_batch_size) == (5, 64)
    steps = 5 * (165_000 // 64)
    assert (schedule.lr_decay_style, schedule.lr_decay_iters) == ("cosine", steps)
    assert schedule.lr_warmup_iters == pytest.approx(0.05 * steps, abs=1)
    assert cfg.sft.max_num_steps > steps
    assert (cfg.policy.sequence_packing.enabled, cfg.policy.sequence_packing.train_mb_tokens) == (True, 32768)
    assert cfg.data.train.kind == "answers"
    assert cfg.policy.model_name.startswith(recipe("cpt", size).logger.log_dir)


@pytest.mark.parametrize("size", SIZES)
def test_the_third_stage_is_dapo_with_truncated_importance_sampling(size):
    cfg = recipe("rl", size)
    assert (cfg.grpo.num_prompts_per_step, cfg.grpo.num_generations_per_prompt) == (128, 16)
    assert (cfg.policy.megatron_cfg.optimizer.lr, cfg.policy.generation.max_new_tokens) == (1e-6, 8192)
    assert (cfg.loss_fn.ratio_clip_min, cfg.loss_fn.ratio_clip_max) == (0.2, 0.28)
    assert cfg.nemo_fp8rl.correction.preset == "tis"
    assert cfg.grpo.use_dynamic_sampling
    assert cfg.policy.model_name.startswith(recipe("sft", size).logger.log_dir)
