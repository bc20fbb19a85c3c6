"""Attention with its sums in the order of vLLM's vector kernel, so that no bit differs.

What is a last bit of float32 in one order may be one of bfloat16 in another once the output is rounded; where it is cut
off (`rounding.truncates`) a mean of equal values that comes out a bit too low always is. The kernel (vLLM 0.32,
csrc/cpu/cpu_attn_vec.hpp, cpu_attn_impl.hpp) adds one product after another and multiplies by 1 / sum. It scales
queries, or scores where it reads FP8. With AVX-512 its multiply-adds are fused, its exponential is a polynomial, and
the weights' sum is in another order. What it takes in one part is equal to the bit
(tests/policy/layers/test_aligned_layers.py). How much that is depends on head dimension and cache: of prompts 300
tokens at 128, 100 at 256 where it was measured.
"""

import numpy as np
import torch
from torch import Tensor

from nemo_fp8rl.fp8.kernels.on_cpu.threads import run_in_threads

THREAD_PRODUCTS = 1 << 24
"""A thread is given at least as many, values of queries times keys: about two milliseconds."""


def ordered_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, scaled_late: bool = False) -> Tensor:
    """Causal, without a gradient. query [b, groups, heads a group, s, d] -> the same; key [b, groups, 1, d, s], value
    [b, groups, 1, s, d]; all float32. scaled_late: scores are scaled, not queries.
    """
    from nemo_fp8rl.policy.on_cpu.avx_attention_loops import attend  # compiled at its first call on a machine

    out, fused = torch.empty(query.shape), torch.cpu._is_avx512_supported()
    early, late = (1.0, scale) if scaled_late else (scale, 1.0)
    tensors = (query.detach() * early).flatten(0, 1), key.detach().flatten(0, 2), value.detach().flatten(0, 2)
    q, k, v = (tensor.contiguous().numpy() for tensor in tensors)
    result = out.flatten(0, 1).numpy()

    def work(first: int, end: int) -> None:
        part = slice(first, end)
        attend(q[part], k[part], v[part], np.float32(late), result[part], fused)

    run_in_threads(work, len(q), min(torch.get_num_threads(), q.size * q.shape[-2] // THREAD_PRODUCTS))
    return out
