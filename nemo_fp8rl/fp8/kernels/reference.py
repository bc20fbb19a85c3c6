"""The specification of the FP8 contract, in torch; every other kernel must equal it to the bit.

For each block of x, in float32:

    amax      = max |x|                               incomplete blocks at the edges are padded with zeros
    scale     = 448 / amax                            1 if amax is 0; the largest finite value of x's dtype if the
                                                      quotient overflows
    scale     = scale with its mantissa set to zero   only with pow2 scales: the largest power of two not above it
    q         = round(x * scale)                      to E4M3: nearest, ties to even, saturated at +-448
    scale_inv = 1 / scale                             x is approximately q * scale_inv

This is Transformer Engine's arithmetic (common/recipe/recipe_common.cuh, recipe Float8BlockScaling), with one
difference: where amax is NaN or infinite, scale_inv is NaN, so that the caller can refuse the tensor, while Transformer
Engine continues with scale 1.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_fp8rl.fp8.format import E4M3, E4M3_MAX
from nemo_fp8rl.fp8.kernels.compare_bytes import make_quantize_delta
from nemo_fp8rl.fp8.names import Block, ScaleFormat

FLOAT32_EXPONENT_BITS = 0x7F800000


def quantize(x: Tensor, block: Block, scale_format: ScaleFormat, data: Tensor, scale_inv: Tensor) -> None:
    """Quantize x into `data` and `scale_inv`.

    x:            bf16, fp16 or fp32 [E, N, K]
    block:        (b0, b1), rows and columns that share a scale
    scale_format: "pow2" or "fp32"
    data:         output, E4M3 [E, N, K]
    scale_inv:    output, float32 [E, ceil(N/b0), ceil(K/b1)]
    """
    blocks = to_blocks(x, block)
    scale = block_scale(blocks, x.dtype, scale_format)
    q = (blocks * scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    data.copy_(from_blocks(q, x.shape))
    scale_inv.copy_((1.0 / scale)[:, :, 0, :, 0])


quantize_delta = make_quantize_delta(quantize)


def block_scale(blocks: Tensor, dtype: torch.dtype, scale_format: ScaleFormat) -> Tensor:
    """Return the multiplier of each block, float32 [E, N/b0, 1, K/b1, 1].

    blocks: float32 [E, N/b0, b0, K/b1, b1]
    dtype:  dtype of the tensor before it was cut into blocks
    """
    amax = blocks.abs().amax((2, 4), keepdim=True)
    # torch.div, not `448 / amax`: torch computes the Python expression as reciprocal() * 448, which rounds twice.
    scale = torch.div(torch.full_like(amax, E4M3_MAX), amax)
    scale = scale.masked_fill_(scale == torch.inf, torch.finfo(dtype).max).masked_fill_(amax == 0, 1.0)
    if scale_format == "pow2":
        scale = scale.view(torch.int32).bitwise_and_(FLOAT32_EXPONENT_BITS).view(torch.float32)
    return scale.masked_fill_(~amax.isfinite(), torch.nan)


def to_blocks(x: Tensor, block: Block) -> Tensor:
    """Return x [E, N, K] as float32 [E, N/b0, b0, K/b1, b1], padded with zeros to whole blocks."""
    (experts, n, k), (b0, b1) = x.shape, block
    padded = x.float()
    if n % b0 or k % b1:
        padded = F.pad(padded, (0, -k % b1, 0, -n % b0))
    return padded.reshape(experts, padded.size(1) // b0, b0, padded.size(2) // b1, b1)


def from_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Invert `to_blocks`: [E, N/b0, b0, K/b1, b1] -> [E, N, K] of `shape`, without the padding."""
    experts, a, b0, c, b1 = blocks.shape
    return blocks.reshape(experts, a * b0, c * b1)[:, : shape[1], : shape[2]]
