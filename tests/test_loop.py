"""What the loop does around the loss: gates, rejected batches, dynamic sampling, the reference policy."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_fp8rl.algorithms.gates import GATED
from nemo_fp8rl.algorithms.metric_names import METRICS
from nemo_fp8rl.batch import Completion, Prompt
from nemo_fp8rl.cli import main
from nemo_fp8rl.common.errors import BAD_INPUT, UserError
from nemo_fp8rl.common.stopwatch import Stopwatch
from nemo_fp8rl.config.grpo_schema import HintsConfig
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation.engine_arguments import engine_arguments
from nemo_fp8rl.generation.engine_pool import EnginePool
from nemo_fp8rl.generation.interface import Sampling
from nemo_fp8rl.policy.rank_group import MegatronPolicy
from nemo_fp8rl.refit.bridge import RefitBridge
from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.rollout import collect
from nemo_fp8rl.rollout.collect import collect_rollout, pick_further_prompts
from nemo_fp8rl.run.end_record import read_end
from nemo_fp8rl.train import _length_notice, format_figures, train, validate
from tests.conftest import RECIPES

SHORT = ("grpo.max_num_steps=2", "grpo.val_at_start=false", "grpo.val_at_end=false", "checkpointing.save_period=100")


@pytest.fixture
def run(warm_overrides, tmp_path):
    """run("key=value", ...) -> the rows of metrics.jsonl of two steps."""

    def run(*overrides: str) -> list[dict[str, float]]:
        given = [*warm_overrides, *SHORT, f"logger.log_dir={tmp_path}/run", *overrides]
        assert train(load(RECIPES / "tiny_cpu.yaml", given))
        return rows(tmp_path / "run")

    return run


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def checkpoint_weights(folder: Path, step: int) -> bytes:
    return (folder / f"checkpoints/step_{step}/policy/weights/model.safetensors").read_bytes()


def test_a_batch_whose_tokens_are_all_rejected_moves_no_weight_and_is_announced(run, tmp_path, capsys):
    reject_all = "nemo_fp8rl.correction={preset: null, reject: [{statistic: token_k1, min: 1000}]}"
    one, two = run(reject_all, "checkpointing.save_period=1", "checkpointing.keep_top_k=2")
    assert "step 1: 1 optimizer step was skipped, because nothing was left to train on" in capsys.readouterr().out
    for row in (one, two):
        assert row["train/optimizer_steps_skipped"] == 1
        assert row["train/correction/rejected_token_ratio"] == 1
        assert "train/grad_norm" not in row
    assert checkpoint_weights(tmp_path / "run", 1) == checkpoint_weights(tmp_path / "run", 2)
    assert [row["refit/version"] for row in (one, two)] == [1, 2]


def test_an_interrupted_run_goes_on_by_what_it_says(warm_overrides, tmp_path, monkeypatch, capsys):
    own = tmp_path / "run/config.yaml"
    given = [*warm_overrides, *SHORT, f"logger.log_dir={tmp_path}/run"]
    with monkeypatch.context() as interrupted:
        interrupted.setattr("nemo_fp8rl.train.StopFlag.is_set", True)
        assert not train(load(RECIPES / "tiny_cpu.yaml", given), resume_hint=f"train --config {own} --resume")
    said = capsys.readouterr().out
    assert f"stopped after step 1, checkpoint of step 1: train --config {own} --resume continues it" in said
    assert main(["train", "--config", str(own), "--resume"]) == 0
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]
    weights = f"{tmp_path}/run/checkpoints/step_2/policy/weights"
    lines = capsys.readouterr().out.splitlines()
    end = lines.index(f"run directory {tmp_path}/run")  # after the table
    assert lines[end + 1 :] == [
        f"  nemo-fp8rl report {tmp_path}/run",
        f"  nemo-fp8rl train --config {own} --resume grpo.max_num_steps=4",
        f"  nemo-fp8rl export --checkpoint {weights} --output {tmp_path}/run/fp8",
    ]
    first, last = (row["train/reward"] for row in rows(tmp_path / "run"))
    shown = "\n".join(lines[:end])
    assert f"{first:.3f}, {last:.3f}" in shown
    assert "fp8_e2e, 2 steps" in shown and "timing/generate, mean" in shown


def test_a_run_without_a_gradient_says_why(run, tiny, capsys):
    """Greedy answers of an untrained model: alike but for ties, and wrong. The reason is given once."""
    for row in run(f"policy.model_name={tiny}/model", "policy.generation.top_k=1", "grpo.max_num_steps=4"):
        assert row["train/frac_reward_zero_std"] == 1
        assert row["train/frac_identical_answers"] > 0.5
        assert row["train/baseline_reward/pct_0"] == 100
        assert row["train/baseline_reward/pct_mixed"] == row["train/grad_norm"] == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "gives no gradient" in line]
    assert said == [
        "step 3: in the last 3 steps the answers to a prompt were all the same, which gives no gradient: sample more "
        "freely (policy.generation.temperature=1.0, policy.generation.top_k=1, policy.generation.top_p=1.0)"
    ]


def test_an_engine_that_dies_in_a_validation_is_counted_in_that_steps_row(run, monkeypatch, capsys):
    def one_dies(parts):
        parts.generation.engine_restarts += 1
        parts.generation.prompts_retried += 5
        return validate(parts)

    monkeypatch.setattr("nemo_fp8rl.train.validate", one_dies)
    start, *steps = run("grpo.val_at_start=true", "grpo.val_period=2")
    assert start["generation/engine_restarts"] == 1
    assert [row["generation/engine_restarts"] for row in steps] == [0, 1]
    assert [row["generation/prompts_retried"] for row in steps] == [0, 5]
    said = capsys.readouterr().out
    assert "start: generation/engine_restarts 1" in said and "step 2: generation/engine_restarts 1" in said


@pytest.mark.long
def test_a_gate_warns_and_the_step_goes_on(run, capsys):
    first, _ = run("nemo_fp8rl.gates=[{metric: token_mult_prob_error, max: 0, action: warn}]")
    out = " ".join(capsys.readouterr().out.split())
    assert "step 1: token_mult_prob_error is 1" in out
    assert first["train/optimizer_steps_skipped"] == 0
    assert first["train/grad_norm"] > 0


@pytest.fixture
def engine_of_another_model(monkeypatch) -> None:
    """The engine rotates half of each head, as with a key of config.json that the trainer does not read."""

    def other_model(*arguments):
        changed = engine_arguments(*arguments)
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        changed["hf_overrides"]["rope_parameters"] = rope
        return changed

    monkeypatch.setattr("nemo_fp8rl.generation.engine.engine_arguments", other_model)


@pytest.mark.usefixtures("engine_of_another_model")
def test_a_gate_skips_the_step_and_an_engine_of_another_model_is_alarming(run, capsys):
    gates = "nemo_fp8rl.gates=[{metric: k3_kl, max: 0, action: skip_step}]"
    rows = run("nemo_fp8rl.flow=fp8_rollout", gates)
    for row in rows:
        assert row["train/optimizer_steps_skipped"] == 1
        assert "train/loss" not in row
        assert row["train/token_mult_prob_error"] > 1.2
    out, err = capsys.readouterr()
    said = f"step 1: MISMATCH: token_mult_prob_error is {rows[0]['train/token_mult_prob_error']:.4g}, and the precision"
    assert said in " ".join(out.split())
    assert f"nemo-fp8rl: {said}" in err


@pytest.mark.usefixtures("engine_of_another_model")
def test_the_alarm_stops_a_run_where_the_recipe_says_so(run):
    with pytest.raises(UserError, match=r"step 1: MISMATCH: token_mult_prob_error is"):
        run("nemo_fp8rl.mismatch_alarm=stop")


def test_a_gate_stops_the_run_and_keeps_what_was_trained(run, warm_overrides, tmp_path):
    """A step at lr 0.1 throws the weights far off: a mismatch that it makes larger is given a limit between the two."""
    far = ("nemo_fp8rl.flow=fp8_rollout", "policy.megatron_cfg.optimizer.lr=0.1")
    far += ("policy.megatron_cfg.scheduler.lr_warmup_iters=0",)
    probe = [*warm_overrides, *SHORT, *far, f"logger.log_dir={tmp_path}/probe"]
    assert train(load(RECIPES / "tiny_cpu.yaml", probe))
    before, after = rows(tmp_path / "probe")
    growth = {name: after[f"train/{name}"] - before[f"train/{name}"] for name in METRICS if name in GATED}
    metric = max(growth, key=growth.__getitem__)
    assert growth[metric] > 0
    limit = (before[f"train/{metric}"] + after[f"train/{metric}"]) / 2
    with pytest.raises(UserError, match=rf"step 2: {metric} is .*, its gate allows at most "):
        run(f"nemo_fp8rl.gates=[{{metric: {metric}, max: {limit}, action: stop}}]", *far)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1]
    assert checkpoint_weights(tmp_path / "run", 1)
    assert read_end(tmp_path / "run").startswith(f"step 2: {metric} is ")
    assert read_end(tmp_path / "probe") == ""


@pytest.mark.long
def test_too_many_logprobs_that_are_not_finite_end_the_run_in_a_sentence(warm_overrides, tmp_path, capsys):
    """A step at lr 1e36 leaves weights whose products overflow: log-probs of the next step are NaN."""
    given = [*warm_overrides, *SHORT, f"logger.log_dir={tmp_path}/run", "nemo_fp8rl.flow=bf16"]
    given += ["policy.megatron_cfg.optimizer.lr=1e36", "policy.megatron_cfg.scheduler.lr_warmup_iters=0"]
    assert main(["train", "--config", str(RECIPES / "tiny_cpu.yaml"), *given]) == BAD_INPUT
    said = capsys.readouterr().err
    assert re.fullmatch(r"nemo-fp8rl: step 2: \d+ of \d+ .*correction\.max_nonfinite_fraction=0\.01 allows.*\n", said)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1]
    assert checkpoint_weights(tmp_path / "run", 1)


@pytest.mark.parametrize(("nth", "kept"), [(3, ["step_1"]), pytest.param(4, [], marks=pytest.mark.long)])
def test_an_optimizer_step_that_diverges_ends_the_run_in_a_sentence(
    warm_overrides, tmp_path, capsys, monkeypatch, nth, kept
):
    """Of two a step; after the first of step 2 the weights are those of no step, and are not kept as such."""
    step, taken = MegatronPolicy.train_step, []

    def diverging(logprobs, *_):
        return logprobs.sum() * math.inf, {"loss": 0.0}

    def train_step(policy, batch, loss, schedules=True):
        taken.append(batch)
        return step(policy, batch, diverging if len(taken) == nth else loss)

    monkeypatch.setattr(MegatronPolicy, "train_step", train_step)
    given = [*warm_overrides, *SHORT, f"logger.log_dir={tmp_path}/run"]
    given += [f"policy.train_{size}_batch_size=32" for size in ("global", "micro")]
    assert main(["train", "--config", str(RECIPES / "tiny_cpu.yaml"), *given]) == BAD_INPUT
    said = capsys.readouterr().err
    assert re.fullmatch(r"nemo-fp8rl: step 2: a gradient or the loss is not finite, .*\.lr or its clip_grad\n", said)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1]
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step_*")] == kept


def test_the_reference_policy_holds_the_trainer_back(run):
    first, second = run(
        "loss_fn.reference_policy_kl_penalty=0.1",
        "policy.megatron_cfg.optimizer.lr=0.003",
        "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
    )
    assert first["train/kl_penalty"] == 0
    assert second["train/kl_penalty"] > 1e-4


def test_each_side_has_given_its_memory_back_before_the_other_takes_its_own(run, monkeypatch):
    calls = []

    def spy(of: type, method: str) -> None:
        real = getattr(of, method)

        def called(self, *arguments, **options):
            calls.append(method)
            return real(self, *arguments, **options)

        monkeypatch.setattr(of, method, called)

    for method in ("prepare_for_training", "offload_before_refit", "offload_after_refit"):
        spy(MegatronPolicy, method)
    for method in ("generate", "finish_generation", "prepare_for_generation"):
        spy(EnginePool, method)
    one, two = run(
        "policy.generation.vllm_cfg.sleep_level=1",
        "policy.megatron_cfg.offload_between_phases=true",
        "grpo.val_period=2",
    )
    generates, steps = ["offload_after_refit", "generate"], ["prepare_for_training", "offload_before_refit"]
    step = [*generates, "finish_generation", *steps, "prepare_for_generation"]
    begins = ["offload_after_refit", "finish_generation", "prepare_for_generation"]  # before and after engines start
    assert calls == [*begins, *step, *step, *generates]  # which validates
    assert one["memory/offloaded_bytes"] == two["memory/offloaded_bytes"] > 0


def test_dynamic_sampling_asks_until_the_step_is_full(run):
    (row,) = run("grpo.max_num_steps=1", "grpo.use_dynamic_sampling=true")
    assert row["train/generation_rounds"] > 1
    assert row["train/reward"] < row["train/filtered_reward"] < 1, "dropped are groups without a right answer"
    assert 0 < row["train/reward"] < 1


@pytest.mark.parametrize("dynamic", [True, False])
def test_what_dynamic_sampling_drops_is_in_the_counts(dynamic):
    """Two prompts a step, two answers each; of three rounds the first is all wrong, and so is half of the second."""
    right, wrong = Completion((7,), (0.0,), "stop", 0), Completion((8, 8, 8), (0.0,) * 3, "length", 0)
    rounds = [[(wrong, wrong), (wrong, wrong)], [(wrong, wrong), (right, wrong)], [(wrong, right), (right, wrong)]]
    asked = iter(rounds if dynamic else rounds[1:])
    grpo = {"num_prompts_per_step": 2, "use_dynamic_sampling": dynamic, "dynamic_sampling_max_gen_batches": 3}
    grpo["hints"] = HintsConfig()
    data = SimpleNamespace(default=SimpleNamespace(env_name="exact_match"))
    cfg = SimpleNamespace(grpo=SimpleNamespace(seed=1, **grpo), data=data)
    sampling = Sampling(num_generations=2, max_new_tokens=3, temperature=1.0, stop_token_ids=())
    generation = SimpleNamespace(generate=lambda *_: next(asked))
    tokenizer = SimpleNamespace(decode=lambda ids: "7" if ids == (7,) else "8")
    prompts = [Prompt(i, "", "7", (1,)) for i in range(2)]
    got = collect_rollout(cfg, generation, tokenizer, sampling, Stopwatch(print), 1, lambda round_: prompts)
    assert got.rewards.tolist() == ([1, 0, 0, 1] if dynamic else [0, 0, 1, 0])
    assert got.all_rewards.tolist() == ([0] * 4 + [0, 0, 1, 0] + [0, 1, 1, 0] if dynamic else [0, 0, 1, 0])
    assert (got.generated_tokens, got.truncated_answers) == ((9 * 3 + 3, 9) if dynamic else (3 * 3 + 1, 3))
    assert len(got.completions) == 4


def test_dynamic_sampling_gives_up_with_a_sentence(run):
    with pytest.raises(
        UserError, match=r"step 1: dynamic sampling found \d+ of 16 .*dynamic_sampling_max_gen_batches=1"
    ):
        run("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=1")


def test_what_was_trained_is_saved_when_a_later_step_finds_too_little_signal(run, monkeypatch, tmp_path):
    calls = []

    def of_the_first_step(rewards, group_ids):
        calls.append(group_ids)
        return torch.full((len(rewards),), len(calls) == 1)

    monkeypatch.setattr(collect, "groups_with_signal", of_the_first_step)
    with pytest.raises(UserError, match=r"^step 2: dynamic sampling found 0 of 4 "):
        run(
            "grpo.use_dynamic_sampling=true",
            "grpo.dynamic_sampling_max_gen_batches=1",
            "grpo.num_prompts_per_step=4",
            "grpo.num_generations_per_prompt=32",
        )
    assert checkpoint_weights(tmp_path / "run", 1)


def test_a_refit_that_fails_ends_a_run_in_a_sentence(run, monkeypatch):
    def refused(bridge):
        raise RefitError("/dev/shm has too little room;\nset refit.transport=collective")

    monkeypatch.setattr(RefitBridge, "refit", refused)
    with pytest.raises(
        UserError, match=r"^/dev/shm has too little room; set .*=collective; .* continue with --resume$"
    ):
        run()


def test_a_token_without_a_log_prob_gives_no_kl_in_its_reward(run, monkeypatch):
    real = MegatronPolicy.logprobs

    def with_a_nan(policy, batch):
        logprobs = real(policy, batch)
        logprobs[batch.token_mask > 0] = logprobs[batch.token_mask > 0].index_fill(0, torch.tensor([0]), math.nan)
        return logprobs

    monkeypatch.setattr(MegatronPolicy, "logprobs", with_a_nan)
    (row,) = run(
        "grpo.max_num_steps=1",
        "grpo.adv_estimator.name=reinforce_plus_plus",
        "loss_fn.reference_policy_kl_penalty=0.01",
        "loss_fn.use_kl_in_reward=true",
        "loss_fn.reference_policy_kl_type=k1",
    )
    assert row["train/grad_norm"] > 0


def test_a_step_without_a_mismatch_is_shown():
    latest = {
        "train/reward": 0.5, "performance/generation_tokens_per_sec": 1.0, "timing/refit": 1.0, "refit/bytes": 1.0,
        "timing/total_step_time": 1.0,
    }  # fmt: skip
    assert "mismatch" not in format_figures(latest)
    assert format_figures(latest | {"train/token_mult_prob_error": 1.0})["mismatch"] == "1"
    assert format_figures(latest | {"train/token_mult_prob_error": 1 + 1e-9})["mismatch"] == "1.000000001"


def test_other_estimators_and_shapings_train(run):
    first, second = run(
        "grpo.adv_estimator.name=reinforce_plus_plus",
        "loss_fn.reference_policy_kl_penalty=0.01",
        "loss_fn.use_kl_in_reward=true",
        "loss_fn.reference_policy_kl_type=k1",
        "grpo.reward_shaping={enabled: true, overlong_buffer_length: 2, max_response_length: 4}",
        "grpo.overlong_filtering=true",
        "nemo_fp8rl.correction={preset: null, weight: sequence, weight_max: 5, normalize: true, denominator: kept, "
        "reject: [{statistic: seq_mean_k1, min: 0.9, max: 1.1}]}",
        "loss_fn.token_level_loss=false",
        "loss_fn.sequence_level_importance_ratios=true",
    )
    for row in (first, second):
        assert row["train/grad_norm"] > 0
        assert row["train/kl_penalty"] == 0  # it went into the rewards
        assert row["train/correction/weight_mean"] == pytest.approx(1, abs=0.05)
    assert all(torch.isfinite(torch.tensor(value)) for row in (first, second) for value in row.values())


def test_further_rounds_ask_every_other_prompt_once():
    prompts = [Prompt(i, str(i), "", (i,)) for i in range(10)]
    first = prompts[2:5]
    rounds = [pick_further_prompts(prompts, first, 7, 1, round_) for round_ in range(1, 5)]
    assert [len(asked) for asked in rounds] == [3, 3, 1, 0]
    assert sorted(p.index for asked in (first, *rounds) for p in asked) == list(range(10))
    assert rounds[0] == pick_further_prompts(prompts, first, 7, 1, 1)
    assert rounds[0] != pick_further_prompts(prompts, first, 7, 2, 1)


def test_answers_longer_than_the_context_are_announced(recipe):
    notice = _length_notice(recipe("policy.generation.max_new_tokens=200", "policy.max_total_sequence_length=96"))
    assert notice.startswith("policy.generation.max_new_tokens=200, but a prompt and its answer have 96 tokens at most")
    assert _length_notice(recipe()) == ""
