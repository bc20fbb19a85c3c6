"""make-tiny and demo with folders that have odd names or cannot be written. Most other tests use a tiny model."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_fp8rl.cli import main
from nemo_fp8rl.commands import demo
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.common.errors import UserError
from tests.run.test_directory import files_end_at

ODD_NAMES = ("x #1", "a: b", "[x]", "{a", "${y}", "mm[/b]")


@pytest.mark.parametrize("size", [10, 1_000, 2_000, 100_000])  # config.json, tokenizer, weights
def test_a_failed_write_leaves_nothing(tmp_path, size):
    with files_end_at(size), pytest.raises(UserError, match=rf"{tmp_path}/new cannot be written \("):
        make_tiny(tmp_path / "new", "add")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path, capsys):
    for folder in ("/dev/null/x", "/dev/null/x/y"):
        assert main(["make-tiny", folder]) == 2
        assert capsys.readouterr().err.startswith(f"nemo-fp8rl: {folder} cannot be written (")
    with pytest.raises(UserError, match=r"'new.udcff' holds bytes that are not UTF-8; give a folder with another name"):
        make_tiny(Path(os.fsdecode(b"new\xff")), "add")


def test_the_working_directory_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (".", str(tmp_path)):
        with pytest.raises(UserError, match="is the working directory; give a new folder"):
            make_tiny(Path(folder), "add")


@pytest.mark.parametrize("seed", [10**30, -1, 2**63])
def test_a_seed_out_of_range(tmp_path, seed, capsys):
    assert main(["make-tiny", str(tmp_path / "new"), "--seed", str(seed)]) == 2
    assert f"seed {seed} is out of range; give one from 0 to {2**63 - 1}\n" in capsys.readouterr().err
    make_tiny(tmp_path / "new", "add", 2**63 - 1)


def test_the_next_call_repairs_a_killed_one(tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from nemo_fp8rl.commands import tiny_model as tiny
tiny._save_tokenizer = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
tiny.make_tiny(Path({str(tmp_path / "new")!r}), "add")
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert not (tmp_path / "new").exists()
    make_tiny(tmp_path / "new", "add")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"model", "data.jsonl"}


def test_an_empty_folder_is_taken_and_a_link_to_one_followed(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    make_tiny(tmp_path / "link", "add")
    assert (tmp_path / "empty/model/config.json").exists()
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("name", ODD_NAMES)
def test_the_demo_looks_where_it_writes(tmp_path, monkeypatch, name):
    calls = []
    monkeypatch.setattr(demo, "make_tiny", lambda folder, task: folder.mkdir(parents=True))
    monkeypatch.setattr(demo, "sft", lambda cfg, output, resume_hint: calls.append((cfg, output)) or True)
    monkeypatch.setattr(demo, "train", lambda cfg, resume_hint: calls.append((cfg, resume_hint)))
    assert not demo.demo(tmp_path / name)
    folder = tmp_path / name / "demo-1"
    (warm_up, output), (run, resume_hint) = calls
    assert shlex.split(resume_hint) == ["nemo-fp8rl", "train", f"{folder}/grpo/config.yaml", "--resume"]
    assert output == folder / "warm"
    assert warm_up.policy.model_name == f"{folder}/model"
    assert run.policy.model_name == f"{folder}/warm"
    assert run.logger.log_dir == f"{folder}/grpo"
    assert {cfg.data.train.data_path for cfg in (warm_up, run)} == {f"{folder}/data.jsonl"}


@pytest.mark.parametrize("name", ODD_NAMES)
def test_the_demos_last_lines_can_be_pasted(name):
    first, *lines = demo.next_steps(Path(name) / "demo-1", 7)
    assert first == f"everything is in {name}/demo-1; next:"
    words = [shlex.split(line, comments=True) for line in lines]
    assert [command[:2] for command in words] == [["nemo-fp8rl", name] for name in ("report", "train", "export")]
    assert words[0][2:4] == [f"{name}/demo-1/grpo", f"{name}/demo-1/fp8_rollout"]
    assert words[2][3] == f"{name}/demo-1/grpo/checkpoints/step_7/policy/weights"
