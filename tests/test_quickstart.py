"""The commands and scripts of README and docs/quickstart.md run as they stand, with fewer steps."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_fp8rl.cli import main
from nemo_fp8rl.commands.arguments import parse
from nemo_fp8rl.config.recipe_names import find_recipe

ROOT = Path(__file__).parent.parent
README, PAGE = ((ROOT / name).read_text() for name in ("README.md", "docs/quickstart.md"))
SHORT = {"sft": ("sft.max_num_steps=10",), "train": ("grpo.max_num_steps=2", "logger.tensorboard_enabled=false")}
"""What a test adds to the commands."""


def blocks(page: str, language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def commands(page: str) -> list[list[str]]:
    """The words of every call of this package in the blocks of a page, after the program's name."""
    lines = [line for block in blocks(page) for line in block.splitlines()]
    calls = [re.match(r"\s*(?:nemo-fp8rl|uv run python -m nemo_fp8rl) (.*)", line) for line in lines]
    return [shlex.split(call[1], comments=True) for call in calls if call]


def test_every_command_is_one_of_the_parser_and_every_recipe_is_shipped():
    words = [*commands(README), *commands(PAGE)]
    assert len(words) >= 10
    for line in words:
        parsed = parse(line)
        if hasattr(parsed, "config"):
            folder = "nemo_rl" if parsed.command in ("nemo", "doctor") else ""
            assert find_recipe(parsed.config, folder).is_file()


def test_every_row_of_the_table_of_overrides_is_a_recipe(tmp_path):
    from nemo_fp8rl.config.recipe import load

    rows = re.findall(r"^\|[^|]+\| `([^`]*=[^`]*)`", PAGE, re.MULTILINE)
    assert len(rows) >= 5
    for row in rows:
        load("tiny_cpu", [word for word in shlex.split(row) if "=" in word])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("laptop")


def test_the_parts_of_the_demo_run_one_by_one(folder, monkeypatch, capsys):
    """Up to the export; the page's checkpoint is that of the last of a hundred steps."""
    monkeypatch.chdir(folder)
    wanted = ("make-tiny", "sft", "train", "report", "export")
    parts = [words for words in commands(PAGE) if words[0] in wanted]
    assert [words[0] for words in parts] == list(wanted)
    for words in parts:
        text = " ".join(words).replace("step_100", "step_2")
        assert main([*shlex.split(text), *SHORT.get(words[0], ())]) == 0, capsys.readouterr()
    assert (folder / "runs/tiny/grpo/report.html").exists()
    assert (folder / "runs/tiny/fp8/config.json").exists()


def test_the_script_that_serves_the_result_runs_as_it_stands(folder):
    """In a compiled engine, as vLLM has it by default."""
    assert (folder / "runs/tiny/fp8").exists(), "the test above has to run first"
    (script,) = [block for block in blocks(PAGE, "python") if "quantization=" in block]
    (folder / "serve.py").write_text(script)
    done = subprocess.run([sys.executable, "serve.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"^[0-9+=; >-]+$", done.stdout, re.MULTILINE), done.stdout
