"""What differs between versions of vLLM."""

import gc
from contextlib import nullcontext

import pytest

from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.common import vllm_version
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation import engine, vllm_compat
from nemo_fp8rl.generation.engine import VllmEngine
from tests.conftest import RECIPES, SMALL


@pytest.mark.parametrize("found", ["0.24.0", "0.28.1", "0.33.0rc1", "1.25.0", "dev"])
def test_a_version_outside_the_supported_ones_is_refused(found, monkeypatch, tiny_overrides):
    monkeypatch.setattr(vllm_version, "installed_vllm", lambda: found)
    sentence = (
        rf"^vLLM {found} is installed, but 0\.25 and 0\.32 are supported: install one of these, as by pip install .*"
    )
    with pytest.raises(UserError, match=sentence):
        VllmEngine().setup(load(RECIPES / "tiny_cpu.yaml", tiny_overrides))


@pytest.mark.parametrize(
    "lacks",
    [
        "vllm.v1.kv_cache_interface.RSWASpec",
        "vllm.v1.attention.backend.AttentionBackend.customize_spec",
        "vllm.config.ModelConfig.rswa_window",
    ],
)
def test_a_window_is_refused_before_an_engine_starts_where_vllm_lacks_a_part_of_it(lacks, monkeypatch, recipe):
    cfg = recipe("policy.generation.vllm_cfg.kv_window=4")
    monkeypatch.delattr(lacks)
    monkeypatch.setattr(engine, "SteppedCore", None)
    with pytest.raises(UserError, match=r"kv_window=4: the installed vLLM, .*, does not free .* install vLLM 0\.32$"):
        VllmEngine().setup(cfg)


def test_experts_whose_choice_vllm_does_not_tell_are_refused_for_replay(tmp_path):
    """bfloat16 experts, with 0.25."""
    make_tiny(tmp_path / "tiny", "add", 0, "qwen3_moe")
    overrides = (
        f"policy.model_name={tmp_path}/tiny/model",
        f"data.train.data_path={tmp_path}/tiny/data.jsonl",
        "nemo_fp8rl.flow=bf16",
        "policy.router_replay.enabled=true",
    )
    started = VllmEngine()
    tells = vllm_version.vllm_version() == vllm_version.NEWER
    told = nullcontext() if tells else pytest.raises(UserError, match=r"does not tell which bfloat16 experts it chose")
    try:
        with told:
            started.setup(load(RECIPES / "tiny_cpu.yaml", [*SMALL, *overrides]))
    finally:
        started.shutdown()
        gc.collect()


@pytest.mark.parametrize("layout", ["async_engine=true", "num_first_layers_in_bf16=1"])
def test_they_are_refused_before_an_engine_starts_in_one_process_or_two(tmp_path, monkeypatch, layout):
    make_tiny(tmp_path / "tiny", "add", 0, "qwen3_moe")
    overrides = (
        f"policy.model_name={tmp_path}/tiny/model",
        f"data.train.data_path={tmp_path}/tiny/data.jsonl",
        f"nemo_fp8rl.flow={'bf16' if 'async' in layout else 'fp8_e2e'}",
        "policy.router_replay.enabled=true",
        f"policy.generation.vllm_cfg.{layout}",
    )
    cfg = load(RECIPES / "tiny_cpu.yaml", [*SMALL, *overrides])

    class Started(Exception):
        def __init__(self, *arguments):
            raise self

    for core in ("AsyncCore", "SteppedCore"):
        monkeypatch.setattr(engine, core, Started)
    for version, told in ((vllm_version.OLDER, UserError), (vllm_version.NEWER, Started)):
        monkeypatch.setattr(vllm_compat, "vllm_version", lambda version=version: version)
        with pytest.raises(told) as refusal:
            VllmEngine().setup(cfg)
        assert (told is Started) or "does not tell which bfloat16 experts it chose" in str(refusal.value)
