"""Emulated layers within torch.compile: one operation each, with the values of the eager layer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from nemo_fp8rl.fp8 import BLOCK, FP8, LinearRecipe, quantize_blockwise
from nemo_fp8rl.generation.fp8_method.on_cpu import compiled_calls
from nemo_fp8rl.generation.fp8_method.on_cpu.emulated_experts import EmulatedMoEMethod
from nemo_fp8rl.generation.fp8_method.on_cpu.emulated_linear import EmulatedLinearMethod

HIDDEN, INTERMEDIATE, EXPERTS, TOKENS = 128, 256, 4, 6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Linear(nn.Module):
    """What vLLM makes of a linear layer with our method, without its classes of parameters, which want ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_method = EmulatedLinearMethod(LinearRecipe())
        stored = quantize_blockwise(random(INTERMEDIATE, HIDDEN), block=BLOCK)
        self.weight = nn.Parameter(stored.data, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(stored.scale_inv, requires_grad=False)
        self.quant_method.prepare(self, torch.bfloat16)
        self.store(seed=1)

    def store(self, seed: int) -> None:
        quantized = quantize_blockwise(random(INTERMEDIATE, HIDDEN, seed=seed), block=BLOCK)
        self.weight.data.copy_(quantized.data)
        self.weight_scale_inv.data.copy_(quantized.scale_inv)
        self.quant_method.process_weights_after_loading(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.quant_method.apply(self, x * 2) + 1


class Experts(nn.Module):
    """The same of a layer of experts, with a router's choice."""

    def __init__(self) -> None:
        super().__init__()
        parallel = SimpleNamespace(tp_size=1, ep_size=1)
        self.moe_config, self.expert_map = SimpleNamespace(moe_parallel_config=parallel), None
        self.quant_method = method = object.__new__(EmulatedMoEMethod)
        method.recipe, method.format, method.capture = LinearRecipe(), FP8, None
        method.create_weights(self, EXPERTS, HIDDEN, INTERMEDIATE, torch.bfloat16)
        self.store(seed=1)

    def store(self, seed: int) -> None:
        for i, name in enumerate(("w13", "w2")):
            weight = getattr(self, f"{name}_weight").data
            quantized = quantize_blockwise(random(*weight.shape, seed=seed + i), block=BLOCK)
            weight.copy_(quantized.data)
            getattr(self, f"{name}_weight_scale_inv").data.copy_(quantized.scale_inv)
        self.quant_method.process_weights_after_loading(self)

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = (x[:, :EXPERTS].float().softmax(-1)).topk(2)
        return self.quant_method.apply(self, x * 2, weights, experts, None, None) + 1


@pytest.fixture(params=[Linear, Experts])
def layer(request: Any) -> Any:
    with torch._dynamo.config.patch(disable=False):  # an engine in this process switches it off
        yield request.param()


def test_a_compiled_layer_is_traced_whole_and_equals_the_eager_one(layer):
    """Two layers, so that each operation has to find its own; and weights that change after the trace."""
    other, x = type(layer)(), random(TOKENS, HIDDEN)
    other.store(seed=5)
    model = nn.Sequential(layer, other) if isinstance(layer, Experts) else layer
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        assert torch.equal(compiled(x), model(x))
        layer.store(seed=9)
        assert torch.equal(compiled(x), model(x))
        assert not torch.equal(layer(x), other(x)[:, : layer(x).size(1)])


def test_a_layer_is_found_after_its_memory_has_moved(layer):
    x = random(TOKENS, HIDDEN)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        before = compiled(x)
        name = "w13_weight" if isinstance(layer, Experts) else "weight"
        parameter = getattr(layer, name)
        old, parameter.data = parameter.data, parameter.data.clone()
        assert compiled_calls._layer_of(parameter) is layer
        assert torch.equal(compiled(x), before)
        assert old.data_ptr() != parameter.data_ptr()
