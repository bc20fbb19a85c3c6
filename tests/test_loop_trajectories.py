"""grpo.trajectory_sampling in the loop: what is kept and drawn, what is left as it was, and a resume."""

import json
from pathlib import Path

import pytest
import torch

from nemo_fp8rl.batch import Completion, Prompt, collate
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.policy.rank_group import MegatronPolicy
from nemo_fp8rl.rollout.collect import Rollout, compute_advantages
from nemo_fp8rl.rollout.trajectories import sample_trajectories
from nemo_fp8rl.train import train
from tests.conftest import RECIPES

SMALL = ("grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=4")
SMALL_MICRO = ("policy.train_micro_batch_size=4",)
HALF = "grpo.trajectory_sampling={keep_pairs: 0.5, shuffle_rounds: 2}"
OF_THE_PROCESS = ("timing", "performance", "memory", "generation", "refit")


def rollout_of(rewards: list[float], reasons: str) -> Rollout:
    """Two prompts with four answers each, of 1 to 8 tokens; reasons: s for stop and l for length, one an answer."""
    prompts = [Prompt(i // 4, "", "", (1, 2)) for i in range(8)]
    ends = {"s": "stop", "l": "length"}
    answers = [Completion((9,) * (i + 1), (-1.0,) * (i + 1), ends[reasons[i]], 0) for i in range(8)]
    scores = torch.tensor(rewards)
    return Rollout(prompts, answers, scores, torch.arange(2).repeat_interleave(4), 1, scores, 36, 0, 1.0, scores)


def batch_of(rollout: Rollout):
    return collate(rollout.prompts, rollout.completions, 0)


REWARDS = [0.0, 1.0, 0.5, 0.25, 1.0, 1.0, 1.0, 0.0]


def test_the_default_hands_the_batch_on_untouched(recipe):
    rollout = rollout_of(REWARDS, "s" * 8)
    batch = batch_of(rollout)
    got = sample_trajectories(recipe(*SMALL, *SMALL_MICRO), rollout, batch, 1)
    assert got.rollout is rollout and got.batch is batch
    assert (got.advantages, got.train_rows, got.metrics) == (None, None, {})


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus"])
def test_kept_answers_keep_the_advantages_of_whole_groups(recipe, estimator):
    name = f"grpo.adv_estimator.name={estimator}"
    cfg = recipe(*SMALL, *SMALL_MICRO, "grpo.trajectory_sampling.keep_pairs=0.5", name)
    rollout = rollout_of(REWARDS, "s" * 8)
    batch = batch_of(rollout)
    got = sample_trajectories(cfg, rollout, batch, 1)
    rows = torch.tensor([0, 1, 4, 7])  # best and worst of each group; of equal ones the first
    assert torch.equal(got.batch.input_ids, batch.input_ids[rows])
    assert torch.equal(got.advantages, compute_advantages(cfg, rollout, batch)[rows])
    assert got.rollout.completions == [rollout.completions[row] for row in rows]
    assert got.rollout.rewards.tolist() == [0, 1, 1, 0] and got.rollout.group_ids.tolist() == [0, 0, 1, 1]
    assert got.rollout.all_rewards is rollout.all_rewards
    assert got.train_rows is None and got.metrics["frac_rows_trained_once"] == 1


def test_an_answer_that_the_loss_leaves_out_counts_as_one_without_an_advantage(recipe):
    cfg = recipe(*SMALL, *SMALL_MICRO, "grpo.trajectory_sampling.keep_pairs=0.5", "grpo.overlong_filtering=true")
    rollout = rollout_of(REWARDS, "slssssss")
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    batch = batch_of(rollout)
    got = sample_trajectories(cfg, rollout, type(batch)(**vars(batch) | {"sample_mask": mask}), 1)
    assert got.batch.input_lengths.tolist() == [3, 5, 7, 10], "row 2 takes the place of row 1"
    assert got.metrics["frac_zero_advantage"] == 1 / 8


def test_rows_are_drawn_in_pairs_by_step_and_seed(recipe):
    cfg = recipe(*SMALL, *SMALL_MICRO, "grpo.trajectory_sampling.shuffle_rounds=2")
    rollout = rollout_of(REWARDS, "s" * 8)
    draws = [sample_trajectories(cfg, rollout, batch_of(rollout), step).train_rows.tolist() for step in range(1, 40)]
    again = [sample_trajectories(cfg, rollout, batch_of(rollout), step).train_rows.tolist() for step in range(1, 40)]
    assert draws == again and len({tuple(rows) for rows in draws}) > 5
    pairs = {(1, 0), (2, 3), (4, 7), (5, 6)}
    for rows in draws:
        first, second = ([tuple(rows[i : i + 2]) for i in range(start, start + 4, 2)] for start in (0, 4))
        assert {*first, *second} <= pairs and len({*first}) == len({*second}) == 2


def test_a_step_of_equal_rewards_draws_and_says_so(recipe):
    cfg = recipe(*SMALL, *SMALL_MICRO, HALF)
    rollout = rollout_of([1.0] * 8, "s" * 8)
    got = sample_trajectories(cfg, rollout, batch_of(rollout), 1)
    assert len(got.train_rows) == 4 and got.batch.num_rows == 4
    assert got.metrics["pairs_filled"] == 2
    assert got.metrics["frac_zero_advantage"] == got.metrics["frac_zero_advantage_trained"] == 1


def rows_of(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(OF_THE_PROCESS)} for row in rows]


def recipe_of_run(warm_overrides, run: Path, *overrides: str):
    sizes = ("policy.train_global_batch_size=16", "policy.train_micro_batch_size=16")
    quiet = ("grpo.val_at_start=false", "grpo.val_at_end=false", "checkpointing.save_period=1")
    return load(RECIPES / "tiny_cpu.yaml", [*warm_overrides, *sizes, *quiet, f"logger.log_dir={run}", *overrides])


@pytest.mark.long
def test_half_of_the_answers_train_and_a_resumed_run_is_the_same(warm_overrides, tmp_path, monkeypatch):
    """64 answers, 32 of them kept: two optimizer steps of 16 rows."""
    sizes, original = [], MegatronPolicy.logprobs

    def logprobs(policy, batch):
        sizes.append(batch.num_rows)
        return original(policy, batch)

    monkeypatch.setattr(MegatronPolicy, "logprobs", logprobs)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(recipe_of_run(warm_overrides, whole, HALF, "grpo.max_num_steps=2"))
    assert sizes == [32, 32]
    for row in rows_of(whole):
        assert row["train/frac_zero_advantage_trained"] <= row["train/frac_zero_advantage"] < 1
        assert row["train/frac_rows_trained_once"] < 1, "some pairs are drawn in both rounds"
        assert row["train/grad_norm"] > 0 and row["train/optimizer_steps_skipped"] == 0
    assert train(recipe_of_run(warm_overrides, parts, HALF, "grpo.max_num_steps=1"))
    assert train(recipe_of_run(warm_overrides, parts, HALF, "grpo.max_num_steps=2"), resume=True)
    assert rows_of(parts)[1] == rows_of(whole)[1]
    weights = "checkpoints/step_2/policy/weights/model.safetensors"
    assert (parts / weights).read_bytes() == (whole / weights).read_bytes()
