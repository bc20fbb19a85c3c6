"""Stand-ins for the operations of FlashAttention that torch and its packages have on GPUs alone."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


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
    """aten::_flash_attention_backward of sequences one after the other: its checks, and its formula in float32."""
    tokens, heads, d = q.shape
    assert grad.shape == out.shape == q.shape
    assert k.shape == v.shape == (tokens, k.size(1), d)
    assert heads % k.size(1) == 0
    assert d % 8 == 0
    assert d <= 256
    assert {t.dtype for t in (grad, q, k, v, out)} in ({torch.bfloat16}, {torch.float16})
    assert all(t.stride(-1) == 1 for t in (grad, q, k, v, out))
    assert lse.shape == (heads, tokens)
    assert lse.dtype is torch.float32
    assert lse.is_contiguous()
    assert torch.equal(query_starts, key_starts)
    assert query_starts.dtype is torch.int32
    assert (query_starts[0], query_starts[-1]) == (0, tokens)
    assert max_q == max_k == query_starts.diff().max()
    assert (dropout_p, is_causal, window_size_left, window_size_right) == (0.0, True, None, None)
    assert random_state.dtype is unused.dtype is torch.uint64
    dq, dk, dv = (torch.zeros(t.shape) for t in (q, k, v))
    for start, end in zip(query_starts.tolist(), query_starts.tolist()[1:], strict=False):
        for head in range(heads):
            group = head * k.size(1) // heads
            grad_row, q_row, out_row = (t[start:end, head].float() for t in (grad, q, out))
            k_row, v_row = (t[start:end, group].float() for t in (k, v))
            p = (q_row @ k_row.T * scale - lse[head, start:end, None]).exp().tril()
            ds = p * (grad_row @ v_row.T - (grad_row * out_row).sum(-1, keepdim=True)) * scale
            dq[start:end, head] = ds @ k_row
            dk[start:end, group] += ds.T @ q_row
            dv[start:end, group] += p.T @ grad_row
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let torch's operation for GPUs, which has no kernel for CPUs, be the stand-in on a CPU."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_backward", fake_flash_attention_backward, "CPU")
        yield
