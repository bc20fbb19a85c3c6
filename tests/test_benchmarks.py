"""Every benchmark runs, at its smallest: what a figure in the docs comes from must not break unseen."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
ARGUMENTS = {
    "alignment": ["--samples", "8", "--folder", "{}"],
    "bandit": ["--seeds", "1", "--steps", "20", "--json", "{}/figures.json"],
    "checkpoint": ["--layers", "1", "--rounds", "1", "--json", "{}/figures.json"],
    "links": ["--bucket-mib", "1", "--buckets", "3", "--json", "{}/figures.json"],
    "layouts": ["--steps", "1", "--folder", "{}"],
    "logprobs": ["--rows", "2", "--tokens", "2048", "--hidden", "16", "--json", "{}/figures.json"],
    "loss": ["--rows", "32", "--columns", "256", "--rounds", "1", "--json", "{}/figures.json"],
    "mismatch": ["--steps", "1", "--folder", "{}"],
    "quantize": ["--rows", "512", "--columns", "1024", "--rounds", "2", "--json", "{}/figures.json"],
    "quantize_gpu": ["--rows", "512", "--columns", "1024", "--rounds", "2", "--json", "{}/figures.json"],
    "refit": ["--small", "--rounds", "1", "--json", "{}/figures.json"],
    "residual": ["--samples", "8", "--folder", "{}"],
    "rollout": ["--batch-sizes", "1", "4", "--rounds", "1", "--layers", "1", "--json", "{}/figures.json"],
    "turns": ["--conversations", "4", "--turns", "2", "--rounds", "1", "--json", "{}/figures.json"],
    "train_step": ["--rounds", "1", "--json", "{}/figures.json"],
    "training": ["--steps", "60", "--seeds", "2", "--folder", "{}"],
}


def test_none_is_left_out():
    scripts = {path.stem for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()}
    assert scripts == ARGUMENTS.keys()


def test_what_they_take_from_the_package_is_there(monkeypatch):
    """Also what `alignment` replaces in it."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    before = set(sys.modules)
    try:
        with mock.patch.dict(os.environ):  # some set variables
            modules = {name: importlib.import_module(name) for name in ARGUMENTS}
        for piece, _ in modules["alignment"].PIECES.values():
            with piece():
                pass
    finally:
        for path in BENCHMARKS.glob("*.py"):
            if path.stem not in before:
                sys.modules.pop(path.stem, None)


@pytest.mark.long
@pytest.mark.parametrize("name", ARGUMENTS)
def test_it_runs(name, tmp_path):
    """In a copy: some write their results beside themselves."""
    if name == "quantize_gpu" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    copy = tmp_path / "benchmarks"
    shutil.copytree(BENCHMARKS, copy, ignore=shutil.ignore_patterns("results", "__pycache__"))
    (copy / "results").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "conf").symlink_to(BENCHMARKS.parent / "conf")
    arguments = [argument.format(tmp_path) for argument in ARGUMENTS[name]]
    command = [sys.executable, str(copy / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    written = [*tmp_path.glob("*.json"), *copy.glob("results/*.json")]
    assert written
    if name == "logprobs":  # of a released vocabulary
        for case in json.loads(written[0].read_text())["cases"]:
            if case["chunk"] == 1024:
                assert case["peak_bytes"] < 2 * 1024 * 151_936 * 4
    if name == "refit":  # what is on the wire depends on no clock
        ratios = json.loads(written[0].read_text())
        assert ratios["wire_full"] < 0.505
        assert ratios["wire_delta"] < 0.005
        assert ratios["wire_delta_whole_model"] < 0.012
