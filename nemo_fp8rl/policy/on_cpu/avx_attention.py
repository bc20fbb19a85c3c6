"""Attention that sums in the order of vLLM's vector kernel, so that no bit differs.

A different order changes the last bit of a float32 sum, which may change the last bit of the rounded bfloat16 output.
Where the output is truncated (`vllm_cpu_rounding.truncates`), it always does so for a mean of equal values that is a
bit too low. The kernel (vLLM 0.32, csrc/cpu/cpu_attn_vec.hpp, cpu_attn_impl.hpp) adds one product after another and
multiplies by 1 / sum. It scales queries; where it reads FP8, it scales scores. With AVX-512 its multiply-adds are
fused, its exponential is a polynomial, and the sum of the weights has another order. Keys that the kernel takes in one
part give equal bits (tests/policy/layers/test_aligned_layers.py). The size of a part depends on head dimension and
cache: 300 tokens of a prompt at 128, 100 at 256, where it was measured.
"""

import numpy as np
import torch
from torch import Tensor

from nemo_fp8rl.fp8.kernels.on_cpu.threads import run_in_threads

THREAD_PRODUCTS = 1 << 24
"""The least work of a thread, in values of queries times keys: about two milliseconds."""


def attention_in_kernel_order(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    scale_scores: bool = False,
    hidden: Tensor | None = None,
) -> Tensor:
    """Compute causal attention without a gradient; the result has the shape of query. All tensors are float32.

    query:         [b, groups, heads per group, s, d]
    key, value:    [b, groups, 1, d, s] and [b, groups, 1, s, d]
    scale_scores:  True scales the scores, False the queries
    hidden:        int64 [b, s, 2], the first key that a query does not see, and the one after the last of them; sums
                   are those over the other keys alone. None where a query sees all keys before it
    """
    from nemo_fp8rl.policy.on_cpu.avx_attention_loops import attend  # compiled at the first call on a machine

    out, fused = torch.empty(query.shape), torch.cpu._is_avx512_supported()
    query_scale, score_scale = (1.0, scale) if scale_scores else (scale, 1.0)
    tensors = (query.detach() * query_scale).flatten(0, 1), key.detach().flatten(0, 2), value.detach().flatten(0, 2)
    q, k, v = (tensor.contiguous().numpy() for tensor in tensors)
    result, (b, groups, _, s, _) = out.flatten(0, 1).numpy(), query.shape
    gaps = np.zeros((b, s, 2), np.int64) if hidden is None else hidden.numpy()

    def work(first: int, end: int) -> None:
        part = slice(first, end)
        sequences = np.arange(first, end) // groups
        attend(q[part], k[part], v[part], gaps[sequences], np.float32(score_scale), result[part], fused)

    run_in_threads(work, len(q), min(torch.get_num_threads(), q.size * q.shape[-2] // THREAD_PRODUCTS))
    return out
