"""Values that no run writes, in the files of a run: the page leaves them out, or one sentence refuses them."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from nemo_fp8rl.cli import main
from nemo_fp8rl.commands.report.page import GENERATOR, report
from nemo_fp8rl.common.errors import UserError
from tests.commands.report.test_page import Page, chart_titles, make_page

HALF_SURROGATE = "\ud83d"
"""Half of a surrogate pair: JSON can hold it, UTF-8 cannot."""
DEEP = "[" * 100_000 + "]" * 100_000
DEEP_VALUE = f'{{"a": {DEEP}}}'


def sample_line(**changes: Any) -> str:
    """Return a line of samples.jsonl."""
    sample = {"chosen": "highest reward", "prompt": "3+4=", "reward": 1.0, "policy_version": 0, "num_tokens": 2}
    sample |= {"tokens": ["7", "8"], "prev_logprobs": [-0.5, -0.1], "generation_logprobs": [-0.5, -0.2]}
    return json.dumps({"step": 1, "samples": [sample | changes]}) + "\n"


def append(run: Path, **metrics: Any) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 4, **metrics}) + "\n")


@pytest.mark.parametrize("value", [HALF_SURROGATE, 1e308, -1e308, 10**400, 1e400, "high", None, True, [1], {"a": 1}])
def test_a_metric_that_is_not_finite_is_omitted_and_counted(make_run, value):
    run = make_run(steps=3)
    names = ("reward", "token_mult_prob_error", "gen_kl_error/position_1", "ess")
    append(run, **{f"train/{name}": value for name in names}, **{"weight_error/layer_1": value})
    append(run.parent / "run", **{"timing/total_step_time": value, "timing/train": value, "step": 5})
    page = make_page(run)
    assert "run: values in metrics.jsonl that are no finite numbers are left out, 7 of them" in page.text
    assert "stopped after step" not in page.text


def test_steps_that_cannot_be_drawn_are_refused(make_run):
    run = make_run(steps=3)
    for step in (-1, 10**400, 2**53):
        (run / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\n")
        with pytest.raises(UserError, match=rf"metrics.jsonl has a line of step {str(step)[:20]}"):
            make_page(run)


def test_the_largest_accepted_values_are_drawn(make_run):
    run = make_run(steps=3)
    for step, value in ((4, 1e100), (5, -1e100), (6, 5e-324), (7, 1e9)):
        names = ("train/reward", "train/gen_kl_error", "train/gen_kl_error/position_0", "timing/total_step_time")
        append(run, **dict.fromkeys((*names, "timing/refit"), value), step=step)
    assert "train/reward" in chart_titles(make_page(run))


def test_a_heat_map_of_one_value(make_run):
    run = make_run(steps=3)
    (run / "metrics.jsonl").write_text('{"step": 1, "weight_error/layer_0": 1e9, "weight_error/layer_1": 1e9}\n')
    assert "weight_error/layer_*" in chart_titles(make_page(run))


def test_names_of_buckets_and_layers_without_a_number(make_run):
    run = make_run(steps=3)
    odd = (
        f"{metric}/position_{suffix}"
        for metric in ("train/gen_kl_error", "train/mean_logprob_error")
        for suffix in BUCKET_SUFFIXES
    )
    append(run, **dict.fromkeys((*odd, *(f"weight_error/layer_{suffix}" for suffix in BUCKET_SUFFIXES)), 0.5))
    page = make_page(run)
    assert {"train/gen_kl_error/position_*", "weight_error/layer_*"} <= set(chart_titles(page))
    assert "layer x" not in page.text


BUCKET_SUFFIXES = ("x", "", "x_1", "9" * 5000, "\u0664")
"""The last suffix is an Arabic-Indic digit."""


@pytest.mark.parametrize("place", ["tokens", "prompt", "config", "folder"])
def test_half_a_surrogate_pair_is_written_out(make_run, place):
    name = os.fsdecode(b"run\xff") if place == "folder" else "run"
    run = make_run(name, steps=3)
    if place == "config":
        (run / "config.yaml").write_text('"\\ud83d": "\\ud83d"\n')
    elif place != "folder":
        (run / "samples.jsonl").write_text(
            sample_line(**{place: [HALF_SURROGATE, "7"] if place == "tokens" else HALF_SURROGATE})
        )
    path = report([run], run.parent / "out.html")
    assert ("\\udcff" if place == "folder" else "\\ud83d") in Page(path).text
    assert [other.name for other in run.parent.iterdir() if "partial" in other.name] == []


@pytest.mark.parametrize("value", [1000, 1e308, 10**400, "-1", None, True, [1]])
def test_a_log_prob_that_cannot_be_one(make_run, value):
    run = make_run(steps=3)
    (run / "samples.jsonl").write_text(sample_line(prev_logprobs=[value, -0.1]))
    assert make_page(run).source.count('title="no log-prob on one of the sides"') == 1


@pytest.mark.parametrize("value", [1e308, 10**400, "much", None])
def test_a_reward_that_is_no_number(make_run, value):
    run = make_run(steps=3)
    (run / "samples.jsonl").write_text(sample_line(reward=value))
    assert "highest reward, reward nan" in make_page(run).text


@pytest.mark.parametrize(
    "changes",
    [{"tokens": [1, 2]}, {"prompt": None}, {"chosen": 3}, {"num_tokens": "2"}, {"num_tokens": 1.5}, {"tokens": 3}],
)
def test_samples_of_other_types_are_refused(make_run, changes):
    run = make_run(steps=3)
    (run / "samples.jsonl").write_text(sample_line(**changes))
    with pytest.raises(UserError, match=r"samples.jsonl is not as this version writes it"):
        make_page(run)


def test_bins_without_a_token_are_none(make_run):
    run = make_run(steps=3)
    (run / "histograms.jsonl").write_text('{"step": 1, "log_weights": [[-0.1, 0.1, 0], [0.1, null, 0]]}\n')
    assert "importance weights" not in chart_titles(make_page(run))


@pytest.mark.parametrize(
    "value",
    [
        *([None, None, 3], [float("inf"), None, 3], [0, 0.1, 3], [None, 1e308, 3], [0.2, 0.1, 3], ["a", "b", 3]),
        *([-0.1, 0.1, -3], [-0.1, 0.1, "3"], [-0.1, 0.1, 10**400], [-0.1, 0.1], [-0.1, 0.1, 1.5], 7, [[], {}, 1]),
    ],
)
def test_bins_that_cannot_be_drawn_are_refused(make_run, value):
    """The shares would all change if such a bin was left out."""
    run = make_run(steps=3)
    (run / "histograms.jsonl").write_text(json.dumps({"step": 1, "log_weights": [value]}) + "\n")
    with pytest.raises(UserError, match=r"histograms.jsonl is not as this version writes it"):
        make_page(run)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        *(("environment.json", text) for text in (DEEP, DEEP_VALUE, '{"a":' * 100_000)),
        *(("config.yaml", text) for text in ("[" * 5000, "a: &x {b: *x}", "a: !!timestamp x", "a: !!int ''")),
        *((f"{name}.jsonl", f'{{"step": 1, "a": {DEEP}}}\n') for name in ("metrics", "samples", "histograms")),
    ],
    ids=lambda value: value[:20],
)
def test_a_file_that_no_parser_accepts_is_named(make_run, capsys, file, text):
    run = make_run(steps=3)
    (run / file).write_text(text)
    assert main(["report", str(run)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"nemo-fp8rl: {run}/{file}")
    assert len(err.splitlines()) == 1


def test_deep_values_are_shown_or_refused(make_run):
    run = make_run(steps=3)
    for depth in range(50, 1000, 50):
        (run / "environment.json").write_text('{"a": ' + "[" * depth + "]" * depth + "}")
        try:
            assert make_page(run)
        except UserError as error:
            assert "environment.json cannot be read" in str(error)


# --output


def test_a_device_or_a_pipe_is_not_read(make_run, tmp_path):
    run = make_run(steps=3)
    os.mkfifo(tmp_path / "pipe")
    for output in (Path("/dev/null"), tmp_path / "pipe"):
        with pytest.raises(UserError, match=rf"--output {output} exists and is no report; give another name"):
            report([run], output)


def test_only_the_beginning_of_the_output_is_read(make_run, tmp_path, monkeypatch):
    run, other = make_run(steps=3), tmp_path / "other.html"
    read_paths = []
    monkeypatch.setattr(Path, "read_text", record_paths(Path.read_text, read_paths))
    with open(other, "w") as file:
        file.write("x" * 5000 + GENERATOR)
    with pytest.raises(UserError, match=r"other.html exists and is no report"):
        report([run], other)
    assert other not in read_paths
    assert re.match(r"x{5000}<meta", other.read_text())


def record_paths(function: Any, paths: list[Path]) -> Any:
    return lambda path, *args, **kwargs: (paths.append(path), function(path, *args, **kwargs))[1]
