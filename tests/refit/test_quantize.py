"""From weights to an update: FP8 where the contract puts it, copies everywhere, and nothing that is not finite."""

import math

import pytest
import torch

from nemo_fp8rl.fp8 import Fp8Layers, quantize_blockwise
from nemo_fp8rl.refit.manifest import Manifest, RefitError
from nemo_fp8rl.refit.quantize import build_update

LAYERS = {True: Fp8Layers(0, 36), False: Fp8Layers.none()}

PROJECTION, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {EMBEDDING: (64, 128), PROJECTION: (200, 300), NORM: (128,), HEAD: (64, 128)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def shapes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_projections_travel_as_the_quantizers_bytes_and_scales(scale_format):
    given = weights()
    update = build_update(given.items(), 3, LAYERS[True], scale_format)
    expected = quantize_blockwise(given[PROJECTION], scale_format=scale_format)
    assert list(update.tensors) == [EMBEDDING, PROJECTION, PROJECTION + "_scale_inv", NORM, HEAD]
    assert update.tensors[PROJECTION].dtype == torch.float8_e4m3fn
    assert torch.equal(bits(update.tensors[PROJECTION]), bits(expected.data))
    assert torch.equal(update.tensors[PROJECTION + "_scale_inv"], expected.scale_inv)
    for name in (EMBEDDING, NORM, HEAD):
        assert update.tensors[name].dtype == torch.bfloat16
        assert torch.equal(update.tensors[name], given[name])
    assert update.manifest == Manifest.of(3, update.tensors)
    update.verify(shapes(given), LAYERS[True])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_fp8_every_weight_travels_as_it_is(dtype):
    given = {name: weight.to(dtype) for name, weight in weights().items()}
    update = build_update(given.items(), 0, LAYERS[False], "pow2")
    assert list(update.tensors) == list(given)
    assert all(torch.equal(update.tensors[name], given[name]) for name in given)
    assert {tensor.dtype for tensor in update.tensors.values()} == {dtype}
    update.verify(shapes(given), LAYERS[False])


@pytest.mark.parametrize("fp8", [True, False])
def test_training_may_go_on_while_an_update_travels(fp8):
    given = {name: torch.nn.Parameter(weight) for name, weight in weights().items()}
    update = build_update(given.items(), 0, LAYERS[fp8], "pow2")
    before = {name: bits(tensor).clone() for name, tensor in update.tensors.items()}
    with torch.no_grad():
        for weight in given.values():
            weight.zero_()
    assert all(torch.equal(bits(update.tensors[name]), before[name]) for name in before)
    assert not any(tensor.requires_grad for tensor in update.tensors.values())


@pytest.mark.parametrize("fp8", [True, False])
def test_views_travel_as_their_contiguous_values(fp8):
    weight = weights()[PROJECTION]
    views = {PROJECTION: weight.t(), NORM: weight[:, 0], EMBEDDING: weight[::2, 1::2]}
    seen = build_update(views.items(), 0, LAYERS[fp8], "pow2").tensors
    copied = build_update(((name, view.contiguous()) for name, view in views.items()), 0, LAYERS[fp8], "pow2").tensors
    assert all(seen[name].is_contiguous() for name in seen)
    assert all(torch.equal(bits(seen[name]), bits(copied[name])) for name in copied)


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [PROJECTION, NORM, EMBEDDING])
def test_a_weight_that_is_not_finite_is_named(name, bad, fp8):
    given = weights()
    given[name].view(-1)[-1] = bad
    with pytest.raises(RefitError, match=rf"refit 7: {name}\b.* not finite"):
        build_update(given.items(), 7, LAYERS[fp8], "pow2")
