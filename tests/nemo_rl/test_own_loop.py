"""Our loop and NeMo RL's, from one recipe and one seed: the same rewards and losses."""

import json
from dataclasses import replace

import pytest

from nemo_fp8rl.config import AdvEstimatorConfig, DataConfig, LoggerConfig, TrainDataConfig
from nemo_fp8rl.data import PromptOrder
from nemo_fp8rl.data.prompts import load_prompts
from nemo_fp8rl.hf.config import read_hf_config
from nemo_fp8rl.nemo_rl.config import from_nemo_rl
from nemo_fp8rl.nemo_rl.recipe import load
from nemo_fp8rl.train import train
from tests.nemo_rl import runs
from tests.test_train import read

pytestmark = [pytest.mark.nemo_rl, runs.needs_checkout]


def test_both_loops_give_the_same_rewards_and_losses(warm, tmp_path):
    keys = runs.overrides(warm, tmp_path / "logs")
    values = load(runs.RECIPE, keys).values
    cfg, grpo = from_nemo_rl(values), values["grpo"]
    choices = {name: grpo[name] for name in ("normalize_rewards", "use_leave_one_out_baseline")}
    cfg = replace(
        cfg,
        data=DataConfig(TrainDataConfig(f"{warm}/data.jsonl")),
        grpo=replace(cfg.grpo, **choices, adv_estimator=AdvEstimatorConfig(**choices), val_period=0, val_at_end=False),
        logger=LoggerConfig(str(tmp_path / "own"), tensorboard_enabled=False),
        checkpointing=replace(cfg.checkpointing, enabled=False),
    )
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
    for name in ("reward", "loss", "grad_norm", "lr", "token_mult_prob_error", "sampling_importance_ratio"):
        ours = [row[f"train/{name}"] for row in own]
        assert theirs[f"train/{name}"] == pytest.approx(ours, rel=1e-4, abs=1e-6), name
