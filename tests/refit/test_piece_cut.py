"""The cuts of a push serve later ones, and never hide a new value or other memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.fp8 import BlockScaled
from nemo_fp8rl.refit.expert_stacks import Weight
from nemo_fp8rl.refit.manifest import TensorPart
from nemo_fp8rl.refit.sender.piece_cut import PieceCut
from tests.refit.memory_engine import fp8
from tests.refit.stream import Stream
from tests.refit.test_expert_stacks import EXPERTS, GATE, by_experts, by_rows, check, stack_values

QUERY = "q_proj.weight"


class SameTensors(Stream):
    """The sources hand out the same tensors at every push, as a trainer does."""

    def rank_values(self, weights: dict[str, Tensor], part: TensorPart) -> Weight:
        self.handed: dict[Any, Weight]
        return self.handed.setdefault((part.name, part.region), super().rank_values(weights, part))


def handed_tensors(stream: SameTensors) -> list[Tensor]:
    found = [each for weight in stream.handed.values() for each in (weight if isinstance(weight, list) else [weight])]
    return [tensor for x in found for tensor in ([x.data, x.scale_inv] if isinstance(x, BlockScaled) else [x])]


@pytest.mark.parametrize("format", ["fp8", "nvfp4", "bfloat16"])
@pytest.mark.parametrize("sinks", [by_experts, by_rows])
@pytest.mark.parametrize("from_fp8", [False, True])
@pytest.mark.parametrize("delta", [False, True])
def test_values_and_memory_that_change_are_seen(format, sinks, from_fp8, delta):
    stream = SameTensors(by_experts(format, 2), sinks(format, 2), bucket=60_000, from_fp8=from_fp8)
    stream.handed = {}
    weights = stack_values()
    stream.deliver(weights, 0, keep=True)
    plans = [sender.plan for sender in stream.senders]
    for version, how in enumerate(("in place", "other memory", "freed"), 1):
        weights = {name: x * 2 for name, x in weights.items()}
        expected = Stream.rank_values
        for (name, region), old in stream.handed.items():
            part = TensorPart(name, format, (EXPERTS, *weights[name].shape[1:]), region)
            new = expected(stream, weights, part)
            change(old, new, how)
        stream.deliver(weights, version, delta=delta, keep=True)
        check(stream, weights, format)
    assert [sender.plan for sender in stream.senders] == plans


def change(old: Weight, new: Weight, how: str) -> None:
    if isinstance(old, list):
        assert isinstance(new, list)
        for pair in zip(old, new, strict=True):
            change(*pair, how)
        return
    pairs = [(old, new)]
    if isinstance(old, BlockScaled):
        assert isinstance(new, BlockScaled)
        pairs = [(old.data, new.data), (old.scale_inv, new.scale_inv)]
        if old.global_scale is not None:
            pairs.append((old.global_scale, new.global_scale))
    for tensor, values in pairs:
        assert isinstance(tensor, Tensor)
        if how == "other memory":
            tensor.data = values.clone()
            continue
        if how == "freed" and tensor.untyped_storage().nbytes() == tensor.nbytes:
            keep = torch.empty_like(tensor)  # so that the memory is not given back to it
            tensor.untyped_storage().resize_(0)
            del keep
            tensor.untyped_storage().resize_(values.nbytes)
        tensor.copy_(values)


def test_a_cut_is_made_once_and_a_copy_every_time():
    part, cut = fp8(QUERY, 512, 128), PieceCut()
    stacked = torch.randn(2, 256, 128).bfloat16()
    whole = ((0, 256), (0, 128))
    assert cut.values(stacked, part, whole) is cut.values(stacked, part, whole)
    odd = ((128, 384), (0, 128))  # halves of two matrices that are no neighbours in memory
    apart = torch.randn(2, 300, 128).bfloat16()[:, :256]
    first = PieceCut().values(apart, part, odd)
    again = PieceCut()
    assert again.values(apart, part, odd) is not again.values(apart, part, odd)
    apart.mul_(2)
    second = again.values(apart, part, odd)
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    assert torch.equal(second, first * 2)


def test_a_list_of_the_same_matrices_is_the_same_weight():
    (parts,) = by_experts("fp8", 1)
    matrices = list(stack_values()[GATE])
    cut = PieceCut()
    first = cut.values(list(matrices), parts[0], parts[0].region)
    assert cut.values(list(matrices), parts[0], parts[0].region) is first
    matrices[3] = matrices[3].clone()
    assert cut.values(matrices, parts[0], parts[0].region) is not first
