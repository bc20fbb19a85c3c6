"""`pytest -p tests.gpu_engine.plugin`: the engine's methods for GPUs on a CPU, before any test imports vLLM.

Real: our methods, vLLM's engine, loaders, router and Triton kernels, which Triton's interpreter runs value by value.
Fake: that this machine has a backend for Triton, and the two compiled functions that vLLM's CPU build lacks.
"""

import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.interpreted_triton import interpret

interpret()


def _leave_as_it_came(method: Any, layer: Any) -> None:
    """A bfloat16 linear, which vLLM packs on a CPU alone."""
    layer.cpu_linear = F.linear


def fake_silu_and_mul(activation: Any, out: Tensor, gate_up: Tensor) -> None:
    """As CUDA's kernel rounds, twice; that of the CPU build rounds once."""
    gate, up = gate_up.chunk(2, -1)
    out.copy_(F.silu(gate) * up)


def fake_moe_align_block_size(
    topk_ids: Tensor,
    num_experts: int,
    block_size: int,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_pad: Tensor,
    expert_map: Tensor | None = None,
    *further: None,
) -> None:
    """Rows of `topk_ids` by expert, each expert's filled up to whole blocks with a number that is no row's."""
    flat = topk_ids.view(-1)
    sorted_token_ids.fill_(flat.numel())
    at = 0
    for expert in range(num_experts):
        own = expert if expert_map is None else int(expert_map[expert])
        rows = (flat == expert).nonzero()[:, 0]
        if own < 0 or not len(rows):
            continue
        sorted_token_ids[at : at + len(rows)] = rows
        end = at + -(-len(rows) // block_size) * block_size
        expert_ids[at // block_size : end // block_size] = own
        at = end
    num_tokens_post_pad.fill_(at)


def pytest_sessionstart() -> None:
    """Into vLLM, which is imported here."""
    with pytest.MonkeyPatch.context() as patch:  # 0.25 asks for a distribution `vllm`, which the CPU build is not
        version = metadata.version
        patch.setattr(metadata, "version", lambda name: "0+cpu" if name == "vllm" else version(name))
        import vllm.triton_utils
    assert vllm.triton_utils.HAS_TRITON
    sys.modules["vllm.platforms.rocm"] = SimpleNamespace(on_gfx1250=lambda: False)  # 0.25 asks it wherever it runs
    from vllm import _custom_ops
    from vllm.model_executor.kernels.linear.scaled_mm.triton import TritonFp8BlockScaledMMKernel
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from nemo_fp8rl.generation.fp8_method import gpu_experts, quantization
    from nemo_fp8rl.generation.fp8_method.gpu_experts import NativeFp8MoEMethod
    from nemo_fp8rl.generation.fp8_method.gpu_linear import NativeFp8LinearMethod
    from nemo_fp8rl.generation.weights import weight_store

    weight_store.DIRECT += (UnquantizedLinearMethod,)
    UnquantizedLinearMethod.process_weights_after_loading = _leave_as_it_came
    torch.cpu._init_amx()  # vLLM's attention for AMX leaves it to the linear layers before it
    gpu_experts.apply_moe_activation = fake_silu_and_mul
    _custom_ops.moe_align_block_size = fake_moe_align_block_size
    from tests.gpu_engine import pages_on_cpu

    pages_on_cpu.register()
    TritonFp8BlockScaledMMKernel.is_supported = classmethod(lambda cls, capability=None: (True, None))
    quantization.methods_for_device = lambda recipe: (NativeFp8LinearMethod, NativeFp8MoEMethod)
