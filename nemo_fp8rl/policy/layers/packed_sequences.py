"""Packed sequences: one after the other without padding, and the groups in which attention pads them."""

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from nemo_fp8rl.batch import token_coordinates


@dataclass
class LengthGroup:
    """Sequences of similar length, which attention right-pads to the longest of them.

    rows:    int64 [b], the numbers of these sequences
    tokens:  int64 [n], the indices of their tokens among all packed tokens
    index:   (position, row) of these tokens in [s, b], int64 [n] each
    shape:   (s, b)
    """

    rows: Tensor
    tokens: Tensor
    index: tuple[Tensor, Tensor]
    shape: tuple[int, int]

    def to(self, device: torch.device) -> "LengthGroup":
        position, row = self.index
        return LengthGroup(
            self.rows.to(device), self.tokens.to(device), (position.to(device), row.to(device)), self.shape
        )

    def pad(self, packed: Tensor) -> Tensor:
        """Pad the tokens of this group: [tokens, ...] -> [s, b, ...], zeros at padding."""
        return packed.new_zeros(*self.shape, *packed.shape[1:]).index_put(self.index, packed[self.tokens])


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of packed sequences, with the groups in which attention pads them.

    A group has sequences of similar length, so that padding at most doubles them. The groups are planned on the host,
    once for all layers, because reading a length from a GPU waits for the GPU.

    length_groups:  the groups
    order:          int64 [tokens], the index of each token in the concatenated groups
    """

    length_groups: tuple[LengthGroup, ...] = ()
    order: Tensor | None = None

    @classmethod
    def from_lengths(cls, lengths: Tensor, device: torch.device) -> Self:
        """Plan the groups.

        lengths:  int64 [sequences], on the host
        device:   the device of the tokens
        """
        starts = F.pad(lengths.cumsum(0), (1, 0))
        powers = lengths.log2().ceil()
        groups = []
        for power in powers[lengths > 0].unique():
            rows = (powers == power).nonzero().flatten()
            row, position = token_coordinates(lengths[rows])
            shape = int(lengths[rows].max()), len(rows)
            groups.append(LengthGroup(rows, starts[rows][row] + position, (position, row), shape))
        order = torch.cat([group.tokens for group in groups]).argsort()
        offsets, longest = starts.int().to(device), int(lengths.max())
        return cls(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            length_groups=tuple(group.to(device) for group in groups),
            order=order.to(device),
        )
