"""Paths and texts that YAML would read otherwise, and runs that are damaged."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from nemo_fp8rl.cli import main
from nemo_fp8rl.commands.compare.comparison import as_words, load_comparison
from nemo_fp8rl.commands.compare.run_list import PlannedRun, plan
from nemo_fp8rl.commands.compare.same_inputs import check_same_inputs
from nemo_fp8rl.commands.compare.start_models import make_models
from nemo_fp8rl.common.atomic_files import lock_folder
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.yaml_tree import read_override
from nemo_fp8rl.run.stop_flag import StopFlag
from tests.conftest import RECIPES

ODD = (
    *("x #1", "a: b", "[x]", "{a", "${y}", r"\${y}", r"\\${y", "$${y}", "'x\"", "null", "1e3", "\U0001f600é"),
    "a\x85b\x7f\n ",
)
MODEL = {"warm_up": str(RECIPES / "tiny_sft.yaml")}
ENVIRONMENT = {"machine": "m", "python": "3.11", "versions": {"torch": "2"}, "choices": {"flow": "bf16"}}


@pytest.mark.parametrize("name", ODD)
def test_a_value_arrives_as_it_was_given(name):
    for value in (name, [name, 1, None, 0.5], {"b": name}):
        (word,) = as_words({"a": value})
        assert OmegaConf.to_container(read_override(word), resolve=True) == {"a": value}


@pytest.mark.parametrize("name", ODD)
def test_runs_and_their_model_are_in_the_folder_that_was_given(write, tmp_path, name, monkeypatch):
    out, asked = tmp_path / name, []
    comparison = load_comparison(write(model=MODEL))
    for run in plan(comparison, [], out):
        assert run.config["logger.log_dir"] == str(out / run.flow / f"seed_{run.seed}")
        assert run.config["checkpointing.checkpoint_dir"].startswith(f"{out}/{run.flow}/")
        assert run.config["policy.model_name"] == f"{out}/models/flows/warm"
        assert run.config["data.train.data_path"] == f"{out}/models/flows/data.jsonl"
    monkeypatch.setattr("nemo_fp8rl.commands.compare.start_models.run", lambda words, *_: asked.append(words) or True)
    monkeypatch.setattr("nemo_fp8rl.commands.tiny_model.write_model", lambda folder, *_: folder.mkdir())
    assert make_models(comparison, out, StopFlag(), print, [])
    given = [read_override(word) for word in asked[0] if word.startswith("policy.model_name=")]
    assert [tree.policy.model_name for tree in given] == [f"{out}/models/.flows.partial/model"]


def test_a_folder_whose_name_is_no_text(write, tmp_path, capsys):
    out = tmp_path / os.fsdecode(b"x\xff")
    assert main(["compare", str(write()), "--output", str(out)]) == 2
    assert "holds bytes that are not text; give it another name" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["results.json", "results.md"])
def test_a_flow_is_not_called_as_a_file_of_ours(write, name):
    with pytest.raises(UserError, match=rf"'{name}' cannot be a folder of runs"):
        load_comparison(write(flows={"bf16": {}, name: {}}))


# Damaged runs


@pytest.fixture
def finished(write, tmp_path) -> tuple[Path, Path]:
    """A comparison's file, and the folder of its one finished run."""
    path = write(seeds=[1], flows={"bf16": {}}, overrides={"grpo.max_num_steps": 2})
    (run,) = plan(load_comparison(path), [], tmp_path / "out")
    leave(run, ENVIRONMENT)
    return path, run.folder


def leave(run: PlannedRun, environment: dict[str, object]) -> None:
    """What a run of two steps leaves."""
    run.folder.mkdir(parents=True)
    (run.folder / "config.yaml").write_text(yaml.safe_dump(run.config))
    (run.folder / "environment.json").write_text(json.dumps(environment))
    rows = [{"step": step, "train/reward": 0.5, "timing/total_step_time": 1.0} for step in (1, 2)]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(path: Path, run: Path) -> int:
    return main(["compare", str(path), "--output", str(run.parent.parent), "--table-only"])


def test_a_whole_run_is_shown(finished, capsys):
    assert table(*finished) == 0
    assert "1 of 1 runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"data": {"validation": "1"}}, {"data": {"validation": "2"}}, "other held-out prompts than"),
        ({"data": {"model": "1"}}, {"data": {"model": "2"}}, "other model than"),
        ({"data": {"training": "1", "model": "1"}}, {"data": {"training": "1"}}, ""),
        ({"data": {"training": "1"}}, {}, ""),
        ({}, {"data": 1}, ""),
    ],
)
def test_runs_on_other_inputs_by_the_same_recipe_are_not_compared(write, tmp_path, capsys, first, second, said):
    path = write(seeds=[1, 2], flows={"bf16": {}}, overrides={"grpo.max_num_steps": 2})
    for run, differs in zip(plan(load_comparison(path), [], tmp_path / "out"), (first, second), strict=True):
        leave(run, ENVIRONMENT | differs)
    assert main(["compare", str(path), "--output", str(tmp_path / "out"), "--table-only"]) == (2 if said else 0)
    assert said in capsys.readouterr().err


def test_runs_of_two_commits_of_a_model_are_not_compared(write, tmp_path, capsys):
    path = write(seeds=[1, 2], flows={"bf16": {}}, overrides={"grpo.max_num_steps": 2})
    runs = plan(load_comparison(path), [], tmp_path / "out")
    for run, commit in zip(runs, "ab", strict=True):
        asked = replace(run, config=run.config | {"policy.model_name": "owner/model"})
        leave(replace(run, config=run.config | {"policy.model_name": f"owner/model@{commit * 40}"}), ENVIRONMENT)
        runs[runs.index(run)] = asked
    with pytest.raises(UserError, match=r"seed_2 had other policy\.model_name than .*seed_1, by the same recipe"):
        check_same_inputs(runs, [ENVIRONMENT] * 2)
    check_same_inputs(runs[:1], [ENVIRONMENT])


def test_a_reader_that_leaves_ends_no_comparison(finished):
    path, run = finished
    command = [sys.executable, "-m", "nemo_fp8rl.cli", "compare", str(path), "--output", str(run.parent.parent)]
    with subprocess.Popen([*command, "--table-only"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as compare:
        compare.stdout.close()
        assert compare.stderr.read() == b""
        assert compare.wait(timeout=60) == 0
    assert (run.parent.parent / "results.md").exists()


def test_the_table_beside_a_comparison_that_runs_leaves_the_files_to_it(finished, capsys):
    path, run = finished
    results = run.parent.parent / "results.json"
    results.write_text("the comparison's")
    with lock_folder(results.parent, "taken"):
        assert table(path, run) == 0
        assert results.read_text() == "the comparison's"
    assert table(path, run) == 0
    assert json.loads(results.read_text())["runs"]
    assert capsys.readouterr().out.count("1 of 1 runs") == 2


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(("environment.json", text) for text in (None, b"", b"{", b"[]", b"{}", b"\xff", b"[" * 100_000)),
        *(("environment.json", json.dumps(ENVIRONMENT | {key: 1}).encode()) for key in ENVIRONMENT),
        *(("config.yaml", text) for text in (b"\xff\x00", b"a: [", b"[]", b"a: &x {b: *x}", b"a: !!int ''")),
        *(("metrics.jsonl", text) for text in (b"\xff\n", b"{\n", b"[]\n", b"{}\n", b'{"step": "2"}\n')),
        *(("metrics.jsonl", b'{"step": 2, "a": %s}\n' % value) for value in (b'"x"', b"NaN", b"null", b"[1]")),
        ("metrics.jsonl", b'{"step": 2, "a": 1%s}\n' % (b"0" * 400)),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_a_damaged_run_is_named_with_what_to_do(finished, capsys, file, content):
    path, run = finished
    (run / file).unlink()
    if content is not None:
        (run / file).write_bytes(content)
    assert table(path, run) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"nemo-fp8rl: {run}/{file}")
    assert err.endswith(f"remove {run}, and compare runs it anew\n")
    assert len(err.splitlines()) == 1


def test_positions_without_a_number_are_left_out(finished):
    path, run = finished
    rows = [
        {"step": step, **{f"train/gen_kl_error/position_{end}": 0.5 for end in ("x", "2_3", "1")}} for step in (1, 2)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert table(path, run) == 0
    results = json.loads((run.parent.parent / "results.json").read_text())
    assert list(results["runs"][0]["k3_by_position"]) == ["1", "2_3"]


def test_a_model_that_is_damaged_is_another_one(write, tmp_path):
    (tmp_path / "out/models/flows").mkdir(parents=True)
    (tmp_path / "out/models/flows/made.json").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"models/flows was made by another comparison"):
        plan(load_comparison(write(model=MODEL)), [], tmp_path / "out")


def test_an_output_that_is_a_file_is_named(write, tmp_path, capsys):
    (tmp_path / "out").write_text("")
    assert main(["compare", str(write()), "--output", str(tmp_path / "out")]) == 2
    assert f"--output {tmp_path}/out is no folder; give another" in capsys.readouterr().err
