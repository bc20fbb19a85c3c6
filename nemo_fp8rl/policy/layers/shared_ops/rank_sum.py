"""The sum over ranks of a row-parallel layer's products, as an aligned engine on a GPU computes it.

Each rank's product is rounded. More than two ranks sum in rank order, with one more rounding (`ops.rank_sum`). The sum
of two ranks is rounded once in either order, so it is left to the layer's own collective. The sum of an embedding that
is divided over ranks, too: it adds zeros to one number.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_fp8rl.ops.rank_sum import UNORDERED_RANKS, sum_in_rank_order


class RankOrderSum:
    """A mixin of Megatron's row-parallel layer."""

    tp_group: dist.ProcessGroup
    sequence_parallel: bool
    explicit_expert_comm: bool
    skip_bias_add: bool
    bias: Tensor | None

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.explicit_expert_comm or self.tp_group.size() <= UNORDERED_RANKS:
            return super().forward(input_)  # type: ignore[misc]
        assert self.skip_bias_add
        product = self._forward_impl(input_, self.weight)  # type: ignore[attr-defined]
        return sum_over_ranks(product, self.tp_group, self.sequence_parallel), self.bias


class TransformerEngineRankOrderSum:
    """A mixin of Transformer Engine's row-parallel layer, which gets no collective of its own on more than two ranks.

    The layer reads its attributes in each forward (transformer_engine/pytorch/module/linear.py).
    """

    tp_size: int
    parallel_mode: str | None
    sequence_parallel: bool
    _tp_group: dist.ProcessGroup

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.is_ordered, self.scatters = self.tp_size > UNORDERED_RANKS, self.sequence_parallel
        if self.is_ordered:
            self.parallel_mode, self.sequence_parallel = None, False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        product, bias = super().forward(x)  # type: ignore[misc]
        return sum_over_ranks(product, self._tp_group, self.scatters) if self.is_ordered else product, bias


def sum_over_ranks(product: Tensor, group: dist.ProcessGroup, scatters: bool) -> Tensor:
    """Return the sum over the group in rank order, with gradients.

    product:   [tokens, ...], of this rank
    scatters:  True returns this rank's part of the tokens, as sequence parallelism divides them
    """
    return (ScatteredSum if scatters else WholeSum).apply(product, group)


class WholeSum(torch.autograd.Function):
    """Every rank has the sum of all tokens, and the gradient of each product is that of the sum."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, group: dist.ProcessGroup) -> Tensor:
        return sum_in_rank_order(gather(product, group).view(group.size(), *product.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class ScatteredSum(torch.autograd.Function):
    """Rank i has the sum of the i-th part of the tokens. The exchange moves the bytes of a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        product = product.contiguous()
        parts = torch.empty_like(product)
        dist.all_to_all_single(parts, product, group=group)
        return sum_in_rank_order(parts.view(group.size(), -1, *parts.shape[1:]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gather(grad, ctx.group), None


def gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [ranks * tokens, ...], the parts [tokens, ...] of all ranks."""
    whole = part.new_empty((group.size() * part.size(0), *part.shape[1:]))
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole
