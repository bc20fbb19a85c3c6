"""Rollout alignment: the trainer's RoPE, residual, norm and softmax round where vLLM's do.

Bit-identical quantizers alone leave a mismatch of 1.007 to 1.017 between trainer and engine (the README's tables): one
bfloat16 rounding moves an activation across an FP8 rounding border and the error spreads. These modules replace
Megatron's through its ModuleSpec; in float32 they equal the standard formulas. Rounding points, vLLM's CPU kernels of
0.32:

    RoPE            cos/sin table in bfloat16, products and sum in float32, one rounding (Megatron rounds each product)
    add + norm      the norm reads the UNROUNDED float32 sum x + residual; the stored residual is that sum rounded
    norm            (x32 * rsqrt(mean(x32^2) + eps)) rounded, then times the weight
    bias            of a bfloat16 projection: added to the float32 product, one rounding (`linears`; Megatron: two)
    row-parallel    ranks' products are summed in float32, one rounding (`linears`; Megatron rounds each product)
    softmax         scores and the weighted sum in float32, one rounding of the output; probabilities in float32 too,
                    but before matrix units (`rounding.rounds_probabilities`); without those, sums in the kernel's order
                    (`ordered`)
    both roundings  of RoPE and of softmax's output: cut off on a CPU without AVX-512 BF16 (`rounding.truncates`)
    FP8 KV cache    keys after RoPE and values as the engine's cache holds them (`fp8.cached`)
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_fp8rl.policy.layers.attention import CoreAttention
from nemo_fp8rl.policy.on_cpu.amx_matmul import tile_product
from nemo_fp8rl.policy.on_cpu.avx_attention import ordered_attention
from nemo_fp8rl.policy.on_cpu.vllm_cpu_rounding import (
    as_kernels_round,
    rounds_probabilities,
    scales_scores,
    sums_in_order,
)


def norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    """Ones [size]. With sequence parallelism every rank has a gradient of its own tokens, to be summed by Megatron."""
    weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


class AlignedRMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension; input float32 (the residual stream) or the parameters' dtype."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normalized = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return normalized.to(self.weight.dtype) * self.weight


def aligned_residual_add(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Megatron's bias-dropout-add slot, without bias and dropout.

    The residual stream is float32 (`fp32_residual_connection`) and carries the unrounded sum for the next norm; it is
    rounded to the layer's dtype only when it is added to again, which is when vLLM reads its stored residual.
    """

    def add(x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias
        assert bias is None and prob == 0.0
        return x.float() + residual.to(x.dtype).float()

    return add


class AlignedAttention(CoreAttention):
    """Plain float32 math, so that nothing is rounded but what `weighted` rounds (cost: docs/decisions.md).

    The scores of a block of QUERY_BLOCK queries exist at a time.
    """

    QUERY_BLOCK = 512

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rows: Tensor | None = None) -> Tensor:
        s, b, heads, d = query.shape
        groups = key.size(2)
        cos, sin = self.rope.table(s, query.dtype, query.device)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        rounded, smallest = rounds_probabilities(query.dtype, d), None
        if self.kv_cache is not None:
            key, value = self.kv_cache.read(self.layer, query, key, value, rows)
            smallest = self.kv_cache.smallest_sum(self.layer)
        q = query.float().permute(1, 2, 0, 3).reshape(b, groups, heads // groups, s, d)
        k = key.float().permute(1, 2, 3, 0).unsqueeze(2)  # [b, groups, 1, d, s]
        v = value.float().permute(1, 2, 0, 3).unsqueeze(2)  # [b, groups, 1, s, d]
        ordered = sums_in_order(query.dtype) and not rounded
        out = ordered_attention(q, k, v, self.scale, scales_scores(self.kv_cache is not None)) if ordered else None
        if out is None or torch.is_grad_enabled():
            plain = self._plain(q, k, v, rounded, smallest)
            out = plain if out is None else out + (plain - plain.detach())  # its gradient
        return as_kernels_round(out.permute(3, 0, 1, 2, 4).reshape(s, b, heads * d), query.dtype)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, rounded: bool, smallest: float | None) -> Tensor:
        """q [b, groups, heads a group, s, d] -> the same."""
        outputs, s = [], q.size(-2)
        for start in range(0, s, self.QUERY_BLOCK):
            block = q[..., start : start + self.QUERY_BLOCK, :]
            future = torch.ones(block.size(-2), s, dtype=torch.bool).triu(start + 1)
            scores = ((block @ k) * self.scale).masked_fill(future, -math.inf)
            outputs.append(weighted(scores, v, rounded, smallest))
        return torch.cat(outputs, -2)


def weighted(scores: Tensor, v: Tensor, rounded: bool, smallest: float | None = None) -> Tensor:
    """softmax(scores) @ v, float32. rounded: see `rounds_probabilities`; smallest: then, see `tile_product`. Both with
    the gradient of the plain product (straight through).
    """
    if not rounded:
        return scores.softmax(-1) @ v
    exps = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    multiplied = exps + (exps.bfloat16().float() - exps).detach()
    product = multiplied @ v
    if smallest is not None:
        product = product + (tile_product(multiplied.detach(), v.detach(), smallest) - product).detach()
    return product / exps.sum(-1, keepdim=True)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves [s, b, h, d] by the table; float32 math, one rounding to x's dtype."""
    x1, x2 = x.float().chunk(2, -1)
    return as_kernels_round(torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1), x.dtype)
