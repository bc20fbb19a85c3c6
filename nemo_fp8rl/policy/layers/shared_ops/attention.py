"""Attention of the trainer by the kernel of an aligned engine."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_fp8rl.fp8 import from_cache
from nemo_fp8rl.ops import flash_attention
from nemo_fp8rl.ops.attention import attention
from nemo_fp8rl.ops.kv_pages import write_pages
from nemo_fp8rl.ops.rope import rotate
from nemo_fp8rl.policy.layers.attention import CoreAttention, Sequences
from nemo_fp8rl.policy.layers.shared_ops.attention_gradients import ForwardPass, KvWindow, attention_gradients

CacheScales = tuple[float, float] | None
"""Scales (k, v) of an FP8 KV cache, whose codes are read; None where the trainer rounds nothing."""
Kernel = Callable[[Tensor, Tensor, Tensor, int, float, CacheScales, KvWindow | None], tuple[Tensor, ...]]
"""(q, k, v, sequences, scale, cache_scales, window) -> (out, log-sum-exp, k and v as they were read)."""


def attend_by_shared_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: int,
    scale: float,
    cache_scales: CacheScales,
    window: KvWindow | None = None,
) -> tuple[Tensor, ...]:
    s = len(q) // sequences
    starts = torch.arange(0, len(q) + 1, s, dtype=torch.int32, device=q.device)
    tokens = torch.arange(len(q), dtype=torch.int32, device=q.device).view(sequences, s)  # pages of one token
    lengths = torch.full((sequences,), s, dtype=torch.int32, device=q.device)
    k_scale, v_scale = None, None
    if cache_scales is not None:
        k_scale, v_scale = (torch.full((1,), x, dtype=torch.float32, device=q.device) for x in cache_scales)
        k_codes, v_codes = (torch.empty_like(t, dtype=torch.float8_e4m3fn) for t in (k, v))
        pages = k_codes.unsqueeze(1), v_codes.unsqueeze(1)
        write_pages(k, v, *pages, tokens.flatten(), k_scale, v_scale)
        k, v = k_codes, v_codes
    kept = (None, None) if window is None else (window.prompt_lengths.int(), window.size)
    pages = k.unsqueeze(1), v.unsqueeze(1)
    out, lse = attention(q, *pages, tokens, starts, lengths, scale, k_scale, v_scale, *kept)
    return out, lse, k, v


def attend_by_flash_attention_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: int,
    scale: float,
    cache_scales: CacheScales,
    window: KvWindow | None = None,
) -> tuple[Tensor, ...]:
    assert cache_scales is None, "check_shared_operations"
    assert window is None, "check_shared_operations"
    return *flash_attention.attend_sequences(q, k, v, sequences, scale), k, v


class SequenceAttention(torch.autograd.Function):
    """Causal attention of b sequences of one length: apply(kernel, q, k, v, b, scale, cache_scales, window).

    q:             [b * s, heads, d]
    k, v:          [b * s, groups, d]
    scale:         multiplies scores
    cache_scales:  see `CacheScales`; gradients pass straight through the codes
    window:        the keys that queries see; None for all before them
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernel: Kernel,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: int,
        scale: float,
        cache_scales: CacheScales = None,
        window: KvWindow | None = None,
    ) -> Tensor:
        out, lse, k, v = kernel(q, k, v, sequences, scale, cache_scales, window)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.sequences, ctx.scale, ctx.cache_scales, ctx.window = sequences, scale, cache_scales, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        if ctx.cache_scales is not None:
            k, v = (from_cache(codes, x, q.dtype) for codes, x in zip((k, v), ctx.cache_scales, strict=True))
        done = ForwardPass(q, k, v, out, lse, ctx.sequences, ctx.scale, ctx.window)
        gradients = attention_gradients(grad, done)
        return None, *gradients, None, None, None, None


class SharedAttention(CoreAttention):
    """Attention by `ops.attention`, whose gradient is computed from its output and log-sum-exp."""

    kernel: Kernel = staticmethod(attend_by_shared_kernel)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        s, b, heads, d = query.shape
        cos, sin = self.rope.table(s, query.dtype, query.device)
        table, positions = torch.cat((cos, sin), -1).view(s, d), torch.arange(s, device=query.device).repeat(b)
        q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in (query, key, value))  # [b * s, ...]
        q, k = rotate(q, positions, table), rotate(k, positions, table)
        cache_scales = None
        if self.kv_cache is not None:
            rotated_query, rotated_key = (t.unflatten(0, (b, s)).transpose(0, 1) for t in (q, k))
            cache_scales = self.kv_cache.observe(self.layer, rotated_query, rotated_key, value, sequences.rows)
        window = None
        if self.kv_window is not None:
            assert sequences.prompt_lengths is not None, "Pipeline passes prompt lengths"
            window = KvWindow(sequences.prompt_lengths, self.kv_window)
        out = SequenceAttention.apply(self.kernel, q, k, v, b, self.scale, cache_scales, window)
        return out.view(b, s, heads * d).transpose(0, 1)


class FlashAttention(SharedAttention):
    """Attention by FlashAttention 3 with one split."""

    kernel_name = flash_attention.NAME
    kernel: Kernel = staticmethod(attend_by_flash_attention_3)
