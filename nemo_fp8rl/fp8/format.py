"""What a blockwise FP8 tensor is, and which weights become one.

The rules are Transformer Engine's `Float8BlockScaling` (common/recipe/__init__.py): E4M3 data, one float32 scale a
block. `scale_inv` is what multiplies to dequantize, the meaning of `weight_scale_inv` in HF and vLLM checkpoints.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
BLOCK = (128, 128)
"""Rows and columns of a weight block."""

ScaleFormat = Literal["pow2", "fp32"]
"""`pow2`: scales are rounded down to a power of two, so every quantizer agrees. `fp32`: scales keep their mantissa."""


class NonFiniteError(ValueError):
    """A tensor to quantize holds NaN or infinity."""


@dataclass(frozen=True)
class BlockScaled:
    """A matrix in FP8 with one scale a block.

    data:       float8_e4m3fn [N, K]
    scale_inv:  float32 [ceil(N / block[0]), ceil(K / block[1])], contiguous; data * scale_inv is the value
    """

    data: Tensor
    scale_inv: Tensor
    block: tuple[int, int]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[N, K] in `dtype`; the product is taken in float32 and rounded once."""
        n, k = self.data.shape
        rows = self.scale_inv.repeat_interleave(self.block[0], 0)[:n]
        return (self.data.float() * rows.repeat_interleave(self.block[1], 1)[:, :k]).to(dtype)


def is_quantized(hf_name: str) -> bool:
    """True for the weights that are FP8 on both sides: the decoder's linear projections, by their HF name.

    Embedding, norms and the output head stay in high precision. Trainer, refit and engine all ask here.
    """
    return hf_name.endswith("_proj.weight")


def scale_name(hf_name: str) -> str:
    """HF name of the scales that belong to the weight `hf_name`."""
    return hf_name + "_scale_inv"
