"""Sharpness in the loop: it is measured at its steps, changes nothing else, and a gate on it ends a run."""

import json
from pathlib import Path

import pytest

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.train import train
from tests.conftest import RECIPES

THREE = ("grpo.max_num_steps=3", "grpo.val_at_start=false", "grpo.val_at_end=false", "checkpointing.save_period=100")
CLOCK = ("timing/", "performance/", "refit/")


@pytest.fixture
def run(warm_overrides, tmp_path):
    """run(name, "key=value", ...) -> the rows of metrics.jsonl without what depends on the clock, and the weights."""

    def run(name: str, *overrides: str) -> tuple[list[dict[str, float]], bytes]:
        folder = tmp_path / name
        assert train(load(RECIPES / "tiny_cpu.yaml", [*warm_overrides, *THREE, f"logger.log_dir={folder}", *overrides]))
        weights = folder / "checkpoints/step_3/policy/weights/model.safetensors"
        rows = [{k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in read(folder)]
        return rows, weights.read_bytes()

    return run


def read(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_sharpness_is_measured_at_its_steps_and_changes_no_bit(run):
    plain, weights = run("plain")
    measured, same_weights = run("measured", "nemo_fp8rl.sharpness.period=2")
    assert weights == same_weights
    names = {"train/sharpness", "train/sharpness_last_token"}
    assert [names & row.keys() for row in measured] == [set(), names, set()]
    assert all(0 < measured[1][name] < 5 for name in names)
    assert [{k: v for k, v in row.items() if k not in names} for row in measured] == plain


def test_a_gate_on_sharpness_ends_the_run_at_a_measurement(run, tmp_path):
    with pytest.raises(UserError, match=r"step 2: sharpness_last_token is .*, its gate allows at most 1e-06 \(stop\)"):
        run(
            "gated",
            "nemo_fp8rl.sharpness.period=2",
            "nemo_fp8rl.gates=[{metric: sharpness_last_token, max: 0.000001, action: stop}]",
        )
    assert [row["step"] for row in read(tmp_path / "gated")] == [1]
