"""A mixture of experts in the trainer, by the operations that an aligned engine on a GPU computes with.

Megatron weighs an expert's input to its last product; here, as in the engine, the outputs are weighed and summed in the
order of the experts' numbers. With expert parallelism the rows travel to their experts' ranks, and the outputs back to
the ranks of their tokens, where they are summed. Ranks do not share the matrices of an expert.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_fp8rl.ops.experts import choose_experts, combine
from nemo_fp8rl.ops.matmul import linear


class SharedMoELayer(MoELayer):
    """Router, experts and their sum. Megatron's router has the weight, and the replay of an engine's choice."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Return (the sum of the experts' outputs, None for a bias); hidden_states [T, B, H]."""
        x = hidden_states.flatten(0, -2)
        weights, ids = self._choose(linear(x, self.router.weight))
        slots = ids.flatten()
        by_expert = slots.argsort(stable=True)
        rows, counts = x[by_expert // ids.size(1)], slots.bincount(minlength=self.config.num_moe_experts)
        if self.ep_group.size() > 1:
            outputs = self._on_ranks_of_experts(rows, counts)
        else:
            outputs = self._run_experts(rows, counts.tolist())
        y = x.new_zeros(rows.shape).index_copy(0, by_expert, outputs)
        return WeightedSum.apply(y, weights, ids).view_as(hidden_states), None

    def _run_experts(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Return the outputs [rows, H] of rows [rows, H], which this rank's experts share in their order."""
        if isinstance(self.experts, TEGroupedMLP):
            weight_of_one = torch.ones(len(rows), device=rows.device)  # it weighs before the last product
            return self.experts(rows, torch.tensor(counts), weight_of_one)[0]
        shares = zip(self.experts.local_experts, rows.split(counts), strict=True)
        return torch.cat([expert(share)[0] if len(share) else share for expert, share in shares])

    def _on_ranks_of_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Send rows [rows, H], sorted by expert, to the ranks of their experts; return the outputs that come back.

        counts:  int64 [experts], this rank's rows of each expert
        """
        of_ranks = torch.empty_like(counts)
        dist.all_to_all_single(of_ranks, counts, group=self.ep_group)
        ranks = self.ep_group.size()
        sent, received = (t.view(ranks, -1).sum(1).tolist() for t in (counts, of_ranks))
        expert = torch.arange(self.num_local_experts, device=rows.device).repeat(ranks).repeat_interleave(of_ranks)
        by_expert = expert.argsort(stable=True)  # they come by rank, and of each rank by expert
        arrived = all_to_all(self.ep_group, rows, received, sent)[by_expert]
        outputs = self._run_experts(arrived, of_ranks.view(ranks, -1).sum(0).tolist())
        return all_to_all(self.ep_group, outputs[by_expert.argsort()], sent, received)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return (weights, experts), both [tokens, k]; the experts are the engine's where the batch names them."""
        weights, ids = ExpertChoice.apply(logits, self.router.topk)
        replay = getattr(self.router, "router_replay", None)
        if replay is None:
            return weights, ids
        scores = logits.float()
        _, replayed = replay.get_replay_topk(scores, ids.size(1), None, None, lambda *_, **__: (weights, ids))
        same = (replayed == ids).all(-1, keepdim=True)
        return torch.where(same, weights, scores.gather(1, replayed).softmax(-1)), replayed


class ExpertChoice(torch.autograd.Function):
    """apply(logits [tokens, experts], k) -> (weights float32, experts int64), both [tokens, k]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        weights, ids = choose_experts(logits, k, True)
        ids = ids.long()
        ctx.save_for_backward(weights, ids)
        ctx.mark_non_differentiable(ids)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return weights, ids

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
        weights, ids = ctx.saved_tensors
        of_chosen = weights * (grad - (grad * weights).sum(-1, keepdim=True))  # of a softmax over the chosen logits
        return grad.new_zeros(ctx.shape).scatter(1, ids, of_chosen).to(ctx.dtype), None


class WeightedSum(torch.autograd.Function):
    """`ops.experts.combine` with gradients: apply(y [tokens * k, H], weights [tokens, k], ids [tokens, k])."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights)
        return combine(y, weights, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        y, weights = ctx.saved_tensors
        of_token = grad.float().unsqueeze(1)  # [tokens, 1, H]
        grad_y = (weights.unsqueeze(-1) * of_token).flatten(0, 1).to(y.dtype)
        return grad_y, (y.view(*weights.shape, -1).float() * of_token).sum(-1), None
