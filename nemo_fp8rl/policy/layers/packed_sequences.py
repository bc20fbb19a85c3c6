"""Sequences one after the other, without padding, and how attention pads them."""

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from nemo_fp8rl.batch import flat_index


@dataclass
class LengthGroup:
    """Sequences of like length, right-padded to the longest of them: shape is (s, b).

    rows: int64 [b], which they are. tokens: int64 [n], where theirs are among all. places: (position, row) of those in
    [s, b], int64 [n] each.
    """

    rows: Tensor
    tokens: Tensor
    places: tuple[Tensor, Tensor]
    shape: tuple[int, int]

    def to(self, device: torch.device) -> "LengthGroup":
        position, row = self.places
        return LengthGroup(
            self.rows.to(device), self.tokens.to(device), (position.to(device), row.to(device)), self.shape
        )

    def padded(self, packed: Tensor) -> Tensor:
        """[tokens, ...] -> [s, b, ...]"""
        return packed.new_zeros(*self.shape, *packed.shape[1:]).index_put(self.places, packed[self.tokens])


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description, and ours of how attention pads them: those of like length together, so that padding at
    most doubles them. Planned on the host once for all layers, as on a GPU every look at a length waits for it.

    order: int64 [tokens], where each is in what `length_groups` have, one after the other.
    """

    length_groups: tuple[LengthGroup, ...] = ()
    order: Tensor | None = None

    @classmethod
    def of(cls, lengths: Tensor, device: torch.device) -> Self:
        """lengths: int64 [sequences], on the host. device: where the tokens are."""
        ends = F.pad(lengths.cumsum(0), (1, 0))
        powers = lengths.log2().ceil()
        groups = []
        for power in powers[lengths > 0].unique():
            rows = (powers == power).nonzero().flatten()
            row, position = flat_index(lengths[rows])
            shape = int(lengths[rows].max()), len(rows)
            groups.append(LengthGroup(rows, ends[rows][row] + position, (position, row), shape))
        order = torch.cat([group.tokens for group in groups]).argsort()
        cumulated, longest = ends.int().to(device), int(lengths.max())
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cumulated,
            cu_seqlens_kv=cumulated,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            length_groups=tuple(group.to(device) for group in groups),
            order=order.to(device),
        )
