"""A matrix product as AMX computes it, with denormals taken for zero: attention on an FP8 cache on such a CPU.

vLLM's kernel (csrc/cpu/cpu_attn_amx.hpp) reads E4M3 codes as bfloat16 of 2^-120 times their value, so float32's
smallest normal number, 2^-126, stands for 2^-6 of a code, and a sum of less is lost. TDPBF16PS (Intel's Software
Developer's Manual) takes 32 products at a time: even and odd ones are added up apart, with a rounding an addition, then
together, then to what there is.
"""

import math

import numpy as np
import torch
from torch import Tensor


def tile_product(a: Tensor, b: Tensor, smallest: float) -> Tensor:
    """a [..., M, K] @ b [..., K, N], float32 of which every product is exact; any sum below `smallest` becomes 0."""
    from nemo_fp8rl.policy.on_cpu.amx_matmul_loops import add_up  # compiled at its first call on a machine

    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    product = torch.zeros((*batch, a.size(-2), b.size(-1)))
    left, right, out = (
        x.expand(*batch, *x.shape[-2:]).reshape(math.prod(batch), *x.shape[-2:]).numpy() for x in (a, b, product)
    )
    add_up(left, right, np.float32(smallest), out)
    return product
