"""The differentiable gradient estimator: the slope of a smooth function in place of the rounding's (arXiv 2501.17116).

The straight-through estimator takes a slope of 1. This one is steep in the middle between two values of the format,
where a small step changes the rounded value, and flat at the values. Constants are those of MS-AMP
(operators/fp4_quantize/quantize.cu): k = 5, slopes of 3 at most.
"""

from torch import Tensor

from nemo_fp8rl.fp8.block_scaled import E2M1_MAX
from nemo_fp8rl.fp8.kernels.reference import fp4_scales, from_blocks, to_blocks
from nemo_fp8rl.fp8.names import Block

SHARPNESS = 5.0
MAX_SLOPE = 3.0


def estimated_slope(scaled: Tensor) -> Tensor:
    """Return min(|2 (x - low) / width - 1|^(1/k - 1) / k, 3), float32.

    low and width are those of the interval of E2M1's values in which x lies.
    scaled: float32, values in units of the format; beyond 6 they have the slope of 6
    """
    magnitude = scaled.abs().clamp(max=E2M1_MAX)
    spacing = 0.5 * (1 + (magnitude >= 2).float() + 2 * (magnitude >= 4).float())
    units = magnitude / spacing
    return ((2 * (units - units.floor()) - 1).abs() ** (1 / SHARPNESS - 1) / SHARPNESS).clamp_(max=MAX_SLOPE)


def weight_slope(w: Tensor, block: Block, encode: Tensor, flush: bool) -> Tensor:
    """Return the slope for each value of a weight [N, K], float32; arguments as in `kernels.reference.quantize_fp4`.

    encode: float32 []
    """
    blocks = to_blocks(w.detach()[None], block)
    scale, _ = fp4_scales(blocks, encode.reshape(1, 1), flush)
    return from_blocks(estimated_slope(blocks * scale), w[None].shape)[0]
