"""Rollout alignment of a mixture of experts: rounding points of vLLM's CPU kernels of 0.32, and of our FP8 experts.

router      logits, softmax and weights in the activations' dtype (Megatron's default is float32)
expert      bfloat16: float32 throughout but for the activation; FP8: as a dense FP8 MLP
combine     the expert's output times its weight, summed over experts in their order, in float32; one rounding
            (Megatron multiplies the activation before the down projection, and rounds)
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from nemo_fp8rl.policy.linears import Fp8Forward


class AlignedExperts(SequentialMLP):
    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """[tokens, hidden], sorted by expert, and their weights [tokens] -> float32 [tokens, hidden]."""
        sizes = tokens_per_expert.tolist()
        parts = zip(
            self.local_experts, permuted_local_hidden_states.split(sizes), permuted_probs.split(sizes), strict=True
        )
        return torch.cat([_expert(expert, x) * probs.float().unsqueeze(-1) for expert, x, probs in parts]), None


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
