"""Rollout alignment of a mixture of experts: the rounding points of vLLM 0.32's CPU kernels and of the FP8 experts.

router      logits, softmax and weights have the activations' dtype (Megatron's default is float32)
expert      FP8: as a dense FP8 MLP. bfloat16: float32 throughout, except for the activation; where
            `vllm_cpu_rounding.experts_are_dense_mlps`, and with an adapter, as a dense MLP
combine     the experts' outputs times their weights, summed in the experts' order in float32, with one rounding
            (Megatron multiplies the activation before the down projection, and rounds). Ranks that share the matrices
            of a dense MLP sum and round its output before they weigh it (Megatron sums outputs that are weighed)

A bfloat16 expert that is not a dense MLP has two roundings, of its activation and of the sum; both truncate where
`vllm_cpu_rounding.truncates`.
"""

from collections.abc import Callable
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

from nemo_fp8rl.policy.layers.linears import QuantizedMatmul
from nemo_fp8rl.policy.layers.low_rank import LowRank
from nemo_fp8rl.policy.on_cpu.avx_experts import linear_in_kernel_order, silu_product_in_kernel_order
from nemo_fp8rl.policy.on_cpu.vllm_cpu_rounding import experts_are_dense_mlps, experts_sum_in_order, round_as_kernel


class AlignedExperts(SequentialMLP):
    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Return the weighed outputs, float32 [tokens, hidden], and None for the bias.

        Ranks that share the experts' matrices get the same tokens, and Megatron sums their outputs.
        permuted_local_hidden_states:  [tokens, hidden], sorted by expert
        tokens_per_expert:             int64 [experts]
        permuted_probs:                [tokens], the weights of the outputs
        """
        x = permuted_local_hidden_states
        shares = zip(self.local_experts, x.split(tokens_per_expert.tolist()), strict=True)
        out = torch.cat([_run_expert(expert, tokens) for expert, tokens in shares])
        group = self.tp_group
        if group.size() > 1 and _is_dense_mlp(self.local_experts[0]):
            # Megatron sums only contiguous gradients; those of the gather behind this layer are contiguous
            total = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(out, group), group)
            out = total.to(x.dtype).float() * (group.rank() == 0)
        return out * permuted_probs.float().unsqueeze(-1), None


def _is_quantized(expert: MLP) -> bool:
    return isinstance(expert.linear_fc1, QuantizedMatmul)


def _is_dense_mlp(expert: MLP) -> bool:
    has_adapter = any(isinstance(linear, LowRank) for linear in (expert.linear_fc1, expert.linear_fc2))
    return _is_quantized(expert) or has_adapter or experts_are_dense_mlps()


def _run_expert(expert: MLP, x: Tensor) -> Tensor:
    """[tokens, hidden] -> float32 [tokens, hidden]."""
    if _is_dense_mlp(expert):
        return expert(x)[0].float()
    linear, silu_product = _expert_operations(x.dtype)
    gate, up = linear(x.float(), expert.linear_fc1.weight.float()).chunk(2, -1)
    activated = round_as_kernel(silu_product(gate, up), x.dtype)
    return linear(activated.float(), expert.linear_fc2.weight.float())


def _expert_operations(dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return the linear layer and the product of silu(gate) and up of a bfloat16 expert."""
    if experts_sum_in_order(dtype):
        return linear_in_kernel_order, silu_product_in_kernel_order
    return F.linear, lambda gate, up: F.silu(gate) * up


class AlignedMoELayer(MoELayer):
    def route(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the rounded weights as float32: Megatron sums the experts of several ranks in this dtype."""
        weights, experts = super().route(*args, **kwargs)
        return weights.float(), experts

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        output, dtype = super().postprocess(output, shared_expert_output), self.config.params_dtype
        return output.to(dtype) if _is_dense_mlp(self.experts.local_experts[0]) else round_as_kernel(output, dtype)
