"""An error that NeMo RL's asynchronous loop prints and passes over ends the command, too."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_fp8rl.nemo_rl.run.async_loop_watch import CALLS, Watch
from tests.nemo_rl import runs

OF_AN_ACTOR = re.compile(r"(\x1b\[\d+m)?\(\w+ pid=")
"""How Ray begins a line of a worker's, which may come after the driver's own last one."""


def fails(*args: Any, **kwargs: Any) -> None:
    raise ValueError("it fails")


def passing_over(policy: Any, synchronizer: Any) -> None:
    """As the loop does, of which v0.7.0's passes over errors of later steps, too."""
    try:
        synchronizer.sync_weights()
        for _ in range(3):
            policy.train()
            synchronizer.sync_weights()
    except ValueError:
        return


def watched(**calls: Any) -> tuple[Watch, Any, Any]:
    policy: Any = SimpleNamespace(**{name: calls.get(name, lambda: "done") for name in CALLS})
    synchronizer = SimpleNamespace(sync_weights=calls.get("sync_weights", lambda: "synced"))
    return Watch(policy, synchronizer), policy, synchronizer


def test_a_loop_that_took_all_steps_is_done():
    watch, policy, synchronizer = watched()
    passing_over(policy, synchronizer)
    watch.check(3)
    assert (policy.train(), synchronizer.sync_weights(), policy.get_logprobs()) == ("done", "synced", "done")


@pytest.mark.parametrize("name", ["sync_weights", "train"])
def test_what_it_passed_over_is_raised(name):
    watch, policy, synchronizer = watched(**{name: fails})
    passing_over(policy, synchronizer)
    with pytest.raises(ValueError, match="it fails"):
        watch.check(0)


def test_one_that_ended_early_for_an_unknown_reason_is_no_success():
    watch, policy, synchronizer = watched()
    passing_over(policy, synchronizer)
    with pytest.raises(RuntimeError, match="after 3 of 4 steps"):
        watch.check(4)


@pytest.mark.nemo_rl
@runs.needs_checkout
@pytest.mark.parametrize("number", [1, 2])
def test_a_refit_that_fails_ends_the_asynchronous_loop_with_its_error(number, tiny, tmp_path):
    keys = [*runs.overrides(tiny, tmp_path / "logs"), *runs.ASYNC, "grpo.max_num_steps=2"]
    keys += [f"policy.model_name={tiny}/model", f"policy.tokenizer.name={tiny}/model"]
    command = [sys.executable, str(Path(__file__).with_name("failing_refit.py")), str(number), str(runs.RECIPE), *keys]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, env=runs.environment(tmp_path), check=False
    )
    assert done.returncode == 1, done.stderr[-3000:]
    lines = [line for line in done.stderr.splitlines() if not OF_AN_ACTOR.match(line)]
    assert lines[-1] == "RuntimeError: this refit fails"
