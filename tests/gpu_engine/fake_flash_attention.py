"""Stand-ins for the operations of FlashAttention that torch and its packages have on GPUs alone."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.ops import flash_attention
from nemo_fp8rl.ops.attention import attention

LOAD = flash_attention.load.__wrapped__
"""It keeps no package of an earlier test."""


def fake_flash_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    random_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """aten::_flash_attention_backward of sequences one after the other: its checks, and its formula in float32.

    A window of `window_size_left` has that many keys before a query's own.
    """
    tokens, heads, d = q.shape
    assert grad.shape == out.shape == q.shape
    assert k.shape == v.shape == (len(k), k.size(1), d)
    assert heads % k.size(1) == 0
    assert d % 8 == 0
    assert d <= 256
    assert {t.dtype for t in (grad, q, k, v, out)} in ({torch.bfloat16}, {torch.float16})
    assert all(t.stride(-1) == 1 for t in (grad, q, k, v, out))
    assert lse.shape == (heads, tokens)
    assert lse.dtype is torch.float32
    assert lse.is_contiguous()
    assert query_starts.dtype is key_starts.dtype is torch.int32
    assert (query_starts[0], query_starts[-1], key_starts[0], key_starts[-1]) == (0, tokens, 0, len(k))
    assert (max_q, max_k) == (query_starts.diff().max(), key_starts.diff().max())
    assert min(query_starts.diff().min(), key_starts.diff().min()) > 0
    assert not is_causal or torch.equal(query_starts, key_starts)
    assert is_causal or window_size_left is None
    assert (dropout_p, window_size_right) == (0.0, None)
    assert random_state.dtype is unused.dtype is torch.uint64
    dq, dk, dv = (torch.zeros(t.shape) for t in (q, k, v))
    ends = query_starts.tolist()[1:], key_starts.tolist()[1:]
    for start, k_start, end, k_end in zip(query_starts.tolist(), key_starts.tolist(), *ends, strict=False):
        distance = torch.arange(end - start)[:, None] - torch.arange(k_end - k_start)
        is_seen = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
        is_seen &= window_size_left is None or distance <= window_size_left
        for head in range(heads):
            group = head * k.size(1) // heads
            grad_row, q_row, out_row = (t[start:end, head].float() for t in (grad, q, out))
            k_row, v_row = (t[k_start:k_end, group].float() for t in (k, v))
            p = (q_row @ k_row.T * scale - lse[head, start:end, None]).exp() * is_seen
            ds = p * (grad_row @ v_row.T - (grad_row * out_row).sum(-1, keepdim=True)) * scale
            dq[start:end, head] = ds @ k_row
            dk[k_start:k_end, group] += ds.T @ q_row
            dv[k_start:k_end, group] += p.T @ grad_row
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let torch's operation for GPUs, which has no kernel for CPUs, be the stand-in on a CPU."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_backward", fake_flash_attention_backward, "CPU")
        yield


class FakeFlashAttention3:
    """vllm.vllm_flash_attn.flash_attn_varlen_func with version 3 and one split: its checks, by `ops.attention`.

    calls:  of each kind, "pages" or "sequences", how many
    """

    def __init__(self) -> None:
        self.calls = {"pages": 0, "sequences": 0}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        max_seqlen_q: int,
        cu_seqlens_q: Tensor,
        max_seqlen_k: int,
        cu_seqlens_k: Tensor | None = None,
        seqused_k: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        block_table: Tensor | None = None,
        return_softmax_lse: bool = False,
        out: Tensor | None = None,
        num_splits: int = 0,
        fa_version: int = 2,
    ) -> tuple[Tensor, Tensor]:
        assert (causal, return_softmax_lse, num_splits, fa_version) == (True, True, 1, 3)
        assert softmax_scale == pytest.approx(q.size(-1) ** -0.5, rel=1e-9)
        assert q.size(-1) == 128
        assert {t.dtype for t in (q, k, v)} == {torch.bfloat16}
        assert all(t.stride(-1) == 1 for t in (q, k, v))
        assert (cu_seqlens_k is None) == (block_table is not None) == (seqused_k is not None)
        self.calls["sequences" if block_table is None else "pages"] += 1
        if block_table is None:
            seqused_k = cu_seqlens_k.diff()
            tokens = torch.arange(int(seqused_k.max()), dtype=torch.int32)
            block_table = (cu_seqlens_k[:-1, None] + tokens).clamp(max=len(k) - 1)
            k, v = k.unsqueeze(1), v.unsqueeze(1)
        assert {t.dtype for t in (cu_seqlens_q, seqused_k, block_table)} == {torch.int32}
        assert max_seqlen_q >= cu_seqlens_q.diff().max()
        assert max_seqlen_k >= seqused_k.max()
        result, lse = attention(q, k, v, block_table, cu_seqlens_q, seqused_k, softmax_scale)
        return (result if out is None else out.copy_(result)), lse


def install(patch: pytest.MonkeyPatch) -> FakeFlashAttention3:
    """Let this CPU be a Hopper GPU with vLLM's build of FlashAttention 3."""
    fake = FakeFlashAttention3()
    patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    patch.setitem(sys.modules, "vllm.vllm_flash_attn", SimpleNamespace(flash_attn_varlen_func=fake))
    patch.setattr(flash_attention, "load", LOAD)
    return fake


def install_package(patch: pytest.MonkeyPatch) -> FakeFlashAttention3:
    """Let there be FlashAttention 3's own package alone, which has no pages and no version."""
    fake = install(patch)

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        num_splits: int = 1,
        return_attn_probs: bool = False,
    ) -> Any:
        further = {"cu_seqlens_k": cu_seqlens_k, "softmax_scale": softmax_scale, "causal": causal}
        further |= {"num_splits": num_splits, "return_softmax_lse": return_attn_probs, "fa_version": 3}
        return fake(q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, **further)

    patch.setitem(sys.modules, "vllm.vllm_flash_attn", None)
    patch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
    return fake
