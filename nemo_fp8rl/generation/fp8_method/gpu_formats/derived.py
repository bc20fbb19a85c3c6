"""Tensors that a kernel reads in another layout than the one in which they are stored."""

from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.fp8 import BlockScaled
from nemo_fp8rl.fp8.block_scaled import repeat_rows

SWIZZLED_ROWS, SWIZZLED_COLUMNS = 128, 4
"""The tile of block scales that Blackwell's matmuls read at once."""


def keep(layer: Any, name: str, tensor: Tensor) -> None:
    """Store a derived tensor as an attribute of the layer, from the second time on in the memory of the first.

    It is neither a parameter nor a buffer, so that vLLM's layerwise reload leaves it alone.
    """
    old = getattr(layer, name, None)
    if old is not None and (old.shape, old.dtype, old.device) == (tensor.shape, tensor.dtype, tensor.device):
        old.copy_(tensor)
    else:
        setattr(layer, name, tensor.detach().clone())


def row_scales(stored: BlockScaled) -> Tensor:
    """Return block scales with a row for each row of the weight, [(E,) N, K / block], of its scales' dtype."""
    return repeat_rows(stored.scale_inv, stored.block[0], stored.data.size(-2))


def swizzle(scales: Tensor) -> Tensor:
    """Return scales [M, B] of one byte in the order of Blackwell's matmuls, [M, B] rounded up to whole tiles.

    A tile of 128 x 4 scales lies together; within it, rows 32 apart are neighbours.

    Source: NVIDIA, cuBLAS, "1D block scaling factors layout"
    """
    m, b = scales.shape
    rows, columns = -(-m // SWIZZLED_ROWS), -(-b // SWIZZLED_COLUMNS)
    padded = torch.zeros((rows * SWIZZLED_ROWS, columns * SWIZZLED_COLUMNS), dtype=torch.uint8, device=scales.device)
    padded[:m, :b] = scales.view(torch.uint8)
    tiles = padded.view(rows, 4, 32, columns, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(padded.shape).view(scales.dtype)
