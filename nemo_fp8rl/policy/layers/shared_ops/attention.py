"""Attention of the trainer by the kernel of an aligned engine."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_fp8rl.ops.attention import attention
from nemo_fp8rl.ops.rope import rotate
from nemo_fp8rl.policy.layers.attention import CoreAttention
from nemo_fp8rl.policy.layers.shared_ops.attention_gradients import attention_gradients


class SharedAttention(CoreAttention):
    """Attention by `ops.attention`, whose gradient is computed from its output and log-sum-exp."""

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
        return *attention_gradients(grad, q, k, v, out, lse, ctx.sequences, ctx.scale), None, None
