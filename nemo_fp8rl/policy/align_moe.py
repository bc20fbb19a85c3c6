"""Rollout alignment of a mixture of experts: rounding points of vLLM's CPU kernels of 0.32, and of our FP8 experts.

router      logits, softmax and weights in the activations' dtype (Megatron's default is float32)
expert      bfloat16: float32 throughout but for the activation; FP8: as a dense FP8 MLP
combine     the expert's output times its weight, summed over experts in their order, in float32; one rounding
            (Megatron multiplies the activation before the down projection, and rounds). Ranks that share an FP8
            expert's matrices add up and round its output before (Megatron adds up what is weighed already)
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from nemo_fp8rl.policy.linears import Fp8Forward


class AlignedExperts(SequentialMLP):
    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """[tokens, hidden], sorted by expert, and their weights [tokens] -> float32 [tokens, hidden].

        Ranks that share the experts' matrices have the same tokens, and what they return is summed.
        """
        x = permuted_local_hidden_states
        shares = zip(self.local_experts, x.split(tokens_per_expert.tolist()), strict=True)
        out = torch.cat([_expert(expert, own) for expert, own in shares])
        group = parallel_state.get_expert_tensor_parallel_group()
        if group.size() > 1 and isinstance(self.local_experts[0].linear_fc1, Fp8Forward):
            out = _Sum.apply(out, group).to(x.dtype).float() * (group.rank() == 0)
        return out * permuted_probs.float().unsqueeze(-1), None


class _Sum(torch.autograd.Function):
    """The sum over a group's ranks, whose gradient is summed over them, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def _expert(expert: MLP, x: Tensor) -> Tensor:
    """[tokens, hidden] -> float32 [tokens, hidden]."""
    if isinstance(expert.linear_fc1, Fp8Forward):
        return expert(x)[0].float()
    gate, up = F.linear(x.float(), expert.linear_fc1.weight.float()).chunk(2, -1)
    return F.linear((F.silu(gate) * up).to(x.dtype).float(), expert.linear_fc2.weight.float())


class AlignedMoELayer(MoELayer):
    def route(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Weights rounded as the router's, held in float32: Megatron sums experts of several ranks in their dtype."""
        weights, chosen = super().route(*args, **kwargs)
        return weights.float(), chosen

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        return super().postprocess(output, shared_expert_output).to(self.config.params_dtype)
