"""Locates a slice of a flattened parameter in HF tensors.

Megatron's distributed optimizer cuts each flattened parameter of a rank into one slice for each data-parallel rank. A
parameter's rows are rows of HF tensors in another order, which `from_hf` defines, so a slice is a few boxes of these
tensors: whole rows, and part of a row at its beginning and end.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_fp8rl.common.region import Region
from nemo_fp8rl.policy.weights.adapter_names import trained_from_hf
from nemo_fp8rl.policy.weights.layout import Layout

STRIDE = 1 << 40
"""A number above the rows of any tensor."""


class RowRun(NamedTuple):
    """Consecutive rows of a parameter that are also consecutive rows of one HF tensor.

    name:           name of the HF tensor
    parameter_row:  the first row in the parameter
    hf_row:         the first row in the HF tensor
    length:         number of rows
    columns:        (start, stop) in the HF tensor; None for a vector
    """

    name: str
    parameter_row: int
    hf_row: int
    length: int
    columns: tuple[int, int] | None


def locate_rows(layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, list[RowRun]]]:
    """Yield (Megatron's name, runs of rows) for every trained parameter of the rank; padding is in no run.

    shapes:  the shapes of the whole HF tensors, by name
    """
    regions: list[tuple[str, Region]] = []

    def number_rows(name: str) -> Tensor:
        """Return numbers in the place of rows: 0 is padding, and two tensors have no equal or consecutive numbers."""
        region = layout.region(name, shapes[name])
        (start, stop), *rest = region
        begin = 1 + len(regions) * STRIDE
        regions.append((name, region))
        return torch.arange(begin + start, begin + stop).view(-1, *(1 for _ in rest))

    for parameter, numbers in trained_from_hf(layout, number_rows):
        yield parameter, list(_find_runs(numbers.flatten(), regions))
        regions.clear()


def _find_runs(numbers: Tensor, regions: Sequence[tuple[str, Region]]) -> Iterator[RowRun]:
    breaks = (numbers.diff() != 1).nonzero().flatten() + 1
    for start, stop in pairwise([0, *breaks.tolist(), len(numbers)]):
        if number := int(numbers[start]):
            tensor, hf_row = divmod(number - 1, STRIDE)
            name, (_, *rest) = regions[tensor]
            yield RowRun(name, start, hf_row, stop - start, rest[0] if rest else None)


def slice_boxes(rows: RowRun, span: tuple[int, int]) -> Iterator[tuple[slice, Region]]:
    """Yield (elements of the slice, their region in the HF tensor) for the rows that the slice has of a run.

    span:  (start, stop) of the slice in the flattened parameter
    """
    first, last = rows.columns or (0, 1)
    width = last - first
    at, stop = max(span[0], rows.parameter_row * width), min(span[1], (rows.parameter_row + rows.length) * width)
    while at < stop:
        row, column = divmod(at, width)
        whole = 0 if column else (stop - at) // width
        end = at + whole * width if whole else min(stop, (row + 1) * width)
        row += rows.hf_row - rows.parameter_row
        box: Region = ((row, row + max(whole, 1)),)
        if rows.columns is not None:
            box += ((first, last) if whole else (first + column, first + column + end - at),)
        yield slice(at - span[0], end - span[0]), box
        at = end
