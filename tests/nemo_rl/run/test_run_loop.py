"""NeMo RL's real grpo_train with our policy, engine, refit and loss: `make test-nemo-rl`, on a checkout of it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_fp8rl.commands.report.page import report
from nemo_fp8rl.commands.sft import sft
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.nemo_rl.recipe.checkout import find_checkout
from tests.conftest import RECIPES
from tests.nemo_rl import runs

pytestmark = [pytest.mark.nemo_rl, runs.needs_checkout]
BF16 = ("policy.megatron_cfg.fp8_cfg.enabled=false", "policy.generation.vllm_cfg.precision=bfloat16")
MXFP8 = ("policy.megatron_cfg.fp8_cfg.fp8_recipe=mxfp8", "++policy.generation.vllm_cfg.is_mx=true")
NVFP4 = (
    *BF16,
    "++policy.megatron_cfg.fp4_cfg.enabled=true",
    "++policy.megatron_cfg.te_precision_config_file=attn_bf16_mlp_nvfp4.yaml",
    "++policy.megatron_cfg.env_vars.NVTE_NVFP4_DISABLE_2D_QUANTIZATION='0'",
    "++policy.generation.nvfp4_pertoken_rollout.enabled=true",
)
LONG = ("checkpointing.enabled=true", "checkpointing.save_period=1000", "grpo.max_num_steps=50")
CLOCK = ("timing/", "performance/", "refit/", "ray/")


def measured(values: dict[str, list[float]], steps: slice = slice(None)) -> dict[str, list[float]]:
    """Without what depends on the clock, as the bytes of a refit do."""
    return {name: by_step[steps] for name, by_step in values.items() if not name.startswith(CLOCK)}


@pytest.fixture(scope="module")
def e2e(warm, tmp_path_factory) -> dict[str, list[float]]:
    """Uninterrupted, in FP8 on both sides."""
    folder = tmp_path_factory.mktemp("e2e")
    keys = runs.overrides(warm, folder / "logs")
    return runs.run(folder / "logs", *keys, "checkpointing.enabled=true", "checkpointing.save_period=2")


def test_fp8_on_both_sides_keeps_the_mismatch_of_bf16_and_fp8_rollout_does_not(e2e, warm, tmp_path):
    flows = {"fp8_e2e": e2e}
    for name, keys in {"bf16": BF16, "fp8_rollout": BF16[:1]}.items():
        (tmp_path / name).mkdir()
        logs = tmp_path / name / "logs"
        flows[name] = runs.run(logs, *runs.overrides(warm, logs), *keys)
    for name, values in flows.items():
        assert len(values["train/reward"]) == runs.STEPS, name
        assert max(values["train/reward"]) > 0, name
    mismatch = {name: values["train/token_mult_prob_error"] for name, values in flows.items()}
    for name, by_step in mismatch.items():  # for docs/nemo_rl.md: make test-nemo-rl ARGS="-rP -k keeps"
        rewards = ", ".join(f"{reward:.3f}" for reward in flows[name]["train/reward"])
        print(f"{name:12} token_mult_prob_error {', '.join(f'{x:.6f}' for x in by_step)}; reward {rewards}")
    assert max(mismatch["bf16"]) < 1.001
    assert max(mismatch["fp8_e2e"]) < 1.001
    assert min(mismatch["fp8_rollout"]) > max(*mismatch["bf16"], *mismatch["fp8_e2e"])
    if not find_checkout().version.startswith("0.7"):  # which has no place for what a refit says of itself
        assert flows["bf16"]["refit/wire_over_bf16"][0] == 1
        assert flows["fp8_e2e"]["refit/wire_over_bf16"][0] < 0.505


@pytest.mark.parametrize(
    ("keys", "wire"), [(MXFP8, 0.516), pytest.param(NVFP4, 0.6, marks=pytest.mark.long)], ids=["mxfp8", "nvfp4"]
)
def test_another_format_on_both_sides_keeps_the_mismatch_as_well(warm, tmp_path, keys, wire):
    """In NVFP4 attention stays in bfloat16, also on the wire."""
    values = runs.run(tmp_path / "logs", *runs.overrides(warm, tmp_path / "logs"), *keys, "grpo.max_num_steps=2")
    assert len(values["train/reward"]) == 2
    assert max(values["train/token_mult_prob_error"]) < 1.001
    if not find_checkout().version.startswith("0.7"):
        assert values["refit/wire_over_bf16"][0] < wire


def test_killed_and_resumed_it_gives_the_uninterrupted_runs_numbers(e2e, warm, tmp_path):
    logs = tmp_path / "logs"
    keys = [*runs.overrides(warm, logs), "checkpointing.enabled=true", "checkpointing.save_period=2"]
    killed = runs.start([str(runs.RECIPE), *keys], tmp_path / "killed.txt")
    deadline = time.monotonic() + 300
    while not (tmp_path / "checkpoints/step_2").exists():
        assert killed.poll() is None, (tmp_path / "killed.txt").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    resumed = runs.run(logs, *keys)
    assert len(resumed["train/reward"]) == runs.STEPS - 2
    assert measured(resumed) == measured(e2e, slice(2, None))


def test_out_of_time_it_saves_says_so_and_goes_on(e2e, warm, tmp_path):
    logs = tmp_path / "logs"
    keys = [*runs.overrides(warm, logs), *LONG]
    hurried = runs.start(
        [str(runs.RECIPE), *keys, "checkpointing.checkpoint_must_save_by=00:00:00:01"], tmp_path / "out"
    )
    assert hurried.wait(timeout=300) == 130, (tmp_path / "out").read_text()[-3000:]
    assert_goes_on(e2e, warm, tmp_path, keys)


def assert_goes_on(e2e, warm, folder: Path, keys: list[str]) -> None:
    """From its only checkpoint a run gives the uninterrupted one's numbers."""
    saved = int(next((folder / "checkpoints").glob("step_*")).name.removeprefix("step_"))
    steps = max(saved + 1, runs.STEPS)
    resumed = runs.run(folder / "logs", *keys, f"grpo.max_num_steps={steps}")
    if steps > runs.STEPS:  # on a machine where steps take less than the signal
        (folder / "whole").mkdir()
        logs = folder / "whole/logs"
        e2e = runs.run(logs, *runs.overrides(warm, logs), *LONG, f"grpo.max_num_steps={steps}")
    assert measured(resumed) == measured(e2e, slice(saved, None))


@pytest.mark.parametrize("how", ["signal", "pod"])
def test_told_to_stop_it_saves_the_step_under_way_and_goes_on(e2e, warm, tmp_path, monkeypatch, how):
    monkeypatch.setenv("NEMO_FP8RL_STOP_FOLDER", str(tmp_path / "stop"))
    monkeypatch.setenv("RAY_CLUSTER_NAME", "attempt")
    keys = [*runs.overrides(warm, tmp_path / "logs"), *LONG]
    stopped = runs.start([str(runs.RECIPE), *keys], tmp_path / "out")
    wait_for(tmp_path / "out", "Step 2/" if how == "signal" else "Step 1/", stopped)  # it looks once a second
    if how == "signal":
        stopped.send_signal(signal.SIGUSR1)
    else:
        hook = [sys.executable, "-m", "nemo_fp8rl.cli", "request-stop"]
        subprocess.run(hook, check=True, timeout=120)
        assert list((tmp_path / "checkpoints").glob("step_*"))
    assert stopped.wait(timeout=300) == 130, (tmp_path / "out").read_text()[-3000:]
    assert "Traceback" not in (tmp_path / "out").read_text()
    assert_goes_on(e2e, warm, tmp_path, keys)


def wait_for(log: Path, words: str, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 300
    while words not in log.read_text(errors="replace"):
        assert process.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_validation_a_reference_policy_and_nemo_rls_own_math_environment(warm, tmp_path):
    logs = tmp_path / "logs"
    keys = [*runs.overrides(warm, logs, env="math"), "loss_fn.reference_policy_kl_penalty=0.05"]
    values = runs.run(logs, *keys, "grpo.max_num_steps=2", "grpo.val_at_start=true", "grpo.val_period=1")
    assert len(values["validation/accuracy"]) == 3
    assert values["train/kl_penalty"][0] < 1e-5 < values["train/kl_penalty"][1]  # it has moved from the reference
    page = report([logs], tmp_path / "report.html").read_text()
    for name in ("timing/train/*", "timing/train/total_step_time"):
        assert f'aria-label="{name}"' in page
    assert "validation/accuracy" in page
    assert "Finished, 2 steps." in page
    assert "<td>policy.<wbr>model_<wbr>name</td>" in page
    assert page.count("highest reward") == 2


def test_the_asynchronous_loop_one_step_off(warm, tmp_path):
    logs = tmp_path / "logs"
    keys = [*runs.overrides(warm, logs), *runs.ASYNC, "grpo.max_num_steps=2", "grpo.val_at_start=true"]
    if not find_checkout().version.startswith("0.7"):  # which has no default for it
        keys.append("~grpo.async_grpo.max_trajectory_age_steps")
    values = runs.run(logs, *keys)
    first, second = values["train/token_mult_prob_error"]
    assert first < 1.001
    assert second > 1.01  # the second batch was sampled by the weights of one step before
    assert len(values["validation/accuracy"]) == 1


@pytest.mark.parametrize("recompute", ["true", "false"])
def test_the_asynchronous_loop_with_updates_in_flight_knows_the_version_of_every_token(recompute, warm, tmp_path):
    logs, steps = tmp_path / "logs", 50
    keys = [*runs.overrides(warm, logs), *runs.ASYNC, f"grpo.max_num_steps={steps}", "grpo.async_grpo."
            f"recompute_kv_cache_after_weight_updates={recompute}"]  # fmt: skip
    keys += [f"grpo.async_grpo.{key}" for key in ("in_flight_weight_updates=true", "max_trajectory_age_steps=2")]
    keys += ["policy.generation.max_new_tokens=40", "grpo.num_prompts_per_step=4", "policy.train_global_batch_size=16"]
    keys += ["policy.train_micro_batch_size=16"]
    values = runs.run(logs, *keys)
    shares = {name: by_step for name, by_step in values.items() if name.startswith("train/token_share/")}
    print({name: by_step for name, by_step in values.items() if "version" in name})
    assert shares.keys() <= {f"train/token_share/version_lag_{lag}" for lag in range(3)}  # none is unknown or older
    assert sum(map(sum, shares.values())) == pytest.approx(steps)
    assert "train/token_share/version_lag_1" in shares and len(values["train/reward"]) == steps
    for name in (name.removeprefix("train/token_share/") for name in shares):
        assert len(values[f"train/token_mult_prob_error/{name}"]) == len(shares[f"train/token_share/{name}"])


def test_the_asynchronous_loop_asks_nothing_of_engines_without_weights(warm, tmp_path):
    """v0.7.0 begins to collect before its first refit, and keeps a sample that failed, without an answer."""
    logs = tmp_path / "logs"
    keys = [*runs.overrides(warm, logs), *runs.ASYNC, "grpo.max_num_steps=2"]
    command = [sys.executable, str(Path(__file__).with_name("slow_refit.py")), "20", str(runs.RECIPE), *keys]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=runs.environment(tmp_path), check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Error generating response" not in done.stdout + done.stderr
    values = runs.logged(logs)
    assert values["train/samples_without_answer"] == [0, 0]
    assert min(values["train/mean_gen_tokens_per_sample"]) > 1


def test_where_no_sample_has_an_answer_the_run_ends_in_a_sentence(tiny, tmp_path):
    """NeMo RL's asynchronous rollouts, which its synchronous loop has, too, pass over errors of single samples."""
    keys = [*runs.overrides(tiny, tmp_path / "logs"), "policy.generation.vllm_cfg.async_engine=true"]
    keys += [f"policy.model_name={tiny}/model", f"policy.tokenizer.name={tiny}/model"]
    command = [sys.executable, str(Path(__file__).with_name("failing_answers.py")), str(runs.RECIPE), *keys]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=runs.environment(tmp_path), check=False
    )
    assert done.returncode == 2, done.stderr[-3000:]
    assert "Error generating response for sample 0: no answer comes" in done.stdout
    assert "no sample of this batch has an answer" in done.stderr


def test_the_asynchronous_loop_told_to_stop_saves_the_step_under_way(warm, tmp_path):
    logs = tmp_path / "logs"
    keys = [*runs.overrides(warm, logs), *runs.ASYNC, "checkpointing.enabled=true", "checkpointing.save_period=100"]
    stopped = runs.start([str(runs.RECIPE), *keys, "grpo.max_num_steps=50"], tmp_path / "out")
    wait_for(tmp_path / "out", "Step 2/50", stopped)
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(timeout=300) == 130, (tmp_path / "out").read_text()[-3000:]
    saved = int(next((tmp_path / "checkpoints").glob("step_*")).name.removeprefix("step_"))
    assert 2 <= saved < 10
    values = runs.run(logs, *keys, f"grpo.max_num_steps={saved + 1}")
    assert len(values["train/reward"]) == 1


def test_an_fp8_kv_cache_is_calibrated_by_nemo_rls_loop(warm, tmp_path):
    logs = tmp_path / "logs"
    keys = [*runs.overrides(warm, logs), "policy.generation.vllm_cfg.kv_cache_dtype=fp8", "grpo.val_at_start=true"]
    values = runs.run(logs, *keys, "grpo.max_num_steps=2")
    assert max(values["train/token_mult_prob_error"]) < 1.01
    assert len(values["validation/accuracy"]) == 1
    assert (tmp_path / "output.txt").read_text().count("Recomputing KV cache scales") == 2


def test_an_fp8_kv_cache_is_calibrated_in_the_asynchronous_loop_which_never_asks_for_it(warm, tmp_path):
    logs = tmp_path / "logs"
    keys = [*runs.overrides(warm, logs), *runs.ASYNC, "policy.generation.vllm_cfg.kv_cache_dtype=fp8"]
    keys += ["checkpointing.enabled=true", "checkpointing.save_period=1"]
    keys += [*runs.NO_TRUNCATION, "++nemo_fp8rl.correction.preset=icepop"]
    keys += [f"policy.megatron_cfg.optimizer.{name}=1e-2" for name in ("lr", "min_lr")]  # which moves powers of two
    values = runs.run(logs, *keys, "grpo.max_num_steps=3")
    assert len(values["train/reward"]) == 3
    assert values["train/token_mult_prob_error"][0] < 1.01
    saved = sorted((tmp_path / "checkpoints").glob("step_*/policy/kv_scales.json"))
    assert len(saved) == 3
    assert len({path.read_text() for path in saved}) > 1


def test_a_mixture_in_the_layout_of_its_recipe(tmp_path):
    """Qwen3-30B-A3B's on two nodes, where EP is 8: TP 2 with sequence parallelism, experts whole, an engine of TP 2."""
    make_tiny(tmp_path / "tiny", "add", family="qwen3_moe", moe_intermediate_size=256)  # two blocks for two ranks
    model, data = f"policy.model_name={tmp_path}/tiny/model", f"data.train.data_path={tmp_path}/tiny/data.jsonl"
    sft(
        load(RECIPES / "tiny_sft.yaml", [model, data, "sft.max_num_steps=100", f"logger.log_dir={tmp_path}/sft"]),
        tmp_path / "tiny/warm",
    )
    logs = tmp_path / "logs"
    of_two = ("policy.megatron_cfg.expert_model_parallel_size=2", "cluster.gpus_per_node=2", "grpo.max_num_steps=2")
    recipe = RECIPES / "nemo_rl/qwen3-30b-a3b-fp8-e2e-2n8g.yaml"
    values = runs.run(logs, *runs.overrides(tmp_path / "tiny", logs), *of_two, recipe=recipe)
    print(values["train/token_mult_prob_error"], values["train/reward"], values["train/grad_norm"])
    assert max(values["train/token_mult_prob_error"]) < 1.002
    assert min(values["train/grad_norm"]) > 0
    if not find_checkout().version.startswith("0.7"):
        assert values["refit/wire_over_bf16"][0] < 0.505


def test_several_optimizer_steps_dynamic_sampling_and_a_warm_up(warm, tmp_path):
    """The learning rate moves once a step of the loop, and starts at lr_warmup_init: NeMo RL's schedule."""
    logs = tmp_path / "logs"
    keys = ["policy.train_global_batch_size=32", "policy.train_micro_batch_size=32", "policy.logprob_batch_size=32"]
    keys += ["grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=2", "grpo.overlong_filtering=true"]
    warm_up = {"lr_warmup_iters": 2, "lr_warmup_init": 1e-4}
    keys += [f"policy.megatron_cfg.scheduler.{name}={value}" for name, value in warm_up.items()]
    values = runs.run(logs, *runs.overrides(warm, logs), *keys, "grpo.max_num_steps=3")
    assert values["train/lr"] == pytest.approx([1e-4, 2e-4, 3e-4])
    assert values["train/optimizer_steps_skipped"] == [0, 0, 0]
    assert max(values["train/token_mult_prob_error"]) < 1.001  # a mean, not the sum of two
    assert all(0 < tokens < 32 * 5 for tokens in values["train/global_valid_toks"])  # of one of the two
    assert len(values["train/grad_norm"]) == 3


def test_a_gate_keeps_a_batch_from_being_trained_on(warm, tmp_path):
    logs = tmp_path / "logs"
    gate = "++nemo_fp8rl.gates=[{metric: token_mult_prob_error, max: 1.001, action: skip_step}]"
    values = runs.run(logs, *runs.overrides(warm, logs), *BF16[:1], gate, "grpo.max_num_steps=2")
    assert values["train/optimizer_steps_skipped"] == [1, 1]
    assert min(values["train/token_mult_prob_error"]) > 1.001
    assert values["train/grad_norm"] == [0, 0]


def test_sharpness_is_logged_at_its_steps_and_changes_nothing(e2e, warm, tmp_path):
    logs, names = tmp_path / "logs", ("train/sharpness", "train/sharpness_last_token")
    values = runs.run(logs, *runs.overrides(warm, logs), "++nemo_fp8rl.sharpness.period=2")
    assert all(0 < value < 5 for name in names for value in values[name])
    assert [len(values.pop(name)) for name in names] == [2, 2]
    assert measured(values) == measured(e2e)


def test_conversations_of_several_turns_in_a_registered_environment(warm, tmp_path):
    logs = tmp_path / "logs"
    keys = [*runs.overrides(warm, logs, env="carry_on"), "grpo.max_rollout_turns=3", "grpo.max_num_steps=2"]
    script = Path(__file__).with_name("carry_on.py")
    command = [sys.executable, str(script), str(runs.RECIPE), *keys]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=runs.environment(tmp_path), check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    values = runs.logged(logs)
    assert values["train/avg_turns_per_sample"] == [3, 3]
    assert max(values["train/token_mult_prob_error"]) < 1.001  # of tokens of all turns


def test_our_parts_train_in_a_runner_of_the_users_own(warm, tmp_path):
    """In a Ray cluster that is there already, with engines that are not colocated."""
    logs = tmp_path / "logs"
    apart = ("policy.generation.colocated.enabled=false", "policy.generation.colocated.resources.gpus_per_node=1")
    keys = [*runs.overrides(warm, logs), *apart, "cluster.gpus_per_node=2", "grpo.max_num_steps=2"]
    command = [sys.executable, str(Path(__file__).with_name("loop_runner.py")), str(runs.RECIPE), *keys]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=runs.environment(tmp_path), check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    values = runs.logged(logs)
    assert len(values["train/reward"]) == 2 and max(values["train/token_mult_prob_error"]) < 1.001


def test_a_reward_of_the_users_own_and_answers_that_are_numbers(warm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_rewards.py").write_text(
        "def score(completion, answer, rendered_prompt):\n"
        "    assert rendered_prompt == '12+34=' or answer != 46, rendered_prompt\n"
        "    return 2.0 if int(completion or 0) == answer else -1.0\n"
        "def broken(completions): return [None for _ in completions]\n"
    )
    rows = [{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(12, 42) for b in range(34, 38)]
    Path("numbers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = "++data.train={data_path:numbers.jsonl,split_validation_size:0.05,seed:42}"
    given = [key for key in runs.overrides(warm, tmp_path / "logs") if not key.startswith("++env=")]
    for name, rewards in {"my_rewards:score": (-1, 2), "exact_match": (0, 1)}.items():
        env = f"++data.default.env_name='{name}'"
        values = runs.run(tmp_path / "logs", *given, data, env, "grpo.max_num_steps=1")
        (reward,) = values["train/reward"]
        assert rewards[0] <= reward < rewards[1]
        share = (reward - rewards[0]) / (rewards[1] - rewards[0]) * 64  # of right answers
        assert share == pytest.approx(round(share), abs=1e-3)
    command = [sys.executable, "-m", "nemo_fp8rl.cli", "nemo", "--config", str(runs.RECIPE), *given, data]
    command += ["++data.default.env_name='my_rewards:broken'"]
    env_vars = runs.environment(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=env_vars, check=False)
    assert done.returncode == 2, done.stderr[-3000:]
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("nemo-fp8rl: ")]
    assert "my_rewards:broken returned None for the sample with the answer" in message


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["policy.megatron_cfg.context_parallel_size=2"], "is not a multiple of policy.megatron_cfg"),
        (["+grpo.max_num_stepz=2"], "did you mean"),
        (["policy.generation.vllm_cfg.precision=bfloat16"], "set policy.generation.vllm_cfg.precision=fp8"),
        (["policy.model_name=nowhere"], "policy.model_name"),
        (["++data.default.env_name='no_module:score'"], "there is no module no_module"),
        (["++policy.tokenizer.chat_template=chatml"], "is no template"),
        (["++policy.hf_config_overrides={rope_theta:1}"], "hf_config_overrides"),
    ],
)
def test_bad_input_is_one_sentence(keys, message, warm, tmp_path):
    command = [sys.executable, "-m", "nemo_fp8rl.cli", "nemo", "--config", str(runs.RECIPE)]
    command += [*runs.overrides(warm, tmp_path / "logs"), *keys]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=runs.environment(tmp_path), check=False
    )
    assert done.returncode == 2, done.stderr[-2000:]
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
