"""The warm-up trains on the model's own distribution, whatever the engine of its recipe samples from."""

import pytest

from nemo_fp8rl.recipe import load
from nemo_fp8rl.sft import sft
from tests.conftest import RECIPES


@pytest.mark.parametrize("sampling", ["policy.generation.top_k=1", "policy.generation.temperature=0.5"])
def test_how_an_engine_samples_changes_nothing(tiny, tmp_path, sampling):
    given = [f"policy.model_name={tiny}/model", f"data.train.data_path={tiny}/data.jsonl", "sft.max_num_steps=2"]
    weights = []
    for name, overrides in (("plain", []), ("sampled", [sampling])):
        assert sft(load(RECIPES / "tiny_sft.yaml", [*given, *overrides]), tmp_path / name)
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
