"""Experts of MXFP8 and NVFP4 on a GPU: Marlin's kernel is a fake that reads what the real one does."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import _custom_ops

pytest.importorskip("vllm.model_executor.kernels.linear.mxfp8.flashinfer", reason="vLLM 0.25 has other kernels")

from nemo_fp8rl.fp8 import FORMATS, FP8, Format, LinearRecipe, fake_quantize_tokens, quantize_blockwise
from nemo_fp8rl.generation.fp8_method.gpu_formats import choice, marlin_experts
from nemo_fp8rl.generation.fp8_method.gpu_formats.marlin_experts import MarlinMoEMethod
from tests.generation.fp8_method.fake_marlin import fake_repack, marlin_weight

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, TOKENS = 4, 128, 96, 2, 9


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def fake_moe_marlin(
    x: Tensor,
    out: Tensor,
    weight: Tensor,
    bias: None,
    scales: Tensor,
    a_scales: None,
    *rest: Any,
    **names: Any,
) -> None:
    """Stands in for `moe_wna16_marlin_gemm`: each row of the order by the expert of its block, in float32."""
    global_scale, zeros, _, order, experts, padded, _ = rest
    assert (bias, a_scales, zeros, names["mul_topk_weights"]) == (None, None, None, False)
    assert names["b_q_type"].size_bits == (8 if global_scale is None else 4)
    assert (names["size_m"], names["size_k"], names["size_n"]) == (*x.shape, out.size(1))
    for at in range(0, int(padded), names["moe_block_size"]):
        expert = int(experts[at // names["moe_block_size"]])
        of_expert = None if global_scale is None else global_scale[expert]
        values = marlin_weight(weight[expert], scales[expert], of_expert)
        for row in order[at : at + names["moe_block_size"]].tolist():
            if row < len(out):
                out[row] = (values @ x[row // names["top_k"]].float()).to(out.dtype)


@pytest.fixture(autouse=True)
def fakes(monkeypatch):
    monkeypatch.setattr(_custom_ops, "gptq_marlin_repack", fake_repack, raising=False)
    monkeypatch.setattr(_custom_ops, "moe_wna16_marlin_gemm", fake_moe_marlin, raising=False)
    monkeypatch.setattr(marlin_experts, "get_marlin_workspace", lambda device: None)
    monkeypatch.setattr(marlin_experts, "apply_moe_activation", fake_silu_and_mul)


def fake_silu_and_mul(activation: Any, out: Tensor, gate_up: Tensor) -> None:
    gate, up = gate_up.chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def layer_of(format: Format, seed: int) -> tuple[Any, Tensor, Tensor]:
    """A layer as refits write it, and its dequantized weights."""
    sizes = {"w13": (2 * INTERMEDIATE, HIDDEN), "w2": (HIDDEN, INTERMEDIATE)}
    layer = SimpleNamespace(global_num_experts=EXPERTS, expert_map=None)
    values = []
    for name, (n, k) in sizes.items():
        weight = quantize_blockwise(randn(EXPERTS, n, k, seed=seed) * 0.1, format=format)
        tensors = {f"{name}_weight": weight.data, format.scale_name(f"{name}_weight"): weight.scale_inv}
        if weight.global_scale is not None:
            tensors[format.global_name(f"{name}_weight")] = weight.global_scale[:, None].expand(EXPERTS, 2).clone()
        for leaf, tensor in tensors.items():
            setattr(layer, leaf, torch.nn.Parameter(tensor, requires_grad=False))
        values.append(weight.dequantize())
    return layer, values[0], values[1]


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "nvfp4_a16", "nvfp4_a16_1x16"])
def test_experts_multiply_the_trainers_values(name):
    format = FORMATS[name]
    method = object.__new__(MarlinMoEMethod)
    method.format = format
    layer, w13, w2 = layer_of(format, seed=1)
    method.process_weights_after_loading(layer)
    kernel = {key: tensor.data_ptr() for key, tensor in vars(layer).items() if key.startswith("kernel_")}
    changed, w13, w2 = layer_of(format, seed=2)
    for key, value in vars(changed).items():
        if isinstance(value, Tensor):
            getattr(layer, key).data.copy_(value.data)
    method.process_weights_after_loading(layer)
    assert kernel == {key: tensor.data_ptr() for key, tensor in vars(layer).items() if key.startswith("kernel_")}

    x = randn(TOKENS, HIDDEN, seed=5)
    chosen = torch.rand((TOKENS, EXPERTS), generator=torch.Generator().manual_seed(7)).topk(TOP_K).indices.int()
    weights = torch.rand((TOKENS, TOP_K), generator=torch.Generator().manual_seed(6))
    got = method.multiply(layer, x, weights, chosen)

    expected = torch.zeros(TOKENS, HIDDEN)
    rounded = fake_quantize_tokens(x, format).float()
    for token in range(TOKENS):
        for choice_, weight in zip(chosen[token].tolist(), weights[token].tolist(), strict=True):
            gate, up = (w13[choice_] @ rounded[token]).bfloat16().chunk(2)
            activated = (torch.nn.functional.silu(gate) * up)[None]
            inner = fake_quantize_tokens(activated, format).float()[0]
            expected[token] += (w2[choice_] @ inner).bfloat16().float() * weight
    torch.testing.assert_close(got.float(), expected, rtol=0.02, atol=0.01 * float(expected.abs().max()))


def test_fp8_keeps_its_own_methods():
    linear, experts = choice.gpu_methods(LinearRecipe(FP8))
    assert (linear.__name__, experts.__name__) == ("NativeFp8LinearMethod", "NativeFp8MoEMethod")
