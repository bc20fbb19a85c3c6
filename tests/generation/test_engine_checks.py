"""The check that a GPU runs a recipe's number format, before anything is loaded; the GPU is a fake."""

from contextlib import nullcontext

import pytest
import torch

from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.vllm_version import OLDER
from nemo_fp8rl.fp8.gpu_support import nearest_flow, why_flow_unsupported
from nemo_fp8rl.generation.engine_checks import check_machine
from nemo_fp8rl.hf.model_config import read_hf_config

TURING, AMPERE, ADA, HOPPER, BLACKWELL = (7, 5), (8, 0), (8, 9), (9, 0), (10, 0)


@pytest.mark.parametrize(
    ("flow", "capability", "refused"),
    [
        ("mxfp8_e2e", BLACKWELL, ""),
        ("mxfp8_e2e", AMPERE, ""),
        (
            "mxfp8_e2e",
            TURING,
            r"flow=mxfp8_e2e: MXFP8 needs .* 8\.0 or higher, .* has 7\.5; set nemo_fp8rl\.flow=bf16$",
        ),
        ("nvfp4_e2e", HOPPER, ""),
        ("nvfp4_e2e", TURING, r"NVFP4 with 4-bit activations needs .*; set nemo_fp8rl\.flow=bf16$"),
        ("nvfp4_a16_e2e", AMPERE, ""),
        ("nvfp4_a16_rollout", TURING, r"NVFP4 needs .* 8\.0 or higher, .* has 7\.5; set nemo_fp8rl\.flow=bf16$"),
        ("fp8_e2e", ADA, r"blockwise FP8 training needs .*; set nemo_fp8rl\.flow=fp8_rollout$"),
        ("bf16", TURING, ""),
    ],
)
def test_a_format_that_a_gpu_cannot_multiply_is_refused_with_the_nearest_that_it_can(
    recipe, monkeypatch, flow, capability, refused
):
    cfg = recipe(f"nemo_fp8rl.flow={flow}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Pretended GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(UserError, match=refused) if refused else nullcontext():
        check_machine(read_hf_config(cfg.policy.model_name), cfg, trains=True)


@pytest.mark.parametrize("capability", [TURING, AMPERE, ADA, HOPPER])
@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4", "nvfp4_a16"])
@pytest.mark.parametrize("side", ["e2e", "rollout"])
def test_what_a_gpu_takes_instead_it_can_run(capability, name, side):
    flow = nearest_flow(f"{name}_{side}", capability)
    assert why_flow_unsupported(flow, "GPU", capability, trains=True) == ""


@pytest.mark.parametrize(
    ("layout", "modules", "refused"),
    [
        (("tensor_parallel_size=2",), (), r"tensor_parallel_size=2 with .*peft: .*; set .*expert_parallel_size=2$"),
        (("tensor_parallel_size=2", "expert_parallel_size=2"), (), ""),
        (("tensor_parallel_size=2",), ("linear_qkv", "linear_proj"), ""),
        ((), (), ""),
    ],
)
def test_adapters_of_experts_that_ranks_of_a_gpu_share_are_refused(
    recipe, monkeypatch, tmp_path, layout, modules, refused
):
    write_model(tmp_path / "model", seed=0, family="qwen3_moe")
    cfg = recipe(
        f"policy.model_name={tmp_path}/model",
        "nemo_fp8rl.flow=bf16",
        "policy.megatron_cfg.peft.enabled=true",
        f"policy.megatron_cfg.peft.target_modules=[{','.join(modules)}]",
        *(f"policy.generation.vllm_cfg.{key}" for key in layout),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=refused) if refused else nullcontext():
        check_machine(read_hf_config(cfg.policy.model_name), cfg)


def test_a_window_needs_a_backend_with_a_mask_on_a_gpu(recipe, monkeypatch):
    window = "nemo_fp8rl.flow=bf16", "policy.generation.vllm_cfg.kv_window=8"
    backend = "policy.generation.vllm_cfg.attention_backend={}"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("null", "TRITON_ATTN", "flash_attn"):
        cfg = recipe(*window, backend.format(name))
        check_machine(read_hf_config(cfg.policy.model_name), cfg)
    cfg = recipe(*window, backend.format("FLASHINFER"))
    message = r"attention_backend=FLASHINFER cannot hide .*kv_window=8 .*; set it to TRITON_ATTN or FLASH_ATTN$"
    with pytest.raises(UserError, match=message):
        check_machine(read_hf_config(cfg.policy.model_name), cfg)
    monkeypatch.setattr("nemo_fp8rl.generation.engine_checks.vllm_version", lambda: OLDER)
    cfg = recipe(*window)
    with pytest.raises(UserError, match=r"kv_window=8: the installed vLLM, .*, or install vLLM 0\.32$"):
        check_machine(read_hf_config(cfg.policy.model_name), cfg)
