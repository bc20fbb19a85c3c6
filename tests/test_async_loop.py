"""The loop ahead of its trainer: real policy, a real engine with a core of its own; ages, a kill, a resume."""

import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import psutil
import pytest

from nemo_fp8rl import train as loop
from nemo_fp8rl.common.errors import StepRefused, UserError
from nemo_fp8rl.common.stopwatch import Stopwatch
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.data.order import PromptOrder
from nemo_fp8rl.data.prompts import load_prompts
from nemo_fp8rl.generation.answers.readers import AnswerReaders
from nemo_fp8rl.generation.engine_pool import EnginePool
from nemo_fp8rl.generation.interface import sample_seed
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.policy.rank_group import MegatronPolicy
from nemo_fp8rl.rollout.sources import RolloutsAhead
from nemo_fp8rl.train import train
from tests.conftest import RECIPES
from tests.generation.test_faults import core_process
from tests.test_train import read, wait_for_step

AHEAD = ("grpo.async_grpo.enabled=true", "policy.generation.vllm_cfg.async_engine=true")
IN_FLIGHT = (*AHEAD, "grpo.async_grpo.in_flight_weight_updates=true", "checkpointing.save_period=2")


@pytest.fixture
def seen(monkeypatch):
    """What steps were trained on, (trainer's version, completions), and asked, {step: (prompts, seeds)}."""
    found = SimpleNamespace(steps=[], asked={})
    check, generate = loop.check_versions, EnginePool.generate

    def spy_check(completions, version, max_age):
        found.steps.append((version, completions))
        check(completions, version, max_age)

    def spy_generate(pool, prompts, seeds, *others):
        word, _, step = threading.current_thread().name.partition(" ")
        if word == "rollout":  # and no validation
            found.asked.setdefault(int(step), (prompts, seeds))
        return generate(pool, prompts, seeds, *others)

    monkeypatch.setattr(loop, "check_versions", spy_check)
    monkeypatch.setattr(EnginePool, "generate", spy_generate)
    return found


def prompts_and_seeds(cfg: Config, step: int):
    """Those of a step in turn with the trainer."""
    prompts = load_prompts(cfg, read_hf_config(cfg.policy.model_name).vocab_size).train
    order = PromptOrder(len(prompts), cfg.grpo.num_prompts_per_step, cfg.grpo.seed).indices(step)
    return [prompts[i].token_ids for i in order], [sample_seed(cfg.grpo.seed, step, i) for i in range(len(order))]


def check_run(rows: list[dict[str, float]], steps: list, max_age: int, first_version: int) -> None:
    """Every version is known, committed, and at most so old; and the metrics say so."""
    for row in rows:
        step = row["step"]
        assert row["refit/version"] == step and row["train/grad_norm"] > 0
        assert 0 <= row["train/version_lag_mean"] <= row["train/version_lag_max"] <= min(max_age, step - 1)
        shares = {name: value for name, value in row.items() if "token_share/" in name}
        assert sum(shares.values()) == pytest.approx(1)
        assert shares.keys() <= {f"train/token_share/version_lag_{lag}" for lag in range(max_age + 1)}
        assert 0 <= row["generation/idle_share"] <= 1
    assert rows[0]["generation/idle_share"] < 1 and rows[-1]["generation/rollouts_ready"] <= max_age + 1
    assert any(row["train/version_lag_mean"] > 0 for row in rows)
    for version, completions in steps:
        for completion in completions:
            versions = completion.token_versions
            assert len(versions) == len(completion.token_ids) and list(versions) == sorted(versions)
            assert max(version - max_age, first_version) <= completion.policy_version <= versions[0]
            assert versions[-1] <= version


def test_a_run_in_flight_that_is_killed_goes_on_with_the_prompts_of_a_run_in_turn(warm_overrides, tmp_path, seen):
    run, last = tmp_path / "run", 8
    given = [*warm_overrides, *IN_FLIGHT, f"grpo.max_num_steps={last}", f"logger.log_dir={run}"]
    command = [sys.executable, "-m", "nemo_fp8rl.cli", "train", "--config", str(RECIPES / "tiny_cpu.yaml"), *given]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for_step(process, run, 3, seconds=300)
        of_vllm = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert psutil.wait_procs(of_vllm, timeout=120)[1] == []
    assert process.returncode == -signal.SIGKILL
    cfg = load(RECIPES / "tiny_cpu.yaml", given)
    assert train(cfg, resume=True)
    rows = read(run)
    assert [row["step"] for row in rows] == list(range(last + 1))
    assert rows[-1]["validation/accuracy"] >= 0
    first = seen.steps[0][0]
    assert first in (2, 4, 6)
    assert [version for version, _ in seen.steps] == list(range(first, last))
    check_run(rows[1:], seen.steps, 1, first)
    assert seen.asked == {step: prompts_and_seeds(cfg, step) for step in range(first + 1, last + 1)}


@pytest.mark.long
def test_fenced_answers_are_of_one_version_and_an_engine_that_dies_is_replaced(
    warm_overrides, tmp_path, seen, monkeypatch
):
    steps = []
    step = MegatronPolicy.train_step

    def kill_the_core_once(*arguments, **options):
        steps.append(arguments)
        if len(steps) == 2:
            core_process().kill()
        return step(*arguments, **options)

    monkeypatch.setattr(MegatronPolicy, "train_step", kill_the_core_once)
    given = [*warm_overrides, *AHEAD, "grpo.async_grpo.max_trajectory_age_steps=2", "grpo.use_dynamic_sampling=true"]
    given += ["grpo.max_num_steps=5", f"logger.log_dir={tmp_path}/run", "grpo.val_at_end=false", "grpo.val_period=0"]
    assert train(load(RECIPES / "tiny_cpu.yaml", given))
    rows = read(tmp_path / "run")[1:]
    check_run(rows, seen.steps, 2, 0)
    assert sum(row["generation/engine_restarts"] for row in rows) == 1
    assert all(not c.version_starts for _, completions in seen.steps for c in completions)
    assert max(row["train/generation_rounds"] for row in rows) > 1


def test_rollouts_begin_at_most_max_age_steps_ahead():
    begun, may_end = [], threading.Event()

    def collect(clock, step, prompts):
        begun.append((step, prompts))
        with clock("generate"):
            may_end.wait()
        if step == 3:
            raise StepRefused("too little signal")
        return f"rollout {step}"

    ahead = RolloutsAhead(collect, lambda step: f"prompts {step}", 2, 4, lambda phase: None)
    clock = Stopwatch(lambda phase: None)
    ahead.begin(1)
    assert sorted(ahead.rollouts) == [1, 2, 3]
    may_end.set()
    assert ahead.take(1, clock) == "rollout 1"
    assert 4 not in ahead.rollouts
    ahead.begin(2)
    ahead.begin(2)
    assert ahead.take(2, clock) == "rollout 2"
    ahead.begin(3)
    assert sorted(ahead.rollouts) == [3, 4]  # and none after the last step
    with pytest.raises(StepRefused, match="too little signal"):
        ahead.take(3, clock)
    assert sorted(begun) == [(step, f"prompts {step}") for step in range(1, 5)]
    assert 0 <= ahead.metrics()["generation/idle_share"] <= 1
    assert clock.seconds["generate"] > 0


def test_a_prompt_that_comes_during_a_fenced_refit_waits_for_the_commit():
    readers, versions, found = AnswerReaders(), [-1], []

    def read_answers():
        with readers.count_reader(lambda: versions[-1], lambda: versions[-1] >= 0, patience=60) as version:
            found.append(version)

    thread = threading.Thread(target=read_answers)
    thread.start()
    thread.join(0.1)
    readers.wait_for_others()  # the refit does not wait for it
    assert thread.is_alive() and not found
    versions.append(3)
    readers.look_again()
    thread.join(60)
    assert found == [3]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("policy.generation.vllm_cfg.async_engine=false",), r"set policy\.generation\.vllm_cfg\.async_engine=true$"),
        (("policy.generation.vllm_cfg.sleep_level=1",), r"set policy\.generation\.vllm_cfg\.sleep_level=0$"),
        (
            ("policy.megatron_cfg.offload_between_phases=true", "policy.generation.vllm_cfg.sleep_level=2"),
            r"sleep_level=0 and policy\.megatron_cfg\.offload_between_phases=false$",
        ),
        (("nemo_fp8rl.correction={preset: none}",), r"set nemo_fp8rl\.correction\.preset=tis, or loss_fn"),
        (("nemo_fp8rl.correction={preset: k3-rs}",), r"needs importance weights"),
    ],
)
def test_what_does_not_go_with_generation_ahead_is_refused_by_key(overrides, message, tiny_overrides, tmp_path):
    given = [*tiny_overrides, *AHEAD, *overrides, f"logger.log_dir={tmp_path}/run"]
    with pytest.raises(UserError, match=r"^grpo\.async_grpo\.enabled=true.*" + message):
        train(load(RECIPES / "tiny_cpu.yaml", given))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("age", [0, 101])
def test_an_age_out_of_range_is_refused(age, recipe):
    with pytest.raises(UserError, match=r"^grpo\.async_grpo\.max_trajectory_age_steps=\d+ must lie in 1\.\.100"):
        recipe(f"grpo.async_grpo.max_trajectory_age_steps={age}")
