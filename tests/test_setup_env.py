"""`tools/setup_env.py`, run as `make` runs it, in a project of its own and with a pip that installs nothing."""

import fcntl
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = ("tools/setup_env.py", "pyproject.toml", *(f"requirements/{name}.txt" for name in ("torch", "lock", "dev")))
INDEX = "https://download.pytorch.org/whl/cpu"
TORCH, LOCK = "--only-binary=:all: -r torch.txt", "--only-binary=:all: -rlock.txt"
THIS, DEV = "--no-build-isolation -e .", "--only-binary=:all: -rdev.txt"

Answer = Callable[[str], str]
"""What a pip with these arguments writes; one that fails writes ERROR."""


class Project:
    """The files that the set-up reads, in a folder, and what it asks of pip."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for file in FILES:
            (root / file).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / file, root / file)

    def set_up(self, answer: Answer = lambda arguments: "") -> list[str]:
        """Run it; the arguments of each pip, without those of all."""
        self.answer, self.asked = answer, list[str]()
        runpy.run_path(str(self.root / "tools/setup_env.py"), run_name="__main__")
        return self.asked

    def run(self, command: list[str], stdout, **_: object) -> subprocess.CompletedProcess:
        """In the place of `subprocess.run`: makes an empty virtual environment, and answers for its pip."""
        output = ""
        if command[1:3] == ["-m", "venv"]:
            scripts = Path(command[3]) / "bin"
            scripts.mkdir()
            (scripts / "python").touch()
            (scripts / "pip").write_text(f"#!{scripts}/python\n")
        elif command[1:3] == ["-m", "pip"]:
            assert command[3:6] == ["install", "--no-deps", "--no-compile"]
            self.asked.append(" ".join(command[6:]).replace(f"{self.root}/requirements/", ""))
            output = self.answer(self.asked[-1])
        stdout.write(output.encode())
        return subprocess.CompletedProcess(command, "ERROR" in output)


@pytest.fixture
def project(tmp_path, monkeypatch) -> Project:
    made = Project(tmp_path.resolve())
    monkeypatch.setattr(subprocess, "run", made.run)
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # which ends with the process, and this one goes on
    monkeypatch.setattr(sys, "argv", ["setup_env.py"])
    return made


def without(package: str, *places: str) -> Answer:
    """A pip that is asked for this package, and does not find it in these places ("" is its configured sources)."""
    missing = f"ERROR: No matching distribution found for {package}==1.0\n"

    def answer(arguments: str) -> str:
        place = arguments.partition("--index-url ")[2]
        return missing if package in arguments and place in places else ""

    return answer


def test_torch_comes_from_pips_sources_where_they_have_a_cpu_build(project, capsys):
    assert project.set_up() == [TORCH, LOCK, THIS]
    assert "torch (CPU build) ... from pip's configured sources" in capsys.readouterr().out


def test_torch_comes_from_pytorchs_cpu_index_where_pips_sources_have_no_cpu_build(project, capsys):
    assert project.set_up(without("torch", "")) == [TORCH, f"{TORCH} --index-url {INDEX}", LOCK, THIS]
    assert f"torch (CPU build) ... from {INDEX}" in capsys.readouterr().out


def test_a_second_run_calls_pip_for_what_changed_alone(project, capsys, monkeypatch):
    project.set_up()
    capsys.readouterr()
    assert project.set_up() == []
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys, "argv", ["setup_env.py", "dev"])
    assert project.set_up() == [DEV]
    assert project.set_up() == []
    (project.root / "requirements/lock.txt").write_text("another==1.0\n")
    assert project.set_up() == [TORCH, LOCK, THIS, DEV]
    monkeypatch.setattr(sys, "argv", ["setup_env.py"])
    assert project.set_up() == []


def only(arguments: str, output: str) -> Answer:
    return lambda given: output if given == arguments else ""


FAILURES = {
    "no torch": (without("torch", "", INDEX), rf"torch==\S+ for Python .* gave no wheel and {INDEX} gave no wheel: .*"),
    "no wheel": (
        only(LOCK, "ERROR: No matching distribution found for ray==1.0\n"),
        r"pip's package sources have no wheel of ray==1.0 for Python .*: add a source that has it, then .*",
    ),
    "no network": (
        only(LOCK, "Collecting ray==1.0\nWARNING: connection broken by 'Timeout'\nERROR: No matching distribution ..."),
        r"pip could not reach a package index for ray==1.0: check the network, .*",
    ),
    "full disk": (
        only(TORCH, "Collecting torch==1.0\nERROR: Could not install: [Errno 28] No space left on device\n"),
        r"the disk is full while installing torch==1.0: free about 3 GB .*",
    ),
    "pip itself": (
        only(THIS, "Traceback (most recent call last):\n  ...\nERROR: metadata cannot be made.\n"),
        r"pip could not install this project \(metadata cannot be made\): solve that, then .*",
    ),
}


@pytest.mark.parametrize(("answer", "sentence"), FAILURES.values(), ids=FAILURES)
def test_a_pip_that_fails_is_one_sentence_with_the_log_and_the_same_command_continues(
    project, capsys, answer, sentence
):
    with pytest.raises(SystemExit) as ended:
        project.set_up(answer)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert re.fullmatch(rf"set-up failed: {sentence} \(details: \.venv/setup\.log\)\.\n", said), said
    assert "ERROR: " in (project.root / ".venv/setup.log").read_text()
    assert project.set_up() == [TORCH, LOCK, THIS]
