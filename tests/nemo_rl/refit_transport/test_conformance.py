"""NeMo RL's own tests of checkpoint engines, with ours where they are not about NIXL."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_fp8rl.nemo_rl.recipe.checkout import find_checkout
from tests.nemo_rl.runs import needs_checkout

pytestmark = [pytest.mark.nemo_rl, needs_checkout]
FILES = (
    "utils/test_checkpoint_engine.py",
    "weight_sync/test_checkpoint_engine_*.py",
    "models/*/test_*checkpoint_engine*.py",
)


def test_theirs_pass_with_ours(real_checkout):
    if not find_checkout().has_checkpoint_engines:
        pytest.skip("v0.7.x has no checkpoint engines")
    files = [str(path) for pattern in FILES for path in sorted((real_checkout / "tests/unit").glob(pattern))]
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "conformance", "-p", "no:cacheprovider"]
    command += ["--noconftest", "-c", "/dev/null", "--rootdir", str(real_checkout), *files]
    here = Path(__file__).parent  # not the root: a `tests` of theirs is imported
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|skipped|class|recipe)", done.stdout)}
    assert counts["passed"] >= 80 and counts["class"] >= 2 and counts["recipe"] >= 6, done.stdout[-1000:]
