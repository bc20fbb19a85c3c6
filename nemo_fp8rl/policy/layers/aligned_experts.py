"""Rollout alignment of a mixture of experts: rounding points of vLLM's CPU kernels of 0.32, and of our FP8 experts.

router      logits, softmax and weights in the activations' dtype (Megatron's default is float32)
expert      bfloat16: float32 throughout but for the activation; FP8: as a dense FP8 MLP; bfloat16 where
            `rounding.experts_are_dense_mlps`: as a dense MLP, too
combine     the expert's output times its weight, summed over experts in their order, in float32; one rounding
            (Megatron multiplies the activation before the down projection, and rounds). Ranks that share the
            matrices of such an MLP add up and round its output before (Megatron adds up what is weighed already)

Both roundings of another bfloat16 expert, of its activation and of the sum, are cut off where `rounding.truncates` says
so.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from nemo_fp8rl.policy.layers.linears import Fp8Forward
from nemo_fp8rl.policy.on_cpu.vllm_cpu_rounding import as_kernels_round, experts_are_dense_mlps


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
        group = self.tp_group
        if group.size() > 1 and _is_dense_mlp(
            self.local_experts[0]
        ):  # Megatron adds up contiguous gradients alone, as those of a gather are
            summed = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(out, group), group)
            out = summed.to(x.dtype).float() * (group.rank() == 0)
        return out * permuted_probs.float().unsqueeze(-1), None


def _is_fp8(expert: MLP) -> bool:
    return isinstance(expert.linear_fc1, Fp8Forward)


def _is_dense_mlp(expert: MLP) -> bool:
    return _is_fp8(expert) or experts_are_dense_mlps()


def _expert(expert: MLP, x: Tensor) -> Tensor:
    """[tokens, hidden] -> float32 [tokens, hidden]."""
    if _is_dense_mlp(expert):
        return expert(x)[0].float()
    gate, up = F.linear(x.float(), expert.linear_fc1.weight.float()).chunk(2, -1)
    activated = as_kernels_round(F.silu(gate) * up, x.dtype)
    return F.linear(activated.float(), expert.linear_fc2.weight.float())


class AlignedMoELayer(MoELayer):
    def route(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Weights rounded as the router's, held in float32: Megatron sums experts of several ranks in their dtype."""
        weights, chosen = super().route(*args, **kwargs)
        return weights.float(), chosen

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        output, dtype = super().postprocess(output, shared_expert_output), self.config.params_dtype
        return output.to(dtype) if _is_dense_mlp(self.experts.local_experts[0]) else as_kernels_round(output, dtype)
