"""NeMo RL's own loss tests, its ClippedPGLossFn replaced by ours."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nemo_rl
EXPECTED = {True: 32, False: 31}
"""Tests that `-k "clipped_pg or split_rescale"` selects: of main, and of v0.7.0."""


def run_their_tests(checkout: Path, loss: str) -> tuple[int, int, int]:
    """(passed, failed, calls of the loss)."""
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "conformance", "-p", "no:cacheprovider"]
    command += ["--noconftest", "-c", "/dev/null", "--rootdir", str(checkout), "-k", "clipped_pg or split_rescale"]
    command += [str(checkout / "tests/unit/algorithms/test_loss_functions.py")]
    here = Path(__file__).parent  # not the root: a `tests` of theirs is imported
    environment = {**os.environ, "LOSS_UNDER_TEST": loss}
    environment["PYTHONPATH"] = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    calls = re.search(r"calls of the loss under test: (\d+)", done.stdout)
    assert calls and "error" not in counts, done.stdout[-3000:] + done.stderr[-3000:]
    return counts.get("passed", 0), counts.get("failed", 0), int(calls[1])


def test_ours_passes_all_of_them(real_checkout):
    is_main = "split_rescale" in (real_checkout / "tests/unit/algorithms/test_loss_functions.py").read_text()
    passed, failed, calls = run_their_tests(real_checkout, "nemo_fp8rl.nemo_rl.loss:GrpoLossFn")
    assert (passed, failed) == (EXPECTED[is_main], 0)
    assert calls >= passed


def test_a_broken_one_does_not(real_checkout):
    _, failed, calls = run_their_tests(real_checkout, "broken_loss:BrokenLossFn")
    assert failed >= 3
    assert calls
