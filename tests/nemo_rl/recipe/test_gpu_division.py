"""Whether the GPU can run the recipe's flow, asked before NeMo RL, a model or Ray is there; it is a pretended one."""

from pathlib import Path

import pytest
import torch

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.nemo_rl.run import run_loop
from tests.nemo_rl.conftest import write

RECIPE = """
defaults: ${oc.env:NEMO_RL_SRC}/examples/configs/grpo.yaml
policy:
  megatron_cfg: {fp8_cfg: {enabled: true}, env_vars: {NVTE_FP8_BLOCK_SCALING_FP32_SCALES: '0'}}
  generation:
    vllm_cfg: {precision: fp8, pow2_weight_scaling_factors: true, pow2_activation_scaling_factors: true}
"""
FLOWS = {
    "fp8_e2e": (),
    "fp8_rollout": ("policy.megatron_cfg.fp8_cfg.enabled=false",),
    "bf16": ("policy.megatron_cfg.fp8_cfg.enabled=false", "policy.generation.vllm_cfg.precision=bfloat16"),
    "mxfp8_e2e": ("policy.megatron_cfg.fp8_cfg.fp8_recipe=mxfp8", "++policy.generation.vllm_cfg.is_mx=true"),
}
FLOWS["nvfp4_rollout"] = (*FLOWS["bf16"], "++policy.generation.nvfp4_pertoken_rollout.enabled=true")
FLOWS["nvfp4_a16_rollout"] = (*FLOWS["bf16"], "++policy.generation.quant_cfg=W4A16_NVFP4_CFG")


FP8_PARAM = "++policy.megatron_cfg.fp8_cfg.fp8_param=true"
KV = "++policy.generation.vllm_cfg.kv_cache_dtype=fp8"


class Loads(Exception):
    """In place of what comes after the checks."""


@pytest.fixture
def start(main_checkout: Path, tmp_path: Path, monkeypatch):
    """start(workers, flow, capability, *overrides): run the recipe as on such a GPU, till NeMo RL would be imported."""

    def loads() -> None:
        raise Loads

    monkeypatch.setattr(run_loop, "prepare", loads)
    monkeypatch.setattr(run_loop, "require_token", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Pretended GPU")
    path = write(tmp_path / "recipe.yaml", RECIPE)

    def make(workers: str, flow: str, capability: tuple[int, int], *overrides: str) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        run_loop.run(path, [f"+nemo_fp8rl.workers={workers}", *FLOWS[flow], *overrides])

    return make


@pytest.mark.parametrize("workers", ["auto", "ours", "nemo_rl"])
@pytest.mark.parametrize(
    ("flow", "capability", "message"),
    [
        ("fp8_e2e", (8, 0), r"FP8 needs .* 8\.9 or higher, and Pretended GPU has 8\.0.*vllm_cfg\.precision=bfloat16"),
        ("fp8_rollout", (8, 0), r"FP8 needs .* 8\.9 or higher, and Pretended GPU has 8\.0"),
        ("fp8_e2e", (8, 9), r"training needs .* 9\.0 or higher, and Pretended GPU has 8\.9: set policy\.\S*=false"),
    ],
)
def test_a_gpu_that_cannot_run_the_flow_is_named_before_anything_is_loaded(start, workers, flow, capability, message):
    with pytest.raises(UserError, match=message) as caught:
        start(workers, flow, capability)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", ["auto", "ours"])
@pytest.mark.parametrize(
    ("flow", "capability"),
    [
        *[("fp8_e2e", (9, 0)), ("fp8_e2e", (12, 0)), ("fp8_rollout", (8, 9)), ("bf16", (7, 0))],
        *[("mxfp8_e2e", (10, 0)), ("nvfp4_rollout", (10, 0)), ("nvfp4_a16_rollout", (8, 0))],
    ],
)
def test_a_gpu_that_can_is_not_refused(start, workers, flow, capability):
    with pytest.raises(Loads):
        start(workers, flow, capability)


@pytest.mark.parametrize(
    ("flow", "capability", "message"),
    [
        ("mxfp8_e2e", (7, 5), r"MXFP8 needs .* 8\.0 .* 7\.5: take a bfloat16 recipe, or set "),
        ("nvfp4_rollout", (7, 5), r"activations needs .*: take a bfloat16 recipe$"),
        (
            "nvfp4_a16_rollout",
            (7, 5),
            r"NVFP4 needs .* 8\.0 or higher, .* has 7\.5: take a bfloat16 recipe$",
        ),
    ],
)
@pytest.mark.parametrize("workers", ["auto", "ours"])
def test_what_a_gpu_takes_in_the_place_of_another_format_is_said(start, workers, flow, capability, message):
    with pytest.raises(UserError, match=message):
        start(workers, flow, capability)


@pytest.mark.parametrize("flow", ["mxfp8_e2e", "nvfp4_rollout", "nvfp4_a16_rollout"])
def test_nemo_rls_own_workers_are_refused_another_format_before_anything_is_loaded(start, flow):
    with pytest.raises(UserError, match=r"refits FP8 and bfloat16 alone.* set nemo_fp8rl\.workers=ours"):
        start("nemo_rl", flow, (10, 0))


def test_the_driver_of_a_cluster_is_not_held_to_its_own_gpu(start, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    with pytest.raises(Loads):
        start("auto", "fp8_e2e", (8, 0))


@pytest.mark.parametrize("workers", ["auto", "nemo_rl"])
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((KV, "++policy.generation.vllm_cfg.async_engine=true"), r"no asynchronous rollouts: set .*async_engine=false"),
        ((KV, "++policy.megatron_cfg.pipeline_model_parallel_size=2"), r"one pipeline stage, got 2: set .*=1, or"),
        (
            (KV, "++grpo.val_at_start=true"),
            r"kv_cache_dtype=fp8 .* after the first validation, grpo\.val_at_start=true",
        ),
        (
            (FP8_PARAM, "++policy.generation.vllm_cfg.quantization_ignored_layer_kws=[o_proj]"),
            r"quantization_ignored_layer_kws=\['o_proj'\] are bfloat16 in the engine, .* leave either out, or",
        ),
        (("++nemo_fp8rl.correction={preset: icepop, denominator: kept}",), "denominator=kept needs the whole batch"),
    ],
)
def test_what_nemo_rls_workers_cannot_have_is_refused_before_anything_is_loaded(start, workers, overrides, message):
    with pytest.raises(UserError, match=message):
        start(workers, "fp8_e2e", (9, 0), *overrides)


@pytest.mark.parametrize("workers", ["auto", "nemo_rl"])
@pytest.mark.parametrize("can", [KV, FP8_PARAM])
def test_what_they_can_have_is_not(start, workers, can):
    with pytest.raises(Loads):
        start(workers, "fp8_e2e", (9, 0), can)


def test_so_is_fp8_between_the_workers_of_v0_7_0(start, main_checkout):
    """Its engines have no life cycle of a weight update, whatever its number is."""
    write(main_checkout / "nemo_rl/package_info.py", "MAJOR = 0\nMINOR = 7\nPATCH = 0\n")
    (main_checkout / "nemo_rl/models/generation/vllm/vllm_backend.py").unlink()
    with pytest.raises(UserError, match="this NeMo RL processes an engine's weights once more after a refit"):
        start("auto", "fp8_e2e", (9, 0))
