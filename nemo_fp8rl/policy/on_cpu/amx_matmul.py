"""A matrix product as AMX computes it, with denormals as zero, for attention on an FP8 cache on a CPU with AMX.

vLLM's kernel (csrc/cpu/cpu_attn_amx.hpp) reads E4M3 codes as bfloat16 numbers of 2^-120 times their value. So float32's
smallest normal number, 2^-126, stands for 2^-6 of a code, and a smaller sum is lost. TDPBF16PS (Intel's Software
Developer's Manual) takes 32 products at a time: it sums even and odd products separately, with a rounding at each
addition, then adds the two sums, and then adds the result to the accumulator.
"""

import math

import numpy as np
import torch
from torch import Tensor


def tile_product(a: Tensor, b: Tensor, smallest: float, hidden: Tensor | None = None) -> Tensor:
    """Return a @ b, float32, where any sum below `smallest` becomes 0.

    a, b:    float32 [..., M, K] and [..., K, N], with values whose products are exact in float32
    hidden:  int64 [..., M, 2]: a row of the product leaves out the terms from the first number to before the second,
             and tiles have the others alone; None leaves out none
    """
    from nemo_fp8rl.policy.on_cpu.amx_matmul_loops import add_up  # compiled at the first call on a machine

    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    product = torch.zeros((*batch, a.size(-2), b.size(-1)))
    gaps = torch.zeros(a.size(-2), 2, dtype=torch.int64) if hidden is None else hidden
    left, right, skipped, out = (
        x.expand(*batch, *x.shape[-2:]).reshape(math.prod(batch), *x.shape[-2:]).numpy() for x in (a, b, gaps, product)
    )
    add_up(left, right, skipped, np.float32(smallest), out)
    return product
