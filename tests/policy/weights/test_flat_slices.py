"""Slices of flattened parameters, cut anywhere, cover every element of the HF tensors once, at its position."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8rl.common.region import region_slices, shape_of
from nemo_fp8rl.hf.model_tensors import expected_tensors
from nemo_fp8rl.policy.weights.flat_slices import locate_rows, slice_boxes
from nemo_fp8rl.policy.weights.hf_names import MEGATRON_HEAD, from_hf
from tests.policy.weights.test_layout import DENSE, MOE, TIED, layouts

PADDED = dataclasses.replace(DENSE, vocab_size=51)
CASES = [
    (DENSE, layouts(DENSE, 2, 2, 1)),
    (PADDED, layouts(PADDED, 4, 1, 1)),
    (TIED, layouts(TIED, 1, 2, 1)),
    (MOE, layouts(MOE, 4, 1, 2, ep=4, etp=2)),
    (MOE, [dataclasses.replace(layout, grouped_experts=True) for layout in layouts(MOE, 1, 1, 2, ep=2)]),
]


@settings(max_examples=4, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize(("hf", "ranks"), CASES)
def test_slices_cover_the_ranks_part_of_every_tensor_once(hf, ranks, data):
    layout, shapes = data.draw(st.sampled_from(ranks)), expected_tensors(hf)
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    numbers = torch.arange(1, 1 + sum(sizes)).split(sizes)  # every element has its own
    tensors = {name: part.view(shapes[name]) for name, part in zip(shapes, numbers, strict=True)}
    parameters = dict(from_hf(layout, lambda name: tensors[name][region_slices(layout.region(name, shapes[name]))]))
    counts = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for parameter, where in locate_rows(layout, shapes):
        flat = parameters.pop(parameter).flatten()
        cuts = data.draw(st.lists(st.integers(0, len(flat)), max_size=4))
        for place in pairwise([0, *sorted(cuts), len(flat)]):
            piece, covered = flat[slice(*place)], 0
            for rows in where:
                for elements, region in slice_boxes(rows, place):
                    part = piece[elements].view(shape_of(region))
                    assert torch.equal(part, tensors[rows.name][region_slices(region)])
                    counts[rows.name][region_slices(region)] += parameter != MEGATRON_HEAD or not hf.tie_word_embeddings
                    covered += part.numel()
            assert covered == piece.count_nonzero()  # all but padding
    assert not parameters
    for name, count in counts.items():
        expected = torch.zeros_like(count)
        if name in {rows.name for parameter, where in locate_rows(layout, shapes) for rows in where}:
            expected[region_slices(layout.region(name, shapes[name]))] = 1
        if hf is TIED and name == "model.embed_tokens.weight" and not layout.is_first_stage:
            expected.zero_()
        assert torch.equal(count, expected), name


def test_a_whole_matrix_in_a_slice_is_one_box():
    """So a rank that has all of a matrix saves it as one part."""
    (layout,) = layouts(DENSE, 1, 1, 1)
    where = dict(locate_rows(layout, expected_tensors(DENSE)))["decoder.layers.0.self_attention.linear_proj.weight"]
    (rows,) = where
    assert rows.name == "model.layers.0.self_attn.o_proj.weight"
    assert list(slice_boxes(rows, (0, 96))) == [(slice(0, 96), ((0, 6), (0, 16)))]
