"""The contract of low-rank adapters (LoRA): trainer and engine add the same bits to a linear layer's output.

    h = x A^T       rounded to the activations' dtype; where ranks share the columns of A, their sum is rounded
    d = h B^T       rounded
    y + d * scale   each of the two operations rounded, as in HF's `peft` (tuners/lora/layer.py)

An h with another last bit moves every output of its token, so its sum must not depend on the order in which ranks add.
On a CPU it is a float64 sum, whose order is lost in the rounding (float32 activations have no such rounding).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]
"""x [..., K] and w [N, K] -> x w^T [..., N], rounded to the dtype of x."""


def reduce_rank(x: Tensor, a: Tensor, product: Product = F.linear) -> Tensor:
    """Return h [..., r] of x [..., K] and A [r, K]."""
    return partial_rank(x, a, product).to(x.dtype) if _is_exact(x, product) else product(x, a)


def partial_rank(x: Tensor, a: Tensor, product: Product = F.linear) -> Tensor:
    """Return a rank's part of h [..., r], where ranks share the columns K of x [..., K] and A [r, K].

    It is float64 for 16 bits on a CPU, else float32.
    """
    return F.linear(x.double(), a.double()) if _is_exact(x, product) else product(x.float(), a.float())


def expand_rank(y: Tensor, h: Tensor, b: Tensor, scale: float, product: Product = F.linear) -> Tensor:
    """Return y + (h B^T) * scale, [..., N], of h [..., r] and B [N, r]."""
    return y + product(h, b) * scale


def add_low_rank(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, product: Product = F.linear) -> Tensor:
    """Return y + (x A^T) B^T * scale, [..., N], of x [..., K], A [r, K] and B [N, r]."""
    return expand_rank(y, reduce_rank(x, a, product), b, scale, product)


def _is_exact(x: Tensor, product: Product) -> bool:
    return x.device.type == "cpu" and x.dtype is not torch.float32 and product is F.linear
