"""`nemo-fp8rl report` on the command line: one sentence and exit code 2 if a folder is no run."""

import json
from pathlib import Path

import pytest

from nemo_fp8rl.cli import main


@pytest.fixture
def refused_message(capsys):
    """refused_message(*arguments) returns the only line on stderr of a command that fails with code 2."""

    def run(*arguments: str | Path) -> str:
        assert main(["report", *map(str, arguments)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("nemo-fp8rl: ")
        assert len(err.splitlines()) == 1
        return err

    return run


def test_the_path_of_the_report_is_printed(make_run, capsys):
    run = make_run(steps=3)
    assert main(["report", str(run)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"wrote {run}/report.html (0.")
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_a_folder_that_is_no_run(refused_message, make_run, tmp_path):
    run = make_run(steps=3)
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path}/none is not there" in refused_message(tmp_path / "none")
    assert "metrics.jsonl is no folder" in refused_message(run / "metrics.jsonl")
    assert "empty holds no run: neither config.yaml nor metrics.jsonl" in refused_message(tmp_path / "empty")
    assert "is given twice" in refused_message(run, run.parent / "run")
    (tmp_path / "link").symlink_to(tmp_path / "link")
    assert "give a run directory" in refused_message(tmp_path / "link")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("metrics.jsonl", "{torn\n{}\n", "metrics.jsonl: line 1 is no step of a run"),
        ("metrics.jsonl", '{"train/reward": 1}\n', "metrics.jsonl: line 1 is no step of a run"),
        ("metrics.jsonl", "[1]\n", "metrics.jsonl: line 1 is no step of a run"),
        ("config.yaml", "a: [", "config.yaml cannot be read"),
        ("config.yaml", "a", "config.yaml holds no keys"),
        ("environment.json", "{", "environment.json cannot be read"),
        ("samples.jsonl", '{"step": 1}\n', "samples.jsonl is not as this version writes it"),
        (
            "samples.jsonl",
            '{"step": 1, "samples": [{"prompt": 1}]}\n',
            "samples.jsonl is not as this version writes it",
        ),
        ("histograms.jsonl", '{"step": 1, "log_weights": [3]}\n', "histograms.jsonl is not as this version writes it"),
    ],
)
def test_a_file_that_no_run_wrote(refused_message, make_run, file, text, message):
    run = make_run(steps=3)
    (run / file).write_text(text)
    assert message in refused_message(run)


def test_a_file_of_bytes(refused_message, make_run):
    run = make_run(steps=3)
    (run / "metrics.jsonl").write_bytes(b"\xff\xfe\n")
    assert "metrics.jsonl" in refused_message(run)


def test_an_output_that_cannot_be_written(refused_message, make_run, tmp_path):
    run = make_run(steps=3)
    assert "is a folder; give a file" in refused_message(run, "--output", tmp_path)
    assert "cannot be written" in refused_message(run, "--output", tmp_path / "none/report.html")
    assert not list(tmp_path.rglob("*report*"))


def test_values_that_are_no_numbers_are_left_out(make_run):
    run = make_run(steps=3)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 4, "train/reward": "high", "train/loss": 0.5}) + "\n")
        file.write('{"step": 5, "train/reward": NaN, "train/loss": Infinity}\n')
    assert main(["report", str(run)]) == 0
