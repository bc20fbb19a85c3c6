"""Stochastic rounding to E2M1: a value rounds up or down so that it is kept on average.

Values beyond the largest one, by which the rounding of a block's scale may exceed 6, saturate as they do otherwise.
"""

import torch
from torch import Tensor

from nemo_fp8rl.fp8.block_scaled import E2M1_MAX
from nemo_fp8rl.fp8.fp4_training.random_bits import BITS
from nemo_fp8rl.fp8.kernels.reference import fp4_scales, from_blocks, to_blocks
from nemo_fp8rl.fp8.names import Block


def round_to_e2m1(values: Tensor, draws: Tensor) -> Tensor:
    """Return one of the two neighbours in E2M1 of each value, float32.

    values: float32
    draws:  float32 of the same shape, 0 to 2^BITS - 1; a value a share s above its lower neighbour rounds up for a
            share s of all draws, to the nearest 2^-BITS
    """
    magnitude = values.abs().clamp_(max=E2M1_MAX)  # clamp_ keeps NaN
    spacing = 0.5 * (1 + (magnitude >= 2).float() + 2 * (magnitude >= 4).float())
    units = magnitude / spacing
    lower = units.floor()
    rises = draws + 0.5 < (units - lower) * 2.0**BITS
    return (spacing * (lower + rises)).copysign_(values)


def fake_quantize_stochastically(x: Tensor, block: Block, encode: Tensor, draws: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of x [N, K] that NVFP4 with stochastic rounding keeps, in `dtype`.

    block:  rows and columns that share a scale
    encode: float32 [], the factor of the global scale
    draws:  float32 [N, K], see `round_to_e2m1`
    """
    blocks, factor = to_blocks(x.detach()[None], block), encode.reshape(1, 1)
    scale, inverse = fp4_scales(blocks, factor, flush=False)
    values = round_to_e2m1(blocks * scale, to_blocks(draws[None], block))
    decode = torch.div(torch.ones_like(factor), factor)
    return from_blocks(values * (inverse.float() * decode), x[None].shape)[0].to(dtype)
