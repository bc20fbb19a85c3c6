"""The tensor with a scale per block: what `quantize` makes of a matrix, in any format.

Scales multiply to dequantize, as `weight_scale_inv` does in HF and vLLM checkpoints.
"""

import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from nemo_fp8rl.fp8.formats import FP8, Format
from nemo_fp8rl.fp8.names import Block, ScaleFormat

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the codes 0 to 7; code 8 and above are the same values with a minus."""
E8M0_BIAS = 127
E8M0_NAN = 255
DATA_DTYPES = {"e4m3": E4M3, "e2m1": torch.uint8}
SCALE_DTYPES = {"float32": torch.float32, "e8m0": torch.uint8, "e4m3": E4M3}
"""E8M0 scales are uint8, as in Transformer Engine and vLLM."""

SCALE_FORMATS: tuple[ScaleFormat, ...] = get_args(ScaleFormat)
ALONG_LAST: Block = (1, 128)
"""The block of an activation or gradient that a matmul sums over its last dimension."""
ALONG_TOKENS: Block = (128, 1)
"""The block of an activation or gradient that a matmul sums over its tokens."""


class NonFiniteError(ValueError):
    """The tensor to quantize holds NaN or infinity. matrix: of separate matrices, the number of the one that does."""

    def __init__(self, text: str, matrix: int | None = None) -> None:
        super().__init__(text)
        self.matrix = matrix


@dataclass(frozen=True)
class BlockScaled:
    """A matrix, or a stack of matrices (experts), with one scale per block; no block spans two matrices.

    The value of an element is element * scale_inv of its block * global_scale.

    data:         [N, K] or [E, N, K] in E4M3, contiguous; E2M1 is packed, uint8 [(E,) N, K/2], even columns low
    scale_inv:    [(E,) ceil(N / block[0]), ceil(K / block[1])] in `SCALE_DTYPES`, contiguous
    block:        rows and columns that share a scale
    format:       of element and scale
    global_scale: float32 [] or [E], of formats that have one
    """

    data: Tensor
    scale_inv: Tensor
    block: Block
    format: Format = FP8
    global_scale: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        *rows, columns = self.data.shape
        return (*rows, columns * self.format.values_per_byte)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values, [(E,) N, K] in `dtype`; products are taken in float32 and rounded once."""
        values = e2m1_values(self.data) if self.format.element == "e2m1" else self.data.float()
        scales = scale_values(self.scale_inv, self.format)
        if self.global_scale is not None:
            scales = scales * self.global_scale.view(*self.global_scale.shape, 1, 1)
        n, k = values.shape[-2:]
        rows = scales.repeat_interleave(self.block[0], -2)[..., :n, :]
        return (values * rows.repeat_interleave(self.block[1], -1)[..., :k]).to(dtype)


def scale_values(scale_inv: Tensor, format: Format) -> Tensor:
    """Return block scales as float32; NaN stays NaN."""
    if format.scale != "e8m0":
        return scale_inv.float()
    # The exponent 0 is 2^-127, which float32 holds as a subnormal.
    power = (scale_inv.to(torch.int32) << 23).clamp_(min=1 << 22).view(torch.float32)
    return power.masked_fill_(scale_inv == E8M0_NAN, torch.nan)


def e8m0_of(scale_inv: Tensor) -> Tensor:
    """Return the E8M0 bytes of float32 powers of two; NaN becomes E8M0's NaN."""
    return (scale_inv.view(torch.int32) >> 23).to(torch.uint8)


def e2m1_values(packed: Tensor) -> Tensor:
    """Return the values, float32 [..., K], of E2M1 codes that are packed in uint8 [..., K/2]."""
    return e2m1_decode(torch.stack([packed & 15, packed >> 4], -1).flatten(-2))


def e2m1_decode(codes: Tensor) -> Tensor:
    """Return the values, float32, of E2M1 codes 0 to 15, uint8. It needs no table, which no CUDA graph could make."""
    magnitude = (codes & 7).int()
    normal = ((magnitude << 22) + 0x3F000000).view(torch.float32)  # from 1.0 on; 0.5 is the only subnormal
    return torch.where(magnitude < 2, magnitude * 0.5, normal) * (1.0 - 2.0 * (codes >> 3).float())


def empty_block_scaled(shape: tuple[int, ...], format: Format, block: Block, device: torch.device) -> "BlockScaled":
    """Return a tensor to fill, for values of `shape` [(E,) N, K]; a global scale is 1 until it is set."""
    data = torch.empty(format.data_shape(shape), dtype=DATA_DTYPES[format.element], device=device)
    scale_inv = torch.empty(scale_shape(shape, block), dtype=SCALE_DTYPES[format.scale], device=device)
    global_scale = torch.ones(shape[:-2], dtype=torch.float32, device=device) if format.has_global else None
    return BlockScaled(data, scale_inv, block, format, global_scale)


def scale_shape(shape: torch.Size | tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor of shape [..., N, K]."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def repeat_rows(scale_inv: Tensor, repeats: int, rows: int) -> Tensor:
    """Return scales [..., rows, B] for blocks of fewer rows, from [..., ceil(rows / repeats), B]; a copy.

    repeats: the old number of rows of a block over the new one
    """
    number = torch.uint8 if scale_inv.itemsize == 1 else torch.int32  # torch repeats no E4M3 on some devices
    return scale_inv.view(number).repeat_interleave(repeats, -2)[..., :rows, :].contiguous().view(scale_inv.dtype)


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
