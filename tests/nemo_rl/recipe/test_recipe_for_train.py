"""Our loop and NeMo RL's, from one recipe and one seed: the same rewards and losses."""

import json
from dataclasses import replace

import pytest

from nemo_fp8rl.cli import main
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.grpo_schema import AsyncGrpoConfig
from nemo_fp8rl.config.run_schema import LoggerConfig
from nemo_fp8rl.config.validate.generation import check_asynchronous
from nemo_fp8rl.data.order import PromptOrder
from nemo_fp8rl.data.prompts import load_prompts
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.nemo_rl.recipe.checkout import find_checkout
from nemo_fp8rl.nemo_rl.recipe.recipe_for_train import load_for_train
from nemo_fp8rl.train import train
from tests.nemo_rl import runs
from tests.test_train import read

pytestmark = [pytest.mark.nemo_rl, runs.needs_checkout]

WARM_UP = (
    "policy.megatron_cfg.scheduler.lr_warmup_iters=3",
    "policy.megatron_cfg.scheduler.lr_warmup_init=1e-4",
    *(f"policy.{name}=32" for name in ("train_global_batch_size", "train_micro_batch_size", "logprob_batch_size")),
)
"""A warm-up, and two optimizer steps a rollout."""


def test_both_loops_give_the_same_rewards_and_losses(warm, tmp_path):
    keys = [*runs.overrides(warm, tmp_path / "logs"), *WARM_UP]
    cfg = load_for_train(runs.RECIPE, keys)
    cfg = replace(cfg, logger=LoggerConfig(str(tmp_path / "own"), tensorboard_enabled=False))
    prompts = load_prompts(cfg, read_hf_config(cfg.policy.model_name).vocab_size).train
    order = PromptOrder(len(prompts), cfg.grpo.num_prompts_per_step, cfg.grpo.seed)
    asked = [prompts[i] for step in range(1, runs.STEPS + 1) for i in order.indices(step)]
    data = tmp_path / "in_order.jsonl"
    data.write_text("".join(json.dumps({"prompt": p.text, "answer": p.answer}) + "\n" for p in asked))

    theirs = runs.run(
        tmp_path / "logs", *keys, "data.shuffle=false", f"++data.train={{data_path:{data},split_validation_size:0}}"
    )
    assert train(cfg)
    own = [row for row in read(tmp_path / "own") if row["step"] > 0]
    # of two optimizer steps NeMo RL logs the last one's grad_norm, our loop their mean
    for name in ("reward", "loss", "lr", "token_mult_prob_error", "sampling_importance_ratio"):
        ours = [row[f"train/{name}"] for row in own]
        assert theirs[f"train/{name}"] == pytest.approx(ours, rel=1e-4, abs=1e-6), name


def test_a_schedule_without_a_length_has_that_of_the_run(warm, tmp_path):
    keys = runs.overrides(warm, tmp_path)
    keys += ["grpo.max_num_steps=1000000", "grpo.max_num_epochs=2", "policy.megatron_cfg.scheduler.lr_decay_iters=null"]
    cfg = load_for_train(runs.RECIPE, keys)
    assert cfg.policy.megatron_cfg.scheduler.lr_decay_iters == cfg.grpo.max_num_steps < 1000


def test_an_asynchronous_recipe_runs_ahead_in_our_loop(warm, tmp_path):
    keys = [*runs.overrides(warm, tmp_path), *runs.ASYNC, "++grpo.async_grpo.max_trajectory_age_steps=2"]
    cfg = load_for_train(runs.RECIPE, keys)
    check_asynchronous(cfg)
    assert cfg.grpo.async_grpo == AsyncGrpoConfig(enabled=True, max_trajectory_age_steps=2)


def test_train_runs_nemo_rls_recipe_and_launch_leaves_the_choice(warm, tmp_path, capsys):
    logs = tmp_path / "logs"
    keys = [*runs.overrides(warm, logs), "grpo.max_num_steps=1"]
    assert main(["train", "--config", str(runs.RECIPE), *keys]) == 0
    assert [row["step"] for row in read(logs)] == [1]
    capsys.readouterr()
    for loop in ("train", "nemo"):
        assert main(["launch", "local", "--loop", loop, "--dry-run", "--config", str(runs.RECIPE), *keys]) == 0
        assert f"nemo_fp8rl.cli {loop} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("grpo.max_rollout_turns=3", "grpo.max_rollout_turns=3"),
        ("grpo.advantage_clip_low=-1", "grpo.advantage_clip_low=-1"),
        ("grpo.advantage_clip_low=0", "grpo.advantage_clip_low=0"),
        ("++grpo.advantage_clip_high=0.0", "grpo.advantage_clip_high=0"),
        ("data.default.prompt_file=x.txt", "data.train: prompt_file=x.txt"),
        ("++data.train.system_prompt_file=x.txt", "data.train: system_prompt_file=x.txt"),
        ("++data.validation={data_path:x.jsonl,env_name:math}", "env_name=exact_match and data.validation math"),
        ("data.shuffle=false", "data.shuffle=False"),
        ("data.max_input_seq_length=32", "data.max_input_seq_length=32.*max_model_len=64"),
        ("++env.math={num_workers:1,math_verify_impl:dapo_math_verify}", "or set env.math.math_verify_impl=hf_math"),
        ("++data.train.dataset_name=OpenMathInstruct-2", "reads a JSONL file"),
    ],
)
def test_what_our_loop_would_do_otherwise_is_refused(key, message, warm, tmp_path):
    keys = runs.overrides(warm, tmp_path)
    with pytest.raises(UserError, match=message):
        load_for_train(runs.RECIPE, [*keys, key])


def test_all_checkpoints_and_all_prompts_are_all(warm, tmp_path, capsys):
    keys = runs.overrides(warm, tmp_path)
    nulls = ["checkpointing.keep_top_k=null", "grpo.max_val_samples=null", "logger.mlflow_enabled=true"]
    cfg = load_for_train(runs.RECIPE, [*keys, *nulls])
    assert (cfg.checkpointing.keep_top_k, cfg.grpo.max_val_samples) == (None, None)
    assert (
        "logger.mlflow_enabled=True has no effect in `nemo-fp8rl train`: metrics go to files" in capsys.readouterr().out
    )


def test_a_sets_own_words_are_before_the_defaults_and_it_validates_as_it_samples(warm, tmp_path, capsys):
    keys = runs.overrides(warm, tmp_path)
    keys += ["++data.train.env_name=math", "policy.generation.temperature=0.7"]
    on_main = not find_checkout().version.startswith("0.7")
    of_main = ("++grpo.val_start_at=2", "++grpo.stop_at_validation_threshold=0.5")
    cfg = load_for_train(runs.RECIPE, [*keys, *of_main * on_main])
    assert cfg.data.default.env_name == "hf_math_verify"  # NeMo RL's rule
    assert cfg.policy.generation.temperature == cfg.policy.generation.val_temperature == 0.7
    said = capsys.readouterr().out
    assert ("grpo.val_start_at=2 has no effect in `nemo-fp8rl train`: validation starts at" in said) == on_main
    assert ("grpo.stop_at_validation_threshold=0.5 has no effect in `nemo-fp8rl train`: a run takes" in said) == on_main
