"""Attention with its sums in the order of vLLM's vector kernel: where it cuts results off, the order shows.

A sum of equal values that rounding errors put below them is cut off to the next lower bfloat16, so what is a last bit
of float32 in one order is one of bfloat16 in another. The kernel (vLLM 0.32, csrc/cpu/cpu_attn_vec.hpp and
cpu_attn_impl.hpp) scales queries first, adds one rounded product after another, and multiplies by 1 / sum. Up to 100
tokens it is equal to the bit (tests/policy/test_align.py); of more the kernel does a part at a time.
"""

import torch
from torch import Tensor


def ordered_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal, without a gradient. query [b, groups, heads a group, s, d] -> the same; key [b, groups, 1, d, s], value
    [b, groups, 1, s, d]; all float32.
    """
    from nemo_fp8rl.policy.ordered_loops import attend  # compiled at its first call on a machine

    out = torch.empty(query.shape)
    sides = (query.detach() * scale).flatten(0, 1), key.detach().flatten(0, 2), value.detach().flatten(0, 2)
    attend(*(side.contiguous().numpy() for side in sides), out.flatten(0, 1).numpy())
    return out
