"""Gradients of the trainer's shared attention by torch's operations, and how it calls the one that GPUs have."""

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.policy.layers.shared_ops import attention_gradients
from nemo_fp8rl.policy.layers.shared_ops.attention import SequenceAttention, attend_by_shared_kernel
from nemo_fp8rl.policy.layers.shared_ops.attention_gradients import KvWindow
from tests.gpu_engine import fake_flash_attention
from tests.gpu_engine.test_attention_window import visible
from tests.gpu_engine.test_ops import values

SEQUENCES, LENGTH, HEADS, GROUPS = 2, 33, 6, 2


PROMPTS = (5, 29)
WINDOWS = [None, 1, 7, 30]
"""A window of 7 has every kind of pair in the first sequence, and in the second no query behind prompt and window."""


def float32_gradients(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, scale: float, window: int | None
) -> tuple[Tensor, ...]:
    """Gradients of attention in float32 of the same inputs, by torch's autograd."""
    leaves = [t.detach().float().requires_grad_() for t in (q, k, v)]
    per_group = q.size(1) // k.size(1)
    by_head = [t.repeat_interleave(per_group if i else 1, 1) for i, t in enumerate(leaves)]
    q32, k32, v32 = (t.unflatten(0, (SEQUENCES, LENGTH)).transpose(1, 2) for t in by_head)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    if window is not None:
        seen = torch.stack([visible(LENGTH, prompt, window) for prompt in PROMPTS])
        future = ~seen[:, None]
    p = (q32 @ k32.mT * scale).masked_fill(future, -torch.inf).softmax(-1)
    out = (p @ v32).transpose(1, 2).flatten(0, 1)
    return torch.autograd.grad(out, leaves, grad.float())


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    ("device", "d", "dtype", "limit"),
    [("cpu", 32, torch.float32, 1e-6), ("cpu", 80, torch.bfloat16, 2.5e-3), ("cuda", 64, torch.bfloat16, 2.5e-3)],
    ids=["cpu-float32", "cpu-bfloat16", "cuda-bfloat16"],
)
def test_gradients_are_those_of_float32(device, d, dtype, limit, window, monkeypatch):
    """But for roundings: in bfloat16 that of the gradients alone is 1.7e-3, that of the output moves q's and k's.

    On a GPU gradients in a window are sums of up to three rounded ones.
    """
    if device == "cuda" and window is not None:
        limit = 3.5e-3
    monkeypatch.setitem(attention_gradients.BY_DEVICE, "cpu", attention_gradients.BY_DEVICE[device])
    tokens, scale = SEQUENCES * LENGTH, d**-0.5
    shapes = (tokens, HEADS, d), (tokens, GROUPS, d), (tokens, GROUPS, d), (tokens, HEADS, d)
    *leaves, grad = (values(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))
    leaves = [t.requires_grad_() for t in leaves]
    with fake_flash_attention.on_cpu():
        kept = None if window is None else KvWindow(torch.tensor(PROMPTS), window)
        out = SequenceAttention.apply(attend_by_shared_kernel, *leaves, SEQUENCES, scale, None, kept)
        got = torch.autograd.grad(out, leaves, grad)
    for name, of_ours, exact in zip("qkv", got, float32_gradients(*leaves, grad, scale, window), strict=True):
        assert of_ours.dtype is dtype
        assert of_ours.shape == exact.shape
        error = (of_ours.float() - exact).norm() / exact.norm()
        assert error < limit, f"gradient of {name}: {error:.1e}"
