"""Rollout alignment: RoPE, residual, norm and softmax of the trainer round where vLLM's do.

Bit-identical quantizers alone leave a mismatch of 1.007 to 1.017 between trainer and engine: one bfloat16 rounding
moves an activation across an FP8 rounding border, and the error spreads. These modules replace Megatron's through its
ModuleSpec; in float32 they equal the standard formulas. The rounding points are those of vLLM 0.32's CPU kernels:

    RoPE            cos/sin table in bfloat16, products and sum in float32, one rounding (Megatron rounds each product)
    add + norm      the norm reads the UNROUNDED float32 sum x + residual; the stored residual is that sum rounded
    norm            (x32 * rsqrt(mean(x32^2) + eps)) rounded, then times the weight
    bias            a bfloat16 projection adds it to the float32 product, one rounding (`linears`; Megatron: two)
    row-parallel    ranks' products are summed in float32, one rounding (`linears`; Megatron rounds each product)
    softmax         scores and the weighted sum in float32, one rounding of the output. Matrix units take rounded
                    probabilities (`vllm_cpu_rounding.rounds_probabilities`); without matrix units probabilities are
                    float32, and sums have the kernel's order (`avx_attention`)
    truncation      on a CPU without AVX-512 BF16 the roundings of RoPE and of attention's output truncate
                    (`vllm_cpu_rounding.truncates`)
    FP8 KV cache    keys after RoPE, and values, are rounded as in the engine's cache (`fp8.cast_through_cache`)
    KV window       sums skip the keys that a query does not see: the engine's kernel gets the others as one sequence
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_fp8rl.policy.layers.attention import CoreAttention, Sequences, visible_keys
from nemo_fp8rl.policy.on_cpu.amx_matmul import tile_product
from nemo_fp8rl.policy.on_cpu.avx_attention import attention_in_kernel_order
from nemo_fp8rl.policy.on_cpu.vllm_cpu_rounding import (
    round_as_kernel,
    rounds_probabilities,
    scales_scores,
    sums_in_order,
)


def norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    """Return a parameter of ones, [size].

    With sequence parallelism every rank has the gradient of its own tokens; the attribute makes Megatron sum them.
    """
    weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


class AlignedRMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension; the input is float32 (the residual stream) or has the parameters' dtype."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normalized = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return normalized.to(self.weight.dtype) * self.weight


def aligned_residual_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Return the function for Megatron's bias-dropout-add slot, without bias and dropout.

    The residual stream is float32 (`fp32_residual_connection`) and carries the unrounded sum to the next norm. It is
    rounded to the layer's dtype only at the next addition, where vLLM reads its stored residual.
    """

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias
        assert bias is None and prob == 0.0
        return x.float() + residual.to(x.dtype).float()

    return add


class AlignedAttention(CoreAttention):
    """Attention in float32, so that only `weigh_values` rounds inside it. docs/decisions.md has its cost.

    Only the scores of QUERY_BLOCK queries exist at a time.
    """

    QUERY_BLOCK = 512

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        s, b, heads, d = query.shape
        groups, hidden = key.size(2), self.hidden_keys(s, sequences)
        cos, sin = self.rope.table(s, query.dtype, query.device)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        round_weights, smallest = rounds_probabilities(query.dtype, d), None
        if self.kv_cache is not None:
            key, value = self.kv_cache.read(self.layer, query, key, value, sequences.rows)
            smallest = self.kv_cache.smallest_sum(self.layer)
        q = query.float().permute(1, 2, 0, 3).reshape(b, groups, heads // groups, s, d)
        k = key.float().permute(1, 2, 3, 0).unsqueeze(2)  # [b, groups, 1, d, s]
        v = value.float().permute(1, 2, 0, 3).unsqueeze(2)  # [b, groups, 1, s, d]
        out = None
        if sums_in_order(query.dtype) and not round_weights:
            out = attention_in_kernel_order(q, k, v, self.scale, scales_scores(self.kv_cache is not None), hidden)
        if out is None or torch.is_grad_enabled():
            product = self._attend_in_blocks(q, k, v, round_weights, smallest, hidden)
            out = product if out is None else out + (product - product.detach())  # adds the gradient, not the value
        return round_as_kernel(out.permute(3, 0, 1, 2, 4).reshape(s, b, heads * d), query.dtype)

    def _attend_in_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, round_weights: bool, smallest: float | None, hidden: Tensor | None
    ) -> Tensor:
        """Return attention in the shape of q, [b, groups, heads per group, s, d].

        k, v:    [b, groups, 1, d, s] and [b, groups, 1, s, d]
        hidden:  of `hidden_keys`
        """
        outputs, s = [], q.size(-2)
        for start in range(0, s, self.QUERY_BLOCK):
            queries = slice(start, min(start + self.QUERY_BLOCK, s))
            if hidden is None:
                gaps, unseen = None, torch.ones(queries.stop - start, s, dtype=torch.bool).triu(start + 1)
            else:
                gaps, unseen = hidden[:, queries], ~visible_keys(hidden, queries)[:, None, None]
            scores = ((q[..., queries, :] @ k) * self.scale).masked_fill(unseen, -math.inf)
            outputs.append(weigh_values(scores, v, round_weights, smallest, gaps))
        return torch.cat(outputs, -2)


def weigh_values(
    scores: Tensor, v: Tensor, round_weights: bool, smallest: float | None = None, hidden: Tensor | None = None
) -> Tensor:
    """Return softmax(scores) @ v, float32, with the gradient of the product without rounding (straight through).

    round_weights:  see `rounds_probabilities`
    smallest:       see `tile_product`; it takes effect only with round_weights
    hidden:         of `hidden_keys`, for these queries; their scores are -inf
    """
    if not round_weights:
        return scores.softmax(-1) @ v
    exps = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    multiplied = exps + (exps.bfloat16().float() - exps).detach()
    product = multiplied @ v
    if smallest is not None:
        gaps = None if hidden is None else hidden[:, None, None]
        product = product + (tile_product(multiplied.detach(), v.detach(), smallest, gaps) - product).detach()
    return product / exps.sum(-1, keepdim=True)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of x [s, b, h, d] by the table, in float32, with one rounding to x's dtype."""
    x1, x2 = x.float().chunk(2, -1)
    return round_as_kernel(torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1), x.dtype)
