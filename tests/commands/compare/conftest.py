"""A comparison of two flows on the shared tiny model, two steps a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RECIPES

FLOWS = {
    "bf16": {"nemo_fp8rl.flow": "bf16", "nemo_fp8rl.correction": None},
    "fp8_rollout+correction": {"nemo_fp8rl.flow": "fp8_rollout"},
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """write(key=value) -> a comparison's file; what is None is left out."""

    def make(**changes: Any) -> Path:
        tree = {"recipe": str(RECIPES / "tiny_cpu.yaml"), "seeds": [1, 2], "reference": "bf16", "flows": FLOWS}
        tree |= changes
        path = tmp_path / "comparison.yaml"
        path.write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))
        return path

    return make
