"""The views that a refit reads are made once, and always have the parameters' present values."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo_fp8rl.common.region import region_slices
from nemo_fp8rl.fp8 import FP8, NVFP4, BlockScaled, quantize_blockwise, with_lines
from nemo_fp8rl.hf.model_config import FAMILIES, HfConfig
from nemo_fp8rl.hf.model_tensors import expected_tensors
from nemo_fp8rl.policy.weights.hf_names import from_hf
from nemo_fp8rl.policy.weights.layout import Axis, Layout
from nemo_fp8rl.policy.weights.refit_views import RefitViews
from tests.policy.weights.test_layout import DENSE, MOE

WIDE = dataclasses.replace(
    MOE, num_hidden_layers=1, hidden_size=256, intermediate_size=128, head_dim=128, num_experts=2
)


class Nested(nn.Module):
    """Parameters by the names of Megatron's."""

    def set(self, name: str, values: Tensor, base: BlockScaled | None = None) -> None:
        first, _, rest = name.partition(".")
        if rest:
            if first not in self._modules:
                self.add_module(first, Nested())
            self.get_submodule(first).set(rest, values, base)  # type: ignore[operator]
            return
        self.register_parameter(first, nn.Parameter(values))
        if base is not None:
            self.base: Any = base


def make(hf: HfConfig, layout: Layout) -> tuple[Nested, dict[str, Tensor]]:
    """A rank's model, and its parts of the HF tensors."""
    parts: dict[str, Tensor] = {}
    shapes = expected_tensors(hf)

    def get(name: str) -> Tensor:
        parts[name] = torch.randn(shapes[name])[region_slices(layout.region(name, shapes[name]))]
        return parts[name].clone()

    model = Nested()
    for name, values in from_hf(layout, get):
        model.set(name, values)
    return model, parts


def assert_has(views: RefitViews, parts: dict[str, Tensor], factor: float = 1.0) -> None:
    seen = {name: part for name, part in views.get() if isinstance(part, Tensor)}
    assert seen.keys() == {name for name in parts if views.layout.may_send(name)}
    for name, part in seen.items():
        assert torch.equal(part.reshape(parts[name].shape), parts[name] * factor), name


LAYOUTS = [
    Layout(dataclasses.replace(DENSE, head_dim=128, num_hidden_layers=1), tensor=Axis(1, 2)),
    Layout(MOE, expert=Axis(1, 2)),
    Layout(MOE, expert=Axis(1, 2), grouped_experts=True, pipeline=Axis(0, 2)),
    Layout(dataclasses.replace(DENSE, family=FAMILIES["qwen3"]), tensor=Axis(1, 2)),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_values_that_change_and_memory_that_changes_are_seen(layout):
    model, parts = make(layout.hf, layout)
    views = RefitViews(layout, dict(model.named_parameters()))
    assert_has(views, parts)
    for parameter in model.parameters():
        parameter.mul_(2)
    assert_has(views, parts, 2.0)
    for number, parameter in enumerate(model.parameters()):
        if number % 3 == 0:
            parameter.data = parameter.data.clone()
        parameter.mul_(2)
    assert_has(views, parts, 4.0)
    for parameter in model.parameters():  # as an offload does
        values, storage = parameter.data.clone(), parameter.untyped_storage()
        nbytes = storage.nbytes()
        storage.resize_(0)
        storage.resize_(nbytes)
        parameter.copy_(values * 2)
    assert_has(views, parts, 8.0)


def test_views_are_made_once_and_copies_every_time():
    for layout, is_kept in zip(LAYOUTS, (False, True, True, True), strict=True):  # the first has biases of two groups
        model, _ = make(layout.hf, layout)
        views = RefitViews(layout, dict(model.named_parameters()))
        assert (views.get() is views.get()) == is_kept
        before = views.get()
        next(model.parameters()).data = torch.zeros_like(next(model.parameters()))
        assert views.get() is not before


@pytest.mark.parametrize("format", [FP8, NVFP4, with_lines(FP8)], ids=lambda format: format.name)
@pytest.mark.parametrize(
    "layout",
    [Layout(WIDE, tensor=Axis(1, 2), expert=Axis(0, 2)), Layout(dataclasses.replace(WIDE, head_dim=64))],
    ids=["groups", "by kind"],
)
def test_scales_are_those_of_each_part(layout, format):
    model, parts = make(layout.hf, layout)
    quantized, encode = Nested(), torch.tensor(64.0)
    for name, values in model.named_parameters():
        base = quantize_blockwise(values.detach(), format=format, encode=encode) if ".linear_" in name else None
        quantized.set(name, values.detach() if base is None else torch.empty(0), base)
    views = RefitViews(layout, dict(quantized.named_parameters()), dict(quantized.named_modules()))
    seen = {name: part for name, part in views.get() if isinstance(part, BlockScaled)}
    assert len(seen) == 4 + 3 * len(layout.experts)
    for name, part in seen.items():
        alone = quantize_blockwise(parts[name], format=format, encode=encode)
        for tensor, expected in ((part.data, alone.data), (part.scale_inv, alone.scale_inv)):
            assert torch.equal(tensor.reshape(expected.shape).view(torch.uint8), expected.view(torch.uint8))
    assert views.get() is views.get()
    layer = quantized.get_submodule("decoder.layers.0.self_attention.linear_proj")
    layer.base = dataclasses.replace(layer.base, data=torch.zeros_like(layer.base.data))
    changed = dict(views.get())["model.layers.0.self_attn.o_proj.weight"]
    assert isinstance(changed, BlockScaled)
    assert not changed.data.view(torch.uint8).any()
