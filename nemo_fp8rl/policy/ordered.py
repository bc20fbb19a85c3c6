"""Attention with its sums in the order of vLLM's vector kernel, so that no bit differs.

What is a last bit of float32 in one order may be one of bfloat16 in another once the output is rounded, and where it is
cut off (`rounding.truncates`) a sum of equal values that falls below them always is. The kernel (vLLM 0.32,
csrc/cpu/cpu_attn_vec.hpp, cpu_attn_impl.hpp) adds one product after another and multiplies by 1 / sum. It scales
queries, or scores where the cache is FP8. With AVX-512 its multiply-adds are fused, its exponential is a polynomial,
and the weights' sum is in another order. What it takes in one part is equal to the bit, a hundred tokens at least
(tests/policy/test_align.py).
"""

import numpy as np
import torch
from torch import Tensor


def ordered_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, scaled_late: bool = False) -> Tensor:
    """Causal, without a gradient. query [b, groups, heads a group, s, d] -> the same; key [b, groups, 1, d, s], value
    [b, groups, 1, s, d]; all float32. scaled_late: scores are scaled, not queries.
    """
    from nemo_fp8rl.policy.ordered_loops import attend  # compiled at its first call on a machine

    out, fused = torch.empty(query.shape), torch.cpu._is_avx512_supported()
    early, late = (1.0, scale) if scaled_late else (scale, 1.0)
    sides = (query.detach() * early).flatten(0, 1), key.detach().flatten(0, 2), value.detach().flatten(0, 2)
    attend(*(side.contiguous().numpy() for side in sides), np.float32(late), out.flatten(0, 1).numpy(), fused)
    return out
