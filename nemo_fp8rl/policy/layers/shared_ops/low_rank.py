"""Adapters in the trainer by the operations that an aligned engine on a GPU computes with."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_fp8rl.ops.matmul import linear
from nemo_fp8rl.ops.rank_sum import UNORDERED_RANKS
from nemo_fp8rl.policy.layers.low_rank import AdapterState, LowRankColumn, LowRankExperts, LowRankRow, mix
from nemo_fp8rl.policy.layers.shared_ops.grouped_experts import ValueOf, multiply_experts
from nemo_fp8rl.policy.layers.shared_ops.rank_sum import sum_over_ranks


class SharedLowRankColumn(LowRankColumn):
    product = staticmethod(linear)


class SharedLowRankRow(LowRankRow):
    product = staticmethod(linear)

    def _sum(self, part: Tensor) -> Tensor:
        if self.tp_group.size() <= UNORDERED_RANKS:
            return super()._sum(part)
        return sum_over_ranks(part, self.tp_group, self.config.sequence_parallel)


class SharedLowRankExperts(LowRankExperts):
    """The values are those of `ops.experts`; the gradients are torch's."""

    def multiply(
        self, x: Tensor, weights: Sequence[Tensor], m_splits: Sequence[int], is_reduction: bool = False
    ) -> Tensor:
        with torch.no_grad():
            values = multiply_experts(x, torch.stack(list(weights)), None, m_splits, pow2=True)
        return ValueOf.apply(super().multiply(x, weights, m_splits, is_reduction), values)


def with_adapter(linear: type, is_row: bool, adapters: AdapterState) -> type:
    """Return the class of a linear layer with an adapter."""
    return mix(SharedLowRankRow if is_row else SharedLowRankColumn, linear, adapters)


def with_expert_adapters(linear: type, is_row: bool, adapters: AdapterState) -> type:
    """Return the class of a layer of many experts with an adapter for each."""
    return mix(SharedLowRankExperts, linear, adapters)
