"""Gradients of causal attention by torch's FlashAttention, from the output and log-sum-exp of another kernel.

    p = exp(q . k * scale - lse),  dv = p^T grad,  ds = p * (grad . v - sum of grad * out),
    dq = ds k * scale,  dk = ds^T q * scale

Both operations compute this, so it does not count which kernel made `out` and `lse`. Groups of keys and values are
theirs: they sum the gradients of a group's heads.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]


def on_gpu(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: int, scale: float
) -> Gradients:
    """FlashAttention 2, for bfloat16 and float16 and heads of up to 256 values, a multiple of 8.

    Source: torch aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_varlen_bwd
    """
    length = len(q) // sequences
    starts = torch.arange(0, len(q) + 1, length, dtype=torch.int32, device=q.device)
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)  # a state of random numbers, which it ignores
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, starts, starts, length, length, 0.0, True, no_dropout, no_dropout[:1], scale=scale
    )


def on_cpu(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: int, scale: float
) -> Gradients:
    """FlashAttention of torch's CPU build, in float32: in bfloat16 its gradients are rounded more than once."""
    tensors = [t.unflatten(0, (sequences, -1)).transpose(1, 2).float() for t in (grad, q, k, v, out)]
    by_sequence = lse.unflatten(1, (sequences, -1)).transpose(0, 1)
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors, by_sequence, 0.0, True, scale=scale
    )
    dq, dk, dv = (t.transpose(1, 2).flatten(0, 1).to(q.dtype) for t in gradients)
    return dq, dk, dv


BY_DEVICE: dict[str, Callable[..., Gradients]] = {"cuda": on_gpu, "cpu": on_cpu}


def attention_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sequences: int, scale: float
) -> Gradients:
    """Return the gradients of q, k and v, in their shapes and q's dtype.

    grad, out:  [sequences * s, heads, d], gradient and output; of sequences of one length, one after the other
    q:          [sequences * s, heads, d]
    k, v:       [sequences * s, groups, d]
    lse:        float32 [heads, sequences * s], the natural logarithm of each row's sum of exp(score)
    sequences:  number of sequences
    scale:      multiplies scores
    """
    return BY_DEVICE[q.device.type](grad.contiguous(), q, k, v, out, lse, sequences, scale)
