"""The specification, in torch, line by line as Transformer Engine quantizes (recipe_common.cuh, Float8BlockScaling).

amax      = max |x| over the block, ragged edges padded with zeros
scale     = 448 / amax          (amax 0 -> 1; a quotient that overflows -> largest finite value of x's dtype)
scale     = scale without its mantissa                                          (pow2 only)
q         = round_to_nearest_even(x * scale) saturated to +-448, in E4M3
scale_inv = 1 / scale           (amax not finite -> NaN, where Transformer Engine goes on with scale 1)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_fp8rl.fp8.format import E4M3, E4M3_MAX
from nemo_fp8rl.fp8.kernels.compare_bytes import comparing
from nemo_fp8rl.fp8.names import Block, ScaleFormat

FLOAT32_EXPONENT_BITS = 0x7F800000


def to_blocks(x: Tensor, block: Block) -> Tensor:
    """x [E, N, K] -> float32 [E, N/b0, b0, K/b1, b1], padded with zeros where N or K is ragged."""
    (experts, n, k), (b0, b1) = x.shape, block
    padded = x.float()
    if n % b0 or k % b1:
        padded = F.pad(padded, (0, -k % b1, 0, -n % b0))
    return padded.reshape(experts, padded.size(1) // b0, b0, padded.size(2) // b1, b1)


def from_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `to_blocks`: [E, N/b0, b0, K/b1, b1] -> [E, N, K], padding cut off."""
    experts, a, b0, c, b1 = blocks.shape
    return blocks.reshape(experts, a * b0, c * b1)[:, : shape[1], : shape[2]]


def block_scale(blocks: Tensor, dtype: torch.dtype, scale_format: ScaleFormat) -> Tensor:
    """The multiplier of each block, float32 [E, N/b0, 1, K/b1, 1], for input that was of `dtype`."""
    amax = blocks.abs().amax((2, 4), keepdim=True)
    # torch.div, not `448 / amax`: the Python expression is reciprocal()*448, which is another number.
    scale = torch.div(torch.full_like(amax, E4M3_MAX), amax)
    scale = scale.masked_fill_(scale == torch.inf, torch.finfo(dtype).max).masked_fill_(amax == 0, 1.0)
    if scale_format == "pow2":
        scale = scale.view(torch.int32).bitwise_and_(FLOAT32_EXPONENT_BITS).view(torch.float32)
    return scale.masked_fill_(~amax.isfinite(), torch.nan)


def quantize(x: Tensor, block: Block, scale_format: ScaleFormat, data: Tensor, scale_inv: Tensor) -> None:
    """x [E, N, K] -> data, E4M3 [E, N, K], and scale_inv, float32 [E, ceil(N/b0), ceil(K/b1)]."""
    blocks = to_blocks(x, block)
    scale = block_scale(blocks, x.dtype, scale_format)
    q = (blocks * scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    data.copy_(from_blocks(q, x.shape))
    scale_inv.copy_((1.0 / scale)[:, :, 0, :, 0])


quantize_delta = comparing(quantize)
