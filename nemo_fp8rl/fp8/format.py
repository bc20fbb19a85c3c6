"""The blockwise FP8 tensor: E4M3 data and one float32 scale per block.

The rules are those of Transformer Engine's `Float8BlockScaling` (common/recipe/__init__.py). `scale_inv` multiplies to
dequantize, as `weight_scale_inv` does in HF and vLLM checkpoints.
"""

import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from nemo_fp8rl.fp8.names import Block, ScaleFormat

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0

SCALE_FORMATS: tuple[ScaleFormat, ...] = get_args(ScaleFormat)
ALONG_LAST: Block = (1, 128)
"""The block of an activation or gradient that a matmul sums over its last dimension."""
ALONG_TOKENS: Block = (128, 1)
"""The block of an activation or gradient that a matmul sums over its tokens."""


class NonFiniteError(ValueError):
    """The tensor to quantize holds NaN or infinity."""


@dataclass(frozen=True)
class BlockScaled:
    """A matrix in FP8, or a stack of matrices (experts), with one scale per block; no block spans two matrices.

    The value of an element is data * scale_inv of its block.

    data:       float8_e4m3fn [N, K] or [E, N, K], contiguous
    scale_inv:  float32 [(E,) ceil(N / block[0]), ceil(K / block[1])], contiguous
    block:      rows and columns that share a scale
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
        """Return the values, of data's shape, in `dtype`; the product is taken in float32 and rounded once."""
        n, k = self.data.shape[-2:]
        rows = self.scale_inv.repeat_interleave(self.block[0], -2)[..., :n, :]
        return (self.data.float() * rows.repeat_interleave(self.block[1], -1)[..., :k]).to(dtype)


def scale_shape(shape: torch.Size | tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor of shape [..., N, K]."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def check_scale_format(name: str) -> None:
    """Raise ValueError unless `name` is a ScaleFormat: a typing error must not silently choose the other format."""
    if name not in SCALE_FORMATS:
        raise ValueError(f"there is no scale format {name!r}; there are {', '.join(SCALE_FORMATS)}")


def is_finite(x: Tensor) -> bool:
    """Return whether all values are finite. Only the smallest and the largest are tested: NaN becomes both of them."""
    return not x.numel() or all(math.isfinite(extreme) for extreme in x.aminmax())


def describe_non_finite(x: Tensor) -> str:
    """Return how many values of x are not finite, and the index of the first, as the text of an error."""
    bad = ~x.isfinite()
    rest, first = int(bad.reshape(-1).byte().argmax()), list[int]()
    for size in reversed(x.shape):  # torch.unravel_index loads much of torch, in seconds, when it is first called
        rest, index = divmod(rest, size)
        first.insert(0, index)
    return f"{int(bad.sum())} of {x.numel()} values are not finite, the first at {first}"


def count_nans(data: Tensor) -> Tensor:
    """Return the number of NaNs in E4M3 data, int64 [].

    NaN is 7 bits of 1 after either sign; E4M3 has no infinity.
    """
    return (data.view(torch.uint8).bitwise_and(0x7F) == 0x7F).sum()


def are_powers_of_two(scale_inv: Tensor) -> bool:
    """Return whether positive, normal float32 scales are powers of two: no mantissa bit is set."""
    return not (scale_inv.view(torch.int32) & 0x7FFFFF).any()
