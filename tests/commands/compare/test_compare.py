"""Real runs: a comparison that was interrupted goes on, one that is done stands still."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_fp8rl.cli import main
from nemo_fp8rl.commands.compare import compare_command, subprocess_run
from tests.commands.compare.conftest import FLOWS
from tests.conftest import RECIPES, SMALL

STEPS = 12
SECOND = "fp8_rollout+correction/seed_1"


def comparison(folder: Path, **changes: object) -> Path:
    tree = {
        "recipe": str(RECIPES / "tiny_cpu.yaml"),
        "overrides": {"grpo.max_num_steps": STEPS, "checkpointing.save_period": 2, "grpo.val_period": 0},
        "seeds": [1],
        "reference": "bf16",
        "flows": FLOWS,
    }
    path = folder / "comparison.yaml"
    path.write_text(json.dumps(tree | changes))
    return path


def arguments(path: Path, words: tuple[str, ...], out: Path) -> list[str]:
    return ["compare", str(path), *words, "--output", str(out)]


def stat(out: Path) -> dict[str, int]:
    """When each run's files were written."""
    return {str(path): path.stat().st_mtime_ns for path in out.rglob("seed_*/*") if path.is_file()}


@pytest.fixture(scope="module")
def story(tiny_overrides, tmp_path_factory) -> SimpleNamespace:
    """One comparison, stopped by Ctrl-C in its second run, then called again until it is done."""
    folder = tmp_path_factory.mktemp("story")
    path, out = comparison(folder), folder / "out"
    command = [sys.executable, "-m", "nemo_fp8rl.cli", *arguments(path, tiny_overrides, out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 180
    metrics = out / SECOND / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "the second run did not come to its second step"
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    stopped, _ = process.communicate(timeout=120)
    known, logged = json.loads((out / "results.json").read_text()), len(metrics.read_text().splitlines()) - 1
    first_run = stat(out / "bf16")
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    return SimpleNamespace(
        path=path,
        words=tiny_overrides,
        out=out,
        code=subprocess_run.returncode,
        stopped=stopped,
        known=known,
        logged=logged,
        first_run_untouched=first_run == stat(out / "bf16"),
        done=done,
        results=json.loads((out / "results.json").read_text()),
    )


@pytest.mark.long
def test_ctrl_c_ends_it_between_steps_and_says_how_to_go_on(story):
    assert story.code == 130, story.stopped
    said = re.search(r"stopped in fp8_rollout\+correction seed 1 after step (\d+) of 12", story.stopped)
    assert said, story.stopped
    assert int(said[1]) == story.logged < STEPS
    assert "Traceback" not in story.stopped


@pytest.mark.long
def test_what_is_known_by_then_is_shown_without_the_unfinished_run(story):
    assert [run["flow"] for run in story.known["runs"]] == ["bf16"]
    assert "1 of 2 runs" in story.stopped


@pytest.mark.long
def test_called_again_it_goes_on_from_the_checkpoint(story):
    assert story.done.returncode == 0, story.done.stdout + story.done.stderr
    assert "1 of 2 runs have finished, 1 to go" in story.done.stdout
    assert story.first_run_untouched
    log = (story.out / SECOND / "train.log").read_text()
    assert log.count("step 1/12  reward") == 1
    assert log.count("step 12/12  reward") == 1


@pytest.mark.long
def test_every_run_has_its_numbers(story):
    """From its own metrics.jsonl."""
    assert [(run["flow"], run["seed"], run["steps"]) for run in story.results["runs"]] == [
        (flow, 1, STEPS) for flow in FLOWS
    ]
    for run in story.results["runs"]:
        rows = [json.loads(x) for x in (story.out / run["flow"] / "seed_1/metrics.jsonl").read_text().splitlines()]
        errors = [row["train/token_mult_prob_error"] for row in rows if row["step"] > 0]
        assert len(errors) == STEPS
        assert run["numbers"]["token_mult_prob_error"] == pytest.approx(sum(errors) / STEPS)
        assert run["numbers"]["accuracy_end"] == rows[-1]["validation/accuracy"]
    flows = {run["flow"]: run for run in story.results["runs"]}
    fp8 = flows["fp8_rollout+correction"]
    assert fp8["numbers"]["token_mult_prob_error"] > flows["bf16"]["numbers"]["token_mult_prob_error"]
    assert fp8["choices"]["engine"] == "FP8 in blocks of 128x128"
    assert fp8["choices"]["engine_kernels"].endswith("fp8.fprop (emulated)")
    assert fp8["choices"]["trainer_kernels"] == "none in FP8"
    assert "torch" in story.results["versions"]
    page = (story.out / "results.md").read_text()
    assert "| fp8_rollout+correction | 1 |" in page
    assert "too few seeds for an interval" in page


@pytest.mark.long
def test_a_third_call_runs_nothing(story):
    before = stat(story.out)
    begin = time.monotonic()
    assert main(arguments(story.path, story.words, story.out)) == 0
    assert time.monotonic() - begin < 5
    assert stat(story.out) == before


@pytest.mark.long
def test_the_output_may_move(story, tmp_path, capsys):
    shutil.copytree(story.out, tmp_path / "moved", ignore=shutil.ignore_patterns("checkpoints"))
    assert main([*arguments(story.path, story.words, tmp_path / "moved"), "--table-only"]) == 0
    assert "2 of 2 runs" in capsys.readouterr().out


def test_a_run_that_fails_is_named_with_its_last_words(tmp_path, capsys):
    words = (*SMALL, f"policy.model_name={tmp_path}/none", f"data.train.data_path={tmp_path}/none.jsonl")
    assert main(arguments(comparison(tmp_path), words, tmp_path / "out")) == 2
    out, err = capsys.readouterr()
    assert "0 of 2 runs have finished, 2 to go" in out
    assert f"train ended with code 2, see {tmp_path}/out/bf16/seed_1/train.log: nemo-fp8rl: " in err
    assert f"{tmp_path}/none" in err


def test_a_flow_that_this_machine_cannot_have_is_left_out(tiny_overrides, tmp_path, capsys, monkeypatch):
    """Before anything runs; with no other flow it is refused."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    started: list[Path] = []
    monkeypatch.setattr(compare_command, "run_process", lambda words, log, *rest: started.append(log) or True)
    triton = {"policy.generation.vllm_cfg.attention_backend": "TRITON_ATTN"}
    path, out = comparison(tmp_path, seeds=[1, 2], flows={**FLOWS, "triton": triton}), tmp_path / "out"
    assert main(arguments(path, tiny_overrides, out)) == 0
    assert [log.parent.parent.name for log in started] == [*FLOWS, *FLOWS]
    out_of_it = "triton is left out: policy.generation.vllm_cfg.attention_backend=TRITON_ATTN: "
    assert capsys.readouterr().out.count(out_of_it) == 1
    results = json.loads((out / "results.json").read_text())
    assert results["planned"] == 4 and results["left_out"][0].startswith("triton is left out")
    assert "- triton is left out" in (out / "results.md").read_text()

    path = comparison(tmp_path, reference="triton", flows={"triton": triton})
    assert main(arguments(path, tiny_overrides, tmp_path / "other")) == 2
    assert "this machine supports none of its flows: policy.generation" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [0, 1])
def test_ctrl_c_before_a_command_has_begun_is_an_interruption(tmp_path, asked):
    """asked: which question after it is the first that hears of it; Python takes a while to hear a signal itself."""
    answers = iter([False] * asked + [True] * 9)

    class Stop:
        @property
        def is_set(self):
            return next(answers)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what ignores it hands that on
    try:
        assert (
            subprocess_run.run(["make-tiny", str(tmp_path / "tiny")], tmp_path / "log", Stop(), lambda: None, ())
            is False
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (tmp_path / "tiny").exists()


def test_what_a_killed_comparison_had_started_is_left_alone(tmp_path, capsys):
    """Its warm-up goes on, so that a second call waits for it instead of clearing the folder below it."""
    model = {"warm_up": str(RECIPES / "tiny_sft.yaml"), "overrides": {"sft.max_num_steps": 50}}
    path, out = comparison(tmp_path, model=model), tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-m", "nemo_fp8rl.cli", *arguments(path, SMALL, out)])
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 120
    while not (out / "models/flows.log").exists() or not (started := children.read_text().split()):
        assert process.poll() is None
        assert time.monotonic() < deadline, "the warm-up did not begin"
        time.sleep(0.1)
    process.kill()
    process.wait()
    try:
        assert main(arguments(path, SMALL, out)) == 2
        assert f"another compare works in {out}, or a command that a killed compare started" in capsys.readouterr().err
        assert (out / "models/.flows.partial/model").exists()
    finally:
        os.kill(int(started[0]), signal.SIGKILL)


@pytest.mark.long
def test_models_are_made_and_answers_of_several_lengths_measured(tmp_path, capsys):
    """One flow; tokens an answer differ with the length, the table says so. Another comparison's models are refused."""
    warm_up = str(RECIPES / "tiny_sft.yaml")
    model = {"warm_up": warm_up, "overrides": {"sft.max_num_steps": 3}}
    lengths = {
        "terms": {"short": 3, "long": 6},
        "flows": ["bf16"],
        "warm_up": warm_up,
        "warm_up_overrides": {"sft.max_num_steps": 60},
        "overrides": {
            "policy.generation.max_new_tokens": 40,
            "grpo.val_at_start": False,
            "grpo.val_at_end": False,
        },
    }
    parts = {"flows": {"bf16": FLOWS["bf16"]}, "lengths": lengths}
    path, out = comparison(tmp_path, model=model, **parts), tmp_path / "out"
    words = (*SMALL, "grpo.max_num_steps=2")
    assert main(arguments(path, words, out)) == 0
    results = json.loads((out / "results.json").read_text())
    assert [run["length"] for run in results["runs"]] == [None, "short", "long"]
    tokens = {run["length"]: run["numbers"]["tokens_per_answer"] for run in results["runs"]}
    assert tokens["long"] > tokens["short"]
    page = (out / "results.md").read_text()
    assert "| bf16 | long | 1 |" in page
    assert "k3 KL by position in long answers" in page

    path = comparison(tmp_path, model=model | {"overrides": {"sft.max_num_steps": 4}}, **parts)
    assert main(arguments(path, words, out)) == 2
    assert "models/flows was made by another comparison; give another --output" in capsys.readouterr().err
