"""How the bytes travel, by who the trainer and the engines are."""

import math
from types import SimpleNamespace

import pytest

from nemo_fp8rl import assemble
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from tests.conftest import RECIPES

RAY = "cluster.backend=ray"
ASYNC = "policy.generation.vllm_cfg.async_engine=true"


@pytest.mark.parametrize(("kv", "is_bounded"), [("unified", True), ("rollout", False)])
def test_no_mismatch_is_alarming_where_the_engine_alone_has_a_window(kv, is_bounded):
    keys = "policy.generation.vllm_cfg.kv_window=2", f"nemo_fp8rl.kv={kv}"
    explained = assemble.explained_by(load(RECIPES / "tiny_cpu.yaml", [*keys]), experts=False, aligned=True)
    assert math.isfinite(explained) is is_bounded


def chosen(monkeypatch, overrides=(), hosts=1, on_gpu=False, asked="auto"):
    monkeypatch.setattr(assemble, "is_single_host", lambda cfg: hosts == 1)
    cfg = load(RECIPES / "tiny_cpu.yaml", [*overrides, f"nemo_fp8rl.refit.transport={asked}"])
    return assemble.choose_transport(cfg, SimpleNamespace(on_gpu=lambda: on_gpu))


@pytest.mark.parametrize(("overrides", "expected"), [([], "in_process"), ([ASYNC], "nearest"), ([RAY], "nearest")])
def test_auto_takes_the_nearest(monkeypatch, overrides, expected):
    assert chosen(monkeypatch, overrides) == expected


@pytest.mark.parametrize("asked", ["shared_memory", "cuda_ipc", "collective"])
def test_what_is_asked_for_is_taken(monkeypatch, asked):
    assert chosen(monkeypatch, [RAY], on_gpu=True, asked=asked) == asked


@pytest.mark.parametrize(
    ("asked", "hosts", "on_gpu", "why"),
    [
        ("in_process", 1, True, "in processes of their own"),
        ("shared_memory", 2, False, "several hosts"),
        ("cuda_ipc", 2, True, "several hosts"),
        ("cuda_ipc", 1, False, "not on GPUs"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(monkeypatch, asked, hosts, on_gpu, why):
    with pytest.raises(UserError, match=rf"^nemo_fp8rl\.refit\.transport={asked}: .*{why}.*; set it to auto"):
        chosen(monkeypatch, [RAY], hosts, on_gpu, asked)


def test_one_process_does_not_map_its_own_memory(monkeypatch):
    with pytest.raises(UserError, match="cuda_ipc: trainer and engine share a process; set it to auto"):
        chosen(monkeypatch, on_gpu=True, asked="cuda_ipc")


def test_a_package_that_is_missing_is_named_before_anything_is_sent(monkeypatch):
    monkeypatch.setattr(assemble, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"nixl: pip install 'nemo-fp8rl\[nixl\]', or set it to auto"):
        chosen(monkeypatch, [RAY], asked="nixl")


def mode_of(*overrides: str) -> str:
    policy = SimpleNamespace(open_refit=lambda *_: None)
    generation = SimpleNamespace(token="", report_deaths_to=lambda _: None)
    return assemble.build_bridge(load(RECIPES / "tiny_cpu.yaml", overrides), policy, generation).choice.mode


@pytest.mark.parametrize(("sleep_level", "mode"), [(0, "auto"), (1, "auto"), (2, "full")])
def test_engines_that_drop_their_weights_get_whole_versions(sleep_level, mode):
    """No copy is kept for a delta that cannot come."""
    assert mode_of(f"policy.generation.vllm_cfg.sleep_level={sleep_level}") == mode


@pytest.mark.parametrize(("asked", "mode"), [("auto", "full"), ("full", "full"), ("delta", "delta")])
def test_a_trainer_that_gives_memory_back_keeps_no_copy_unless_it_is_asked_to(asked, mode):
    assert mode_of("policy.megatron_cfg.offload_between_phases=true", f"nemo_fp8rl.refit.mode={asked}") == mode
