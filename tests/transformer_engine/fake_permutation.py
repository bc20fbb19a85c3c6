"""Tokens sorted by expert and back, in torch: Transformer Engine's Triton kernels take a minute a model when they are
interpreted. `test_permutation.py` holds one against the other.
"""

from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils
from torch import Tensor


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.rows, ctx.count = rows, len(tokens)
        return tokens[rows]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0], ctx.rows, ctx.count), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, permuted: Tensor, rows: Tensor, count: int) -> Tensor:
        ctx.rows = rows
        return _sum(permuted, rows, count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.rows], None, None


def _sum(permuted: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return sums [count, hidden] in float32, from the last expert to the first, rounded once."""
    total = torch.zeros(count, permuted.size(1), dtype=torch.float32, device=permuted.device)
    return total.index_add_(0, rows.flip(0), permuted.flip(0).float()).to(permuted.dtype)


def permute(tokens: Tensor, routing_map: Tensor, num_out_tokens: Any) -> tuple[Tensor, Tensor]:
    rows = routing_map.t().nonzero()[:, 1]
    assert len(rows) == int(num_out_tokens)  # what the kernel makes room for
    return _Gather.apply(tokens, rows), rows


def permute_with_probs(
    tokens: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: Any
) -> tuple[Tensor, Tensor, Tensor]:
    permuted, rows = permute(tokens, routing_map, num_out_tokens)
    return permuted, probs.t()[routing_map.t()], rows


def unpermute(
    permuted: Tensor, rows: Tensor, merging_probs: None = None, restore_shape: torch.Size | None = None
) -> Tensor:
    assert restore_shape is not None
    return _Combine.apply(permuted, rows, restore_shape[0])


def sort_chunks(tokens: Tensor, sizes: Tensor, order: Tensor) -> Tensor:
    return moe_utils.sort_chunks_by_idxs(tokens, sizes, order)[0]


def sort_chunks_with_probs(tokens: Tensor, probs: Tensor, sizes: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    return moe_utils.sort_chunks_by_idxs(tokens, sizes, order, probs)


FAKES = {
    "fused_permute": permute,
    "fused_permute_with_probs": permute_with_probs,
    "fused_unpermute": unpermute,
    "fused_sort_chunks_by_index": sort_chunks,
    "fused_sort_chunks_by_index_with_probs": sort_chunks_with_probs,
}
"""The functions that Megatron calls, by Megatron's names."""
