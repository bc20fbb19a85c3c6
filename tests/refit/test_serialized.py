"""An update as bytes: the round trip is exact, and damage is a RefitError, never another exception."""

import json
import random
import struct

import pytest
import torch

from nemo_fp8rl.fp8 import Fp8Layers
from nemo_fp8rl.refit.manifest import Manifest, RefitError, Update
from nemo_fp8rl.refit.quantize import build_update
from nemo_fp8rl.refit.transport.serialized import pack, unpack

LAYERS = {True: Fp8Layers(0, 36), False: Fp8Layers.none()}

NAME = "model.layers.0.mlp.down_proj.weight"


def update(fp8: bool = True) -> Update:
    generator = torch.Generator().manual_seed(0)
    weights = {NAME: torch.randn(5, 7, generator=generator).bfloat16(), "model.norm.weight": torch.ones(3).bfloat16()}
    return build_update(weights.items(), 12, LAYERS[fp8], "pow2")


SHAPES = {NAME: (5, 7), "model.norm.weight": (3,)}
"""What the engine holds."""


def with_metadata(metadata: object) -> bytes:
    """A well-formed safetensors file without tensors, with this header under __metadata__."""
    header = json.dumps({"__metadata__": metadata}).encode()
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize("fp8", [True, False])
def test_an_update_comes_back_to_the_bit(fp8):
    sent = update(fp8)
    got = unpack(pack(sent))
    assert got.manifest == sent.manifest
    assert set(got.tensors) == set(sent.tensors)
    for name, tensor in sent.tensors.items():
        assert got.tensors[name].dtype == tensor.dtype
        assert torch.equal(got.tensors[name].view(torch.uint8), tensor.view(torch.uint8))
    got.verify(SHAPES, LAYERS[fp8])


def test_every_dtype_that_a_checkpoint_may_hold_travels():
    values = torch.tensor([[0.0, -0.0, 1.5], [-2.0, 448.0, 0.25]])
    dtypes = (torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32)
    tensors = {str(dtype): values.to(dtype) for dtype in dtypes} | {"empty": torch.zeros(0, 4)}
    sent = Update(Manifest.of(0, tensors), tensors)
    got = unpack(pack(sent))
    assert got.manifest == sent.manifest
    assert all(torch.equal(got.tensors[n].view(torch.uint8), t.view(torch.uint8)) for n, t in tensors.items())


def test_every_truncation_and_extension_is_refused():
    payload = pack(update())
    for damaged in [*(payload[:size] for size in range(len(payload))), payload + b"\0", payload * 2]:
        with pytest.raises(RefitError):
            unpack(damaged)


def applied(payload: bytes) -> Manifest | None:
    """The manifest that an engine would apply these bytes under; None for a RefitError, all else is a defect."""
    try:
        received = unpack(payload)
        received.verify(SHAPES, LAYERS[True])
    except RefitError:
        return None
    return received.manifest


def test_a_flipped_bit_of_the_header_is_refused_unless_it_only_renumbers_the_version():
    payload, whole = pack(update()), update().manifest
    assert applied(payload) == whole
    (header_size,) = struct.unpack_from("<Q", payload)
    refused = 0
    for position in range(8 + header_size):
        for bit in range(8):
            damaged = bytearray(payload)
            damaged[position] ^= 1 << bit
            manifest = applied(bytes(damaged))
            refused += manifest is None
            assert manifest is None or manifest.tensors == whole.tensors
    assert refused > 0.99 * 8 * (8 + header_size)


def test_random_damage_is_refused_or_verified_never_another_exception():
    payload, rng = pack(update()), random.Random(0)
    for _ in range(1500):
        damaged = bytearray(payload)
        for _ in range(rng.choice([1, 2, 5, 50])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        cut = rng.choice([len(damaged), rng.randrange(len(damaged))])
        manifest = applied(bytes(damaged[:cut]))
        assert manifest is None or manifest.tensors == update().manifest.tensors


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\0" * 8,
        b"\xff" * 64,
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"null",
        with_metadata(None),
        with_metadata("text"),
        with_metadata([]),
        with_metadata({}),
        with_metadata({"manifest": ""}),
        with_metadata({"manifest": "null"}),
        with_metadata({"manifest": "[]"}),
        with_metadata({"manifest": "{}"}),
        with_metadata({"manifest": '{"version": 0}'}),
        with_metadata({"manifest": '{"version": 0, "tensors": 3}'}),
        with_metadata({"manifest": '{"version": 0, "tensors": [3]}'}),
        with_metadata({"manifest": '{"version": 0, "tensors": [{"name": "a", "dtype": "b", "shape": 3}]}'}),
    ],
    ids=lambda payload: repr(payload[8:48]),
)
def test_bytes_that_are_no_update_are_refused(payload):
    with pytest.raises(RefitError, match="damaged"):
        unpack(payload)
