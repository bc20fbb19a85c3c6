"""Supervised training as a run: killed and resumed, in epochs, packed, with a held-out loss; then the start of GRPO."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_fp8rl.cli import main
from nemo_fp8rl.commands.report.page import report
from nemo_fp8rl.commands.sft import sft
from nemo_fp8rl.common.errors import BAD_INPUT, INTERRUPTED
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.data.supervised import load_examples
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.train import train
from tests.conftest import ALIGNED, RECIPES, SMALL
from tests.test_train import read, results, wait_for_step

SIZES = ("policy.train_global_batch_size=64", "policy.train_micro_batch_size=32", "logger.tensorboard_enabled=false")
WSD = tuple(
    f"policy.megatron_cfg.scheduler.{key}"
    for key in ("lr_decay_style=WSD", "lr_decay_iters=6", "lr_wsd_decay_iters=3", "lr_warmup_iters=2")
)
SHORT = ("sft.max_num_steps=6", "sft.val_period=2", "checkpointing.save_period=2", "nemo_fp8rl.flow=fp8_e2e", *WSD)


@pytest.fixture(scope="module")
def words(tiny):
    """words(folder, "key=value", ...) -> the command line of a small run in the folder."""
    paths = (f"policy.model_name={tiny}/model", f"data.train.data_path={tiny}/data.jsonl")

    def make(run: Path, *more: str) -> list[str]:
        return ["sft", str(RECIPES / "tiny_sft.yaml"), *paths, *SIZES, f"logger.log_dir={run}", *more]

    return make


@pytest.fixture(scope="module")
def whole(words, tmp_path_factory) -> Path:
    """The run directory of six steps in one go, with its output in weights/."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert main([*words(run, *SHORT), "--output", f"{run}/output"]) == 0
    return run


def losses(run: Path, name: str) -> list[float]:
    return [row[name] for row in read(run) if name in row]


def test_a_run_has_its_metrics_schedule_and_checkpoints(whole):
    rows = read(whole)
    assert [row["step"] for row in rows] == list(range(7))
    assert [row["step"] for row in rows if "validation/loss" in row] == [0, 2, 4, 6]
    assert rows[-1]["validation/loss"] < rows[0]["validation/loss"]
    lr = 2e-3
    assert losses(whole, "train/lr") == pytest.approx(
        [lr / 2, lr, lr, *(lr * (2 * 0.5 ** (i / 3) - 1) for i in (1, 2, 3))]
    )
    assert [path.name for path in (whole / "checkpoints").glob("step_*")] == ["step_6"]
    choices = json.loads((whole / "environment.json").read_text())["choices"]
    assert choices["trainer_kernels"]
    assert choices.keys().isdisjoint({"engine", "kv cache", "correction", "routes"})
    saved = (whole / "checkpoints/step_6/policy/weights/model.safetensors").read_bytes()
    assert (whole / "output/model.safetensors").read_bytes() == saved
    assert "finished, 6 steps" in report([whole], whole / "report.html").read_text()


def test_sharpness_is_measured_and_neither_it_nor_a_window_changes_a_bit(words, whole, tmp_path):
    run = tmp_path / "run"
    window = "policy.generation.vllm_cfg.kv_window=1"  # of engines
    assert main(words(run, *SHORT, "nemo_fp8rl.sharpness.period=3", window)) == 0
    measured = [row for row in read(run) if "train/sharpness" in row]
    assert [row["step"] for row in measured] == [3, 6]
    assert all(row["train/sharpness"] > 0 and row["train/sharpness_last_token"] > 0 for row in measured)
    weights = "checkpoints/step_6/policy/weights/model.safetensors"
    assert (run / weights).read_bytes() == (whole / weights).read_bytes()


@pytest.mark.parametrize(("action", "status"), [("warn", 0), ("stop", BAD_INPUT), ("skip_step", BAD_INPUT)])
def test_a_gate_on_the_sharpness_warns_or_stops(words, tmp_path, capsys, action, status):
    gates = f"nemo_fp8rl.gates=[{{metric: sharpness, max: 0, action: {action}}}]"
    period = "nemo_fp8rl.sharpness.period=3"
    assert main(words(tmp_path / "run", *SHORT, "sft.max_num_steps=3", period, gates)) == status
    said = capsys.readouterr()
    if action == "skip_step":
        assert "nemo_fp8rl.gates[0].action=skip_step: sft takes every step" in said.err
        return
    assert "step 3: sharpness is" in said.out + said.err
    assert (tmp_path / f"run/checkpoints/step_{3 if action == 'warn' else 2}").is_dir()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_goes_on_to_the_same_bits(words, whole, tmp_path, how):
    command = [sys.executable, "-m", "nemo_fp8rl.cli", *words(tmp_path / "run", *SHORT)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        wait_for_step(process, tmp_path / "run", 3)
        process.send_signal(how)
    assert process.returncode == (INTERRUPTED if how == signal.SIGINT else -signal.SIGKILL)
    assert main([*words(tmp_path / "run", *SHORT), "--resume", "--output", f"{tmp_path}/output"]) == 0
    assert results(tmp_path / "run") == results(whole)
    files = [path.relative_to(whole) for path in (whole / "checkpoints/step_6").rglob("*.safetensors")]
    assert len(files) >= 2
    assert [str(file) for file in files if (tmp_path / "run" / file).read_bytes() != (whole / file).read_bytes()] == []
    written = (tmp_path / "output/model.safetensors").read_bytes()
    assert written == (whole / "output/model.safetensors").read_bytes()


def test_a_finished_run_writes_its_output_and_takes_nothing_else(words, whole, tmp_path, capsys):
    assert main([*words(whole, *SHORT), "--resume", "--output", f"{tmp_path}/again"]) == 0
    written = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert written == {path.name: path.read_bytes() for path in (whole / "output").iterdir()}
    for changed, message in (
        (("sft.seed=7",), "--resume: sft.seed was 42 and is now 7"),
        (("data.train.kind=text", "data.train.input_key=prompt"), "--resume: data.train.kind was answers"),
    ):
        assert main([*words(whole, *SHORT, *changed), "--resume"]) == BAD_INPUT
        assert message in capsys.readouterr().err
    assert main(["train", f"{whole}/config.yaml", "--resume", "grpo.num_prompts_per_step=64"]) == BAD_INPUT
    assert f"--resume: {whole} is a run of `nemo-fp8rl sft`" in capsys.readouterr().err
    assert main(words(whole, *SHORT)) == BAD_INPUT
    assert "holds a run: add --resume" in capsys.readouterr().err


def test_other_data_is_not_resumed(words, whole, tiny, tmp_path, capsys):
    lines = (tiny / "data.jsonl").read_text().splitlines()
    (tmp_path / "data.jsonl").write_text("\n".join(lines[1:]))
    changed = (f"data.train.data_path={tmp_path}/data.jsonl", "sft.max_num_steps=8")
    assert main([*words(whole, *SHORT, *changed), "--resume"]) == BAD_INPUT
    assert "--resume: the examples or their tokens are not those that the run began with" in capsys.readouterr().err


def test_an_epoch_has_its_whole_steps_and_may_be_raised(words, tiny, tmp_path):
    lines = (tiny / "data.jsonl").read_text().splitlines()[:110]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    data = (f"data.train.data_path={tmp_path}/data.jsonl", "data.train.split_validation_size=0.1")
    batch = ("policy.train_global_batch_size=40", "policy.train_micro_batch_size=40", "checkpointing.save_period=1")
    for epochs, more in ((1, ()), (2, ("--resume",))):
        assert main([*words(tmp_path / "run", *data, *batch, f"sft.max_num_epochs={epochs}"), *more]) == 0
        assert losses(tmp_path / "run", "train/epoch") == [step * 40 / 99 for step in range(1, 2 * epochs + 1)]


def test_packed_sequences_have_the_loss_of_padded_ones(words, tmp_path):
    """Sums of gradients have another order: the first losses are equal to 1e-6, later ones to 1e-3 in FP8."""
    packed = [
        f"policy.sequence_packing.{key}" for key in ("enabled=true", "train_mb_tokens=256", "logprob_mb_tokens=96")
    ]
    short = ("sft.max_num_steps=4", "sft.val_period=2", "nemo_fp8rl.flow=fp8_e2e", "checkpointing.enabled=false")
    assert main(words(tmp_path / "padded", *short)) == 0
    assert main(words(tmp_path / "packed", *short, *packed)) == 0
    for name in ("train/loss", "validation/loss"):
        found, expected = losses(tmp_path / "packed", name), losses(tmp_path / "padded", name)
        assert found[0] == pytest.approx(expected[0], rel=1e-6)
        assert found == pytest.approx(expected, rel=1e-3)


def test_the_held_out_loss_is_that_of_transformers(words, tiny, tmp_path):
    """In float32, over batches of unequal sizes: the mean over tokens, not over batches."""
    keys = ("policy.precision=float32", "nemo_fp8rl.flow=bf16", "sft.max_num_steps=1", "sft.val_at_end=false")
    few = ("sft.val_batches=3", "sft.val_global_batch_size=7", "checkpointing.enabled=false")
    arguments = words(tmp_path / "run", *keys, *few)
    assert main(arguments) == 0
    cfg = load(arguments[1], arguments[2:])
    model = AutoModelForCausalLM.from_pretrained(tiny / "model", dtype=torch.float32)
    total, tokens = 0.0, 0
    for example in load_examples(cfg, read_hf_config(tiny / "model")).validation[:21]:
        ids = example.token_ids.long()
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        total -= float(logprobs[example.loss_mask[1:]].sum())
        tokens += int(example.loss_mask[1:].sum())
    assert losses(tmp_path / "run", "validation/loss") == [pytest.approx(total / tokens, rel=1e-5)]


@pytest.mark.long
def test_two_ranks_have_the_losses_of_one(words, tmp_path):
    """The last held-out batch does not divide among them; their gradients are sums of rounded parts."""
    few = ("sft.max_num_steps=2", "sft.val_batches=2", "sft.val_global_batch_size=7", "checkpointing.enabled=false")
    assert main(words(tmp_path / "one", *few)) == 0
    ranks = ("cluster.backend=ray", "cluster.train_ranks=2")
    command = [sys.executable, "-m", "nemo_fp8rl.cli", *words(tmp_path / "two", *few, *ranks)]
    subprocess.run(command, check=True)  # Ray must not be imported before its token
    for name in ("validation/loss", "train/loss"):
        assert losses(tmp_path / "two", name) == pytest.approx(losses(tmp_path / "one", name), rel=1e-3)
    first = [losses(tmp_path / run, "validation/loss")[0] for run in ("one", "two")]
    assert first[0] == pytest.approx(first[1], rel=1e-6)


@pytest.mark.long
def test_infir2s_three_stages_in_fp8_throughout(tiny, tmp_path):
    """Continual pre-training, supervised training, GRPO: each from the checkpoint of the one before."""
    data = f"data.train.data_path={tiny}/data.jsonl"

    def recipe(stage: str, model: Path, *more: str):
        keys = (f"policy.model_name={model}", data, f"logger.log_dir={tmp_path}/{stage}", *more)
        cfg = load(RECIPES / f"infir2/{stage}-tiny_cpu.yaml", list(keys))
        assert cfg.nemo_fp8rl.flow == "fp8_e2e"
        return cfg

    assert sft(recipe("cpt", tiny / "model"), tmp_path / "pretrained")
    assert sft(recipe("sft", tmp_path / "pretrained", "sft.max_num_epochs=5"), tmp_path / "tuned")
    for stage in ("cpt", "sft"):
        held_out = losses(tmp_path / stage, "validation/loss")
        assert held_out[-1] < 0.8 * held_out[0]
    more = (*SMALL, "grpo.max_num_steps=3", "grpo.val_period=0")
    assert train(recipe("rl", tmp_path / "tuned", *more))
    rows = read(tmp_path / "rl")[1:]
    assert all(row["train/token_mult_prob_error"] < ALIGNED for row in rows)
    assert any(row["train/reward"] > 0 for row in rows)
