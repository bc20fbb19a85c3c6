"""Layers of the trainer that compute by the operations of `ops`, as an aligned engine on a GPU does.

The residual stream has the layers' dtype: the sum x + residual is rounded once, and the norm reads the rounded sum.
"""

import functools
import math
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_fp8rl.fp8 import BLOCK, ScaleFormat, quantize_blockwise
from nemo_fp8rl.fp8.linear import BlockwiseFp8Linear, operand_dtype
from nemo_fp8rl.ops.activation import silu_mul
from nemo_fp8rl.ops.attention import attention
from nemo_fp8rl.ops.matmul import fp8_linear, linear
from nemo_fp8rl.ops.norm import rms_norm
from nemo_fp8rl.ops.rope import rotate
from nemo_fp8rl.policy.layers.aligned_layers import norm_weight
from nemo_fp8rl.policy.layers.attention import CoreAttention
from nemo_fp8rl.policy.layers.linears import CustomMatmul, Fp8MatmulLayer
from nemo_fp8rl.policy.layers.shared_ops.rank_sum import RankOrderSum


class SharedRMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension, by `ops.norm`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class SharedSiluMul(torch.nn.Module):
    """Megatron's slot for an activation of gate and up, [..., 2 * I] -> [..., I] (`use_te_activation_func`)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)


class SharedMatmul(CustomMatmul):
    """The product of `ops.matmul`, with the bias before its one rounding."""

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        return linear(x, weight, bias)


class SharedFp8Matmul(Fp8MatmulLayer, CustomMatmul):
    """The FP8 product of `ops.matmul`; gradients are those of `fp8.linear`. A bias is added to the rounded product."""

    kernel_name = "ops.fp8_linear"
    scale_format: ScaleFormat

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        output = SharedFp8Linear.apply(x, weight, self.scale_format, None)
        return output if bias is None else output + bias


class SharedFp8Linear(BlockwiseFp8Linear):
    """`BlockwiseFp8Linear` with the forward of `ops.matmul`: apply(x [..., K], w [N, K], scale_format, None)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, scale_format: ScaleFormat, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        quantized = quantize_blockwise(w, block=BLOCK, scale_format=scale_format)
        if any(ctx.needs_input_grad):
            dequantized = quantized.dequantize(operand_dtype(x.dtype, scale_format))
            BlockwiseFp8Linear.keep_operands(ctx, x, w, dequantized, scale_format)
        return fp8_linear(x, quantized.data, quantized.scale_inv, scale_format == "pow2")


class SharedAttention(CoreAttention):
    """Attention by `ops.attention`, whose gradient is computed from its output and log-sum-exp."""

    QUERY_BLOCK = 512

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rows: Tensor | None = None) -> Tensor:
        s, b, heads, d = query.shape
        cos, sin = self.rope.table(s, query.dtype, query.device)
        table, positions = torch.cat((cos, sin), -1).view(s, d), torch.arange(s, device=query.device).repeat(b)
        q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in (query, key, value))  # [b * s, ...]
        q, k = rotate(q, positions, table), rotate(k, positions, table)
        out = SequenceAttention.apply(q, k, v, b, self.scale)
        return out.view(b, s, heads * d).transpose(0, 1)


class SequenceAttention(torch.autograd.Function):
    """Causal attention of b sequences of one length: apply(q [b * s, heads, d], k, v [b * s, groups, d], b, scale)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sequences: int, scale: float) -> Tensor:
        s = len(q) // sequences
        starts = torch.arange(0, len(q) + 1, s, dtype=torch.int32, device=q.device)
        tokens = torch.arange(len(q), dtype=torch.int32, device=q.device).view(sequences, s)  # pages of one token
        lengths = torch.full((sequences,), s, dtype=torch.int32, device=q.device)
        out, lse = attention(q, k.unsqueeze(1), v.unsqueeze(1), tokens, starts, lengths, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.sequences, ctx.scale = sequences, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        b, groups, dtype = ctx.sequences, k.size(1), q.dtype
        shape = b, len(q) // b, groups, q.size(1) // groups, q.size(2)

        def by_group(t: Tensor) -> Tensor:  # [b, groups, heads per group, s, d]
            return t.reshape(shape).permute(0, 2, 3, 1, 4).float()

        q32, out32, grad32 = (by_group(t) for t in (q, out, grad))
        k32, v32 = (t.view(b, -1, groups, t.size(2)).permute(0, 2, 1, 3).float().unsqueeze(2) for t in (k, v))
        lse = lse.view(groups, shape[3], b, shape[1]).permute(2, 0, 1, 3)
        inner = (grad32 * out32).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q32), torch.zeros_like(k32), torch.zeros_like(v32)
        s = shape[1]
        for start in range(0, s, SharedAttention.QUERY_BLOCK):
            rows = slice(start, start + SharedAttention.QUERY_BLOCK)
            scores = q32[..., rows, :] @ k32.mT * ctx.scale
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(start + 1)
            p = (scores.masked_fill(future, -math.inf) - lse[..., rows, None]).exp()
            dv += (p.mT @ grad32[..., rows, :]).sum(2, keepdim=True)
            ds = p * (grad32[..., rows, :] @ v32.mT - inner[..., rows, :]) * ctx.scale
            dq[..., rows, :] = ds @ k32
            dk += (ds.mT @ q32[..., rows, :]).sum(2, keepdim=True)
        dq = dq.permute(0, 3, 1, 2, 4).reshape(q.shape).to(dtype)
        dk, dv = (t.squeeze(2).permute(0, 2, 1, 3).reshape(k.shape).to(dtype) for t in (dk, dv))
        return dq, dk, dv, None, None


class SharedColumnParallelLinear(SharedMatmul, ColumnParallelLinear):
    pass


class SharedRowParallelLinear(RankOrderSum, SharedMatmul, RowParallelLinear):
    pass


def linears() -> tuple[type, type]:
    """Return the column- and row-parallel layers that multiply in the weights' precision."""
    return SharedColumnParallelLinear, SharedRowParallelLinear


@functools.cache
def fp8_linears(scale_format: ScaleFormat, unlike: tuple[str, ...] = ()) -> tuple[type, type]:
    """Return the column- and row-parallel layers that multiply in FP8.

    unlike:  matrices in which Transformer Engine has other bits, which is why these layers stand for its own
    """
    reason = f" (Transformer Engine has other bits in {', '.join(unlike)})" if unlike else ""
    attributes = {"scale_format": scale_format, "kernel_name": SharedFp8Matmul.kernel_name + reason}
    return (
        type("SharedFp8ColumnParallelLinear", (SharedFp8Matmul, ColumnParallelLinear), attributes),
        type("SharedFp8RowParallelLinear", (RankOrderSum, SharedFp8Matmul, RowParallelLinear), attributes),
    )
