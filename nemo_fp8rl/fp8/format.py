"""What a blockwise FP8 tensor is.

The rules are Transformer Engine's `Float8BlockScaling` (common/recipe/__init__.py): E4M3 data, one float32 scale a
block. `scale_inv` is what multiplies to dequantize, the meaning of `weight_scale_inv` in HF and vLLM checkpoints.
"""

import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from nemo_fp8rl.fp8.names import BLOCK, Block, ScaleFormat

__all__ = [
    "ALONG_LAST",
    "ALONG_TOKENS",
    "BLOCK",
    "E4M3",
    "E4M3_MAX",
    "Block",
    "BlockScaled",
    "NonFiniteError",
    "ScaleFormat",
    "all_finite",
    "are_powers_of_two",
    "check_scale_format",
    "nan_codes",
    "non_finite",
    "scale_shape",
]

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0

SCALE_FORMATS: tuple[ScaleFormat, ...] = get_args(ScaleFormat)
ALONG_LAST: Block = (1, 128)
"""The block of an activation or gradient that is summed over its last dimension."""
ALONG_TOKENS: Block = (128, 1)
"""The block of an activation or gradient that is summed over its tokens."""


def check_scale_format(name: str) -> None:
    """Raise ValueError on a name that is no ScaleFormat: taken for the other one, it would change every scale."""
    if name not in SCALE_FORMATS:
        raise ValueError(f"there is no scale format {name!r}; there are {', '.join(SCALE_FORMATS)}")


class NonFiniteError(ValueError):
    """A tensor to quantize holds NaN or infinity."""


def all_finite(x: Tensor) -> bool:
    """Whether all values are finite: NaN and infinities reach the smallest or the largest value."""
    return not x.numel() or all(math.isfinite(end) for end in x.aminmax())


def non_finite(x: Tensor) -> str:
    """How many of its values are not finite, and where the first is."""
    bad = ~x.isfinite()
    first = torch.unravel_index(bad.reshape(-1).byte().argmax(), x.shape)
    return f"{int(bad.sum())} of {x.numel()} values are not finite, the first at {[int(index) for index in first]}"


def nan_codes(data: Tensor) -> Tensor:
    """int64 []: how many values of E4M3 data are NaN, 7 bits of 1 after either sign; it has no infinity."""
    return (data.view(torch.uint8).bitwise_and(0x7F) == 0x7F).sum()


def are_powers_of_two(scale_inv: Tensor) -> bool:
    """Whether positive normal float32 scales are powers of two: no mantissa has a bit."""
    return not (scale_inv.view(torch.int32) & 0x7FFFFF).any()


@dataclass(frozen=True)
class BlockScaled:
    """A matrix, or a stack of them (experts), in FP8 with one scale a block; no block crosses from one to the next.

    data:       float8_e4m3fn [N, K] or [E, N, K], contiguous
    scale_inv:  float32 [(E,) ceil(N / block[0]), ceil(K / block[1])], contiguous; data * scale_inv is the value
    """

    data: Tensor
    scale_inv: Tensor
    block: Block

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, of data's shape, in `dtype`; the product is taken in float32 and rounded once."""
        n, k = self.data.shape[-2:]
        rows = self.scale_inv.repeat_interleave(self.block[0], -2)[..., :n, :]
        return (self.data.float() * rows.repeat_interleave(self.block[1], -1)[..., :k]).to(dtype)


def scale_shape(shape: torch.Size | tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Shape of the scales of a tensor [..., N, K]."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
