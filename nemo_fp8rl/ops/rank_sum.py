"""The sum of ranks' parts in rank order: float32, with one rounding.

Two parts need no order: their sum is rounded once by every collective. Nor do parts of which all but one are zero.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
UNORDERED_RANKS = 2
"""The largest number of ranks whose sum has the same bits in every order."""


@triton.jit
def sum_kernel(parts, out, size, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Write BLOCK values of out [size] of parts [RANKS, size]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + at, mask=at < size, other=0.0).to(tl.float32)
    for rank in tl.static_range(1, RANKS):
        total += tl.load(parts + rank * size + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


@torch.library.custom_op("nemo_fp8rl::sum_in_rank_order", mutates_args=())
def sum_in_rank_order(parts: Tensor) -> Tensor:
    """Return the sum over the first dimension of parts [ranks, ...], in the parts' dtype."""
    parts = parts.contiguous()
    out = torch.empty(parts.shape[1:], dtype=parts.dtype, device=parts.device)
    if size := out.numel():
        sum_kernel[(triton.cdiv(size, BLOCK),)](parts, out, size, RANKS=len(parts), BLOCK=BLOCK)
    return out


@sum_in_rank_order.register_fake
def _(parts: Tensor) -> Tensor:
    return torch.empty(parts.shape[1:], dtype=parts.dtype, device=parts.device)
