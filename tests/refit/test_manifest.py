"""What an engine refuses before a byte is applied."""

import dataclasses
import math

import pytest
import torch

from nemo_fp8rl.fp8 import Fp8Layers
from nemo_fp8rl.refit.manifest import Manifest, RefitError, TensorSpec, Update, joined
from nemo_fp8rl.refit.quantize import build_update

LAYERS = {True: Fp8Layers(0, 36), False: Fp8Layers.none()}

PROJECTION, NORM, EMBEDDING = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "model.embed_tokens.weight"
SCALE = PROJECTION + "_scale_inv"


def checkpoint() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def update(fp8: bool = True) -> Update:
    return build_update(checkpoint().items(), 5, LAYERS[fp8], "pow2")


def changed(fp8: bool = True, **tensors: torch.Tensor | None) -> Update:
    """An update whose manifest describes it, with some tensors replaced or (None) left out."""
    names = {"projection": PROJECTION, "scale": SCALE, "norm": NORM, "embedding": EMBEDDING}
    held = {**update(fp8).tensors, **{names.get(key, key): tensor for key, tensor in tensors.items()}}
    held = {name: tensor for name, tensor in held.items() if tensor is not None}
    return Update(Manifest.of(5, held), held)


SHAPES = {EMBEDDING: (64, 128), PROJECTION: (256, 300), NORM: (128,)}
"""What the engine holds; scales need not be listed."""


@pytest.mark.parametrize("fp8", [True, False])
def test_a_whole_update_is_accepted(fp8):
    update(fp8).verify(SHAPES, LAYERS[fp8])


def test_a_manifest_lists_name_dtype_and_shape_in_order():
    assert update().manifest.tensors == (
        TensorSpec(EMBEDDING, "bfloat16", (64, 128)),
        TensorSpec(PROJECTION, "float8_e4m3fn", (256, 300)),
        TensorSpec(SCALE, "float32", (2, 3)),
        TensorSpec(NORM, "bfloat16", (128,)),
    )
    assert update().manifest.names == {*SHAPES, SCALE}
    assert update().nbytes == 2 * 64 * 128 + 256 * 300 + 4 * 6 + 2 * 128


@pytest.mark.parametrize("fp8", [True, False])
def test_a_manifest_round_trips_through_json(fp8):
    manifest = update(fp8).manifest
    assert Manifest.from_json(manifest.to_json()) == manifest
    scalar = Manifest.of(0, {"a": torch.tensor(1.0), "ü": torch.zeros(0, 3)})
    assert Manifest.from_json(scalar.to_json()) == scalar


@pytest.mark.parametrize("name", [EMBEDDING, PROJECTION, NORM])
@pytest.mark.parametrize("fp8", [True, False])
def test_a_missing_tensor_is_named(fp8, name):
    with pytest.raises(RefitError, match=f"lacks 1 .*{name}$"):
        changed(fp8, **{name: None}).verify(SHAPES, LAYERS[fp8])


def test_an_unknown_tensor_is_named():
    with pytest.raises(RefitError, match=r"unknown to the engine, among them model\.extra$"):
        changed(**{"model.extra": torch.zeros(2)}).verify(SHAPES, LAYERS[True])


def test_a_tensor_that_left_its_manifest_is_named():
    whole = update()
    rest = {name: tensor for name, tensor in whole.tensors.items() if name != NORM}
    with pytest.raises(RefitError, match=NORM):
        Update(whole.manifest, rest).verify(SHAPES, LAYERS[True])
    with pytest.raises(RefitError, match=r"model\.extra"):
        Update(whole.manifest, {**whole.tensors, "model.extra": torch.zeros(2)}).verify(SHAPES, LAYERS[True])


@pytest.mark.parametrize("other", [torch.zeros(127).bfloat16(), torch.zeros(128), torch.zeros(1, 128).bfloat16()])
def test_a_tensor_that_differs_from_its_manifest_is_named(other):
    whole = update()
    with pytest.raises(RefitError, match=NORM):
        Update(whole.manifest, {**whole.tensors, NORM: other}).verify(SHAPES, LAYERS[True])


def test_a_tensor_listed_twice_differently_is_refused():
    whole = update()
    twice = (*whole.manifest.tensors, TensorSpec(NORM, "bfloat16", (64,)))
    with pytest.raises(RefitError, match=NORM):
        Update(dataclasses.replace(whole.manifest, tensors=twice), whole.tensors).verify(SHAPES, LAYERS[True])


def test_a_missing_scale_is_named():
    with pytest.raises(RefitError, match=SCALE):
        changed(scale=None).verify(SHAPES, LAYERS[True])
    with pytest.raises(RefitError, match=SCALE):  # also when the engine forgot to ask for it
        changed(scale=None).verify(SHAPES, LAYERS[True])


@pytest.mark.parametrize(
    "scale",
    [
        torch.ones(2, 2),
        torch.ones(3, 2),
        torch.ones(2, 4),
        torch.ones(6),
        torch.ones(2, 3, 1),
        torch.ones(()),
        torch.ones(2, 3, dtype=torch.float64),
        torch.ones(2, 3).bfloat16(),
        torch.ones(2, 3, dtype=torch.int32),
        torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, math.nan]]),
        torch.tensor([[math.inf, 1.0, 1.0], [1.0, 1.0, 1.0]]),
    ],
    ids=lambda t: f"{t.dtype} {list(t.shape)}",
)
def test_a_scale_of_another_shape_or_dtype_or_not_finite_is_named(scale):
    with pytest.raises(RefitError, match=f"refit 5: {SCALE}"):
        changed(scale=scale).verify(SHAPES, LAYERS[True])


def test_a_weight_of_the_other_flow_is_named():
    with pytest.raises(RefitError, match=f"refit 5: {PROJECTION} is bfloat16"):
        changed(projection=torch.zeros(256, 300).bfloat16()).verify(SHAPES, LAYERS[True])
    with pytest.raises(RefitError, match=f"unknown to the engine, among them {SCALE}"):
        update(fp8=True).verify(SHAPES, LAYERS[False])


@pytest.mark.parametrize("name", [EMBEDDING, NORM])
@pytest.mark.parametrize("fp8", [True, False])
def test_fp8_where_the_contract_has_none_is_refused(fp8, name):
    as_fp8 = update(fp8).tensors[name].to(torch.float8_e4m3fn)
    with pytest.raises(RefitError, match=name):
        changed(fp8, **{name: as_fp8}).verify(SHAPES, LAYERS[fp8])
    scale = name + "_scale_inv"
    blocks = torch.ones(1, 1) if as_fp8.dim() == 2 else torch.ones(1)
    with pytest.raises(RefitError, match=name):  # also when it brings its scale and the engine lists that
        changed(fp8, **{name: as_fp8, scale: blocks}).verify(SHAPES | {scale: blocks.shape}, LAYERS[fp8])


@pytest.mark.parametrize("shape", [(256,), (2, 128, 300), ()])
def test_an_fp8_weight_that_is_no_matrix_is_refused(shape):
    with pytest.raises(RefitError, match=PROJECTION):
        changed(projection=torch.zeros(shape).to(torch.float8_e4m3fn)).verify(
            SHAPES | {PROJECTION: shape}, LAYERS[True]
        )


@pytest.mark.parametrize("name", [EMBEDDING, PROJECTION, NORM])
def test_a_tensor_of_another_shape_than_the_engines_is_named(name):
    with pytest.raises(RefitError, match=name):
        update().verify(SHAPES | {name: (7, 7)}, LAYERS[True])


# Parts of several ranks


def split(at: int = 128) -> list[Update]:
    """What two ranks send that share the projection's rows: the second has no copy of what is whole."""
    weights = {
        n: torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16() for n, shape in SHAPES.items()
    }
    top = weights | {PROJECTION: weights[PROJECTION][:at]}
    first = build_update(top.items(), 5, LAYERS[True], "pow2")
    rest = {PROJECTION: weights[PROJECTION][at:]}
    second = build_update(rest.items(), 5, LAYERS[True], "pow2", starts={PROJECTION: (at, 0)})
    return [first, second]


def test_parts_of_ranks_make_the_update_of_one():
    weights = {
        n: torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16() for n, shape in SHAPES.items()
    }
    expected = build_update(weights.items(), 5, LAYERS[True], "pow2")
    for parts in (split(), split()[::-1]):
        whole = joined(parts)
        whole.verify(SHAPES, LAYERS[True])
        assert whole.tensors.keys() == expected.tensors.keys()
        assert all(
            torch.equal(whole.tensors[n].view(torch.uint8), t.view(torch.uint8)) for n, t in expected.tensors.items()
        )


def test_a_part_says_where_it_begins_and_its_scale_in_blocks():
    specs = {spec.name: spec for spec in split()[1].manifest.tensors}
    assert specs[PROJECTION] == TensorSpec(PROJECTION, "float8_e4m3fn", (128, 300), (128, 0))
    assert specs[SCALE] == TensorSpec(SCALE, "float32", (1, 3), (1, 0))
    assert Manifest.from_json(split()[1].manifest.to_json()) == split()[1].manifest


def test_a_part_must_begin_at_a_block():
    with pytest.raises(AssertionError):
        split(at=64)


def with_manifest(update: Update, **changes: object) -> Update:
    """The projection's line of the manifest changed."""
    specs = (dataclasses.replace(s, **changes) if s.name == PROJECTION else s for s in update.manifest.tensors)
    return Update(dataclasses.replace(update.manifest, tensors=tuple(specs)), update.tensors)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a, b: [a, Update(dataclasses.replace(b.manifest, version=6), b.tensors)], r"versions: \[5, 6\]"),
        (lambda a, b: [a, with_manifest(b, start=(100, 0))], "same part of .*q_proj"),
        (lambda a, b: [a, with_manifest(b, start=(200, 0))], "parts of .*q_proj.* are missing"),
        (lambda a, b: [b], "parts of .*q_proj.* are missing"),
        (lambda a, b: [a, with_manifest(b, dtype="bfloat16")], "differs from its manifest"),
        (lambda a, b: [a, with_manifest(b, shape=(128, 299))], "differs from its manifest"),
        (lambda a, b: [a, b, b], "same part of"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(damage, message):
    with pytest.raises(RefitError, match=message):
        joined(damage(*split()))


def test_a_rank_that_sent_nothing_leaves_a_tensor_too_short():
    whole = joined(split()[:1])
    with pytest.raises(RefitError, match=r"q_proj\.weight is \[128, 300\], the engine's is \[256, 300\]"):
        whole.verify(SHAPES, LAYERS[True])
