"""Where a piece of a parameter, flattened, lies in HF tensors.

Megatron's distributed optimizer cuts each parameter of a rank, flattened, into one piece for each data-parallel rank. A
parameter's rows are rows of HF tensors in another order, which `from_hf` says, so a piece is some boxes of those: whole
rows, and a part of a row where it begins and ends.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_fp8rl.common.region import Region
from nemo_fp8rl.policy.weights.hf_names import from_hf
from nemo_fp8rl.policy.weights.layout import Layout

STRIDE = 1 << 40
"""More rows than a tensor has."""


class Rows(NamedTuple):
    """Consecutive rows of a parameter that are consecutive rows of one HF tensor, too.

    own: the first of `length` in the parameter. first: in the HF tensor. columns: of the HF tensor; None of a vector.
    """

    name: str
    own: int
    first: int
    length: int
    columns: tuple[int, int] | None


def rows_of(layout: Layout, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, list[Rows]]]:
    """(Megatron's name, where its rows are) of every parameter of the rank; rows of padding are nowhere.

    shapes: of HF tensors.
    """
    asked: list[tuple[str, Region]] = []

    def numbered(name: str) -> Tensor:
        """Rows as numbers, of which padding has 0 and no two tensors have the same or consecutive ones."""
        region = layout.region(name, shapes[name])
        (start, stop), *rest = region
        begin = 1 + len(asked) * STRIDE
        asked.append((name, region))
        return torch.arange(begin + start, begin + stop).view(-1, *(1 for _ in rest))

    for parameter, numbers in from_hf(layout, numbered):
        yield parameter, list(_runs(numbers.flatten(), asked))
        asked.clear()


def _runs(numbers: Tensor, asked: Sequence[tuple[str, Region]]) -> Iterator[Rows]:
    breaks = (numbers.diff() != 1).nonzero().flatten() + 1
    for own, end in pairwise([0, *breaks.tolist(), len(numbers)]):
        if number := int(numbers[own]):
            which, first = divmod(number - 1, STRIDE)
            name, (_, *rest) = asked[which]
            yield Rows(name, own, first, end - own, rest[0] if rest else None)


def boxes(rows: Rows, place: tuple[int, int]) -> Iterator[tuple[slice, Region]]:
    """What a piece has of these rows: elements of the piece, which is [start, stop) of the parameter flattened, and
    where they are in the HF tensor.
    """
    first, last = rows.columns or (0, 1)
    width = last - first
    at, stop = max(place[0], rows.own * width), min(place[1], (rows.own + rows.length) * width)
    while at < stop:
        row, column = divmod(at, width)
        whole = 0 if column else (stop - at) // width
        end = at + whole * width if whole else min(stop, (row + 1) * width)
        row += rows.first - rows.own
        box: Region = ((row, row + max(whole, 1)),)
        if rows.columns is not None:
            box += ((first, last) if whole else (first + column, first + column + end - at),)
        yield slice(at - place[0], end - place[0]), box
        at = end
