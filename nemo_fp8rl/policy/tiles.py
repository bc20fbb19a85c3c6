"""A matrix product as AMX computes it, with denormals taken for zero: attention on an FP8 cache on such a CPU.

vLLM's kernel (csrc/cpu/cpu_attn_amx.hpp) reads E4M3 codes as bfloat16 of 2^-120 times their value, so float32's
smallest normal number, 2^-126, stands for 2^-6 of a code, and a sum of less is lost. TDPBF16PS (Intel's Software
Developer's Manual) takes 32 products at a time: even and odd ones are added up apart, with a rounding an addition, then
together, then to what there is.
"""

import torch
from torch import Tensor

DEPTH = 32
"""Products that one instruction adds up."""


def tile_product(a: Tensor, b: Tensor, smallest: float) -> Tensor:
    """a [..., M, K] @ b [..., K, N], float32 of which every product is exact; any sum below `smallest` becomes 0."""
    total = torch.zeros((*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.size(-2), b.size(-1)))
    for start in range(0, a.size(-1), DEPTH):
        sums = [torch.zeros_like(total), torch.zeros_like(total)]
        for k in range(start, min(start + DEPTH, a.size(-1))):
            _flush(sums[k % 2].addcmul_(a[..., k : k + 1], b[..., k : k + 1, :]), smallest)
        _flush(total.add_(_flush(sums[0].add_(sums[1]), smallest)), smallest)
    return total


def _flush(sums: Tensor, smallest: float) -> Tensor:
    """In place."""
    return sums.mul_(sums.abs() >= smallest)
