"""Distance of the engine's weights from the trainer's, by the precision of the weights in the engine.

FP8 blocks are off by 2.7 % where weights are normally distributed, whatever their scale. With the flow fp8_rollout that
is what the engine computes with and the trainer does not; with fp8_e2e both compute with the same bytes.
"""

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from nemo_fp8rl.fp8 import BLOCK, FP8, Format, Fp8Layers, ScaleFormat, quantize_blockwise
from nemo_fp8rl.fp8.layers import LAYER

ROWS_AT_ONCE = 8 * BLOCK[0]
"""Rows quantized at once, whole blocks of every format: a copy of a whole weight in float32 may be large."""


SquaresByGroup = dict[str, tuple[float, float]]
"""Name of a group of weights w -> (sum of (w' - w)^2, sum of w^2), where w' is the engine's value of w."""


def weight_error(parts: Iterable[SquaresByGroup]) -> dict[str, float]:
    """Return the relative error sqrt(sum (w' - w)^2 / sum w^2) of groups of weights.

    parts:  `weight_squares` of each rank
    Names:  weight_error/fp8 (or mxfp8, nvfp4, ...) for the weights that the engine has in that format,
            weight_error/bf16 for all others, which travel unchanged and have the error 0; weight_error/layer_0, ... for
            all weights of a decoder layer. A group without weights is left out, and a group whose weights are all 0 has
            the error 0.
    """
    whole = sum_squares(parts)
    return {f"weight_error/{group}": math.sqrt(e / w) if w else 0.0 for group, (e, w) in whole.items()}


def squares_by_group(precision: str, layer: int | None, error: float, norm: float) -> SquaresByGroup:
    """Return the squares of one weight under the names of its groups. precision: of the weight in the engine"""
    groups = (precision, *([] if layer is None else [f"layer_{layer}"]))
    return dict.fromkeys(groups, (error, norm))


def sum_squares(parts: Iterable[SquaresByGroup]) -> SquaresByGroup:
    """Return the sums of all parts by group."""
    whole: SquaresByGroup = {}
    for part in parts:
        for group, (error, norm) in part.items():
            before = whole.get(group, (0.0, 0.0))
            whole[group] = (before[0] + error, before[1] + norm)
    return whole


@torch.no_grad()
def weight_squares(
    weights: Iterable[tuple[str, Tensor]],
    fp8_layers: Fp8Layers,
    scale_format: ScaleFormat = "pow2",
    format: Format = FP8,
    encodes: Mapping[str, Tensor] = MappingProxyType({}),
) -> SquaresByGroup:
    """Return one rank's part of `weight_error`; w' is the dequantized value of the engine's bytes.

    weights:  (HF name, tensor in the dtype that the trainer's forward reads)
    encodes:  by name, the factors of global scales, as for `quantize_blockwise`
    Raises:   NonFiniteError on a weight that must be quantized and is not finite
    """

    def of(name: str, weight: Tensor) -> SquaresByGroup:
        is_quantized, layer = fp8_layers.quantizes(name), LAYER.search(name)
        error = _squared_error(weight, format, scale_format, encodes.get(name)) if is_quantized else 0.0
        return squares_by_group(
            format.family if is_quantized else "bf16", int(layer[1]) if layer else None, error, squares(weight)
        )

    return sum_squares(of(name, weight) for name, weight in weights)


def _squared_error(weight: Tensor, format: Format, scale_format: ScaleFormat, encode: Tensor | None) -> float:
    """weight: [N, K], or [E, N, K], where each expert has its own blocks."""
    matrices = weight if weight.dim() == 3 else weight[None]
    return sum(
        squares(quantize_blockwise(rows, format=format, scale_format=scale_format, encode=encode).dequantize() - rows)
        for matrix in matrices
        for rows in matrix.split(ROWS_AT_ONCE)
    )


def squares(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64).square())
