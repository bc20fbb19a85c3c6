"""Gradients of causal attention by torch's FlashAttention, from the output and log-sum-exp of another kernel.

    p = exp(q . k * scale - lse),  dv = p^T grad,  ds = p * (grad . v - sum of grad * out),
    dq = ds k * scale,  dk = ds^T q * scale

Both operations compute this, so it does not count which kernel made `out` and `lse`. Groups of keys and values are
theirs: they sum the gradients of a group's heads.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nemo_fp8rl.policy.layers.attention import hidden_keys, visible_keys

Gradients = tuple[Tensor, Tensor, Tensor]


class KvWindow(NamedTuple):
    """The keys that queries see, as `CoreAttention` says.

    prompt_lengths:  integers [sequences], each at least 1
    size:            the last keys that a query sees besides the prompt's, its own among them
    """

    prompt_lengths: Tensor
    size: int


class ForwardPass(NamedTuple):
    """Attention of sequences of one length, which lie one after the other.

    q:          [sequences * s, heads, d]
    k, v:       [sequences * s, groups, d]
    out:        of the shape of q
    lse:        float32 [heads, sequences * s], the natural logarithm of each row's sum of exp(score)
    sequences:  number of sequences
    scale:      multiplies scores
    window:     the keys that queries see; None for all before them
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    sequences: int
    scale: float
    window: KvWindow | None


class Span(NamedTuple):
    """Queries that attend to keys; each is (first row, number of rows)."""

    queries: tuple[int, int]
    keys: tuple[int, int]


def on_gpu(grad: Tensor, done: ForwardPass) -> Gradients:
    """FlashAttention 2, for bfloat16 and float16 and heads of up to 256 values, a multiple of 8.

    It has windows, but none besides a prompt. p depends on no other pair of query and key, so that gradients are sums
    over sets of pairs: those inside the window; the `prompt` queries behind the first window with the prompt's keys
    before their windows; and all later queries with all keys of the prompt.

    Source: torch aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_varlen_bwd
    """
    q, k, v, out, lse, sequences, scale, window = done
    length = len(q) // sequences
    starts = torch.arange(0, len(q) + 1, length, dtype=torch.int32, device=q.device)
    whole = starts, starts, length, length
    if window is None or window.size >= length:
        return _flash_attention_2(grad, q, k, v, out, lse, *whole, True, scale)
    inside = _flash_attention_2(grad, q, k, v, out, lse, *whole, True, scale, window_size_left=window.size - 1)
    dq, dk, dv = (t.float() for t in inside)
    behind = length - window.size  # queries behind the first window
    prompts = [(i * length, min(n, behind)) for i, n in enumerate(window.prompt_lengths.tolist())]
    early = [Span((start + window.size, n), (start, n)) for start, n in prompts]
    late = [Span((start + window.size + n, behind - n), (start, n)) for start, n in prompts if n < behind]
    for spans, is_causal in ((early, True), (late, False)):
        if not spans:
            continue
        queries, query_starts = _rows([span.queries for span in spans], q.device)
        keys, key_starts = _rows([span.keys for span in spans], q.device)
        most = max(span.queries[1] for span in spans), max(span.keys[1] for span in spans)
        rows = grad[queries], q[queries], k[keys], v[keys], out[queries], lse[:, queries].contiguous()
        parts = _flash_attention_2(*rows, query_starts, key_starts, *most, is_causal, scale)
        for total, index, part in zip((dq, dk, dv), (queries, keys, keys), parts, strict=True):
            total[index] += part
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _rows(parts: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (the rows' numbers int64, where each part starts among them, and their end, int32)."""
    starts = torch.tensor([0, *(n for _, n in parts)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return torch.cat([torch.arange(first, first + n) for first, n in parts]).to(device), starts.to(device)


def _flash_attention_2(*arguments: Any, **window: int) -> Gradients:
    """(grad, q, k, v, out, lse, query_starts, key_starts, most queries, most keys, is_causal, scale) -> gradients."""
    *rows, is_causal, scale = arguments
    no_dropout = torch.empty(2, dtype=torch.uint64, device=rows[0].device)  # a random state, which it ignores
    return torch.ops.aten._flash_attention_backward(
        *rows, 0.0, is_causal, no_dropout, no_dropout[:1], scale=scale, **window
    )


def on_cpu(grad: Tensor, done: ForwardPass) -> Gradients:
    """FlashAttention of torch's CPU build, in float32: in bfloat16 its gradients are rounded more than once."""
    q, k, v, out, lse, sequences, scale, window = done
    tensors = [t.unflatten(0, (sequences, -1)).transpose(1, 2).float() for t in (grad, q, k, v, out)]
    by_sequence, mask = lse.unflatten(1, (sequences, -1)).transpose(0, 1), None
    if window is not None:
        is_seen = visible_keys(hidden_keys(len(q) // sequences, *window))[:, None]
        mask = torch.zeros(is_seen.shape).masked_fill(~is_seen, -torch.inf)
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors, by_sequence, 0.0, mask is None, attn_mask=mask, scale=scale
    )
    dq, dk, dv = (t.transpose(1, 2).flatten(0, 1).to(q.dtype) for t in gradients)
    return dq, dk, dv


BY_DEVICE: dict[str, Callable[..., Gradients]] = {"cuda": on_gpu, "cpu": on_cpu}


def attention_gradients(grad: Tensor, done: ForwardPass) -> Gradients:
    """Return the gradients of q, k and v, in their shapes and q's dtype. grad: of `done.out`."""
    return BY_DEVICE[done.q.device.type](grad.contiguous(), done)
