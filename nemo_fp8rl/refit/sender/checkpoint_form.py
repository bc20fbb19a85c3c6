"""The tensors that a refit sends for a whole weight, by the names of a checkpoint."""

import torch
from torch import Tensor

from nemo_fp8rl.fp8 import FP8, Format, Fp8Layers, NonFiniteError, ScaleFormat, quantize_blockwise
from nemo_fp8rl.fp8.block_scaled import describe_non_finite


@torch.no_grad()
def to_checkpoint_form(
    name: str,
    weight: Tensor,
    fp8_layers: Fp8Layers,
    scale_format: ScaleFormat,
    format: Format = FP8,
    encode: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the data and scales of a weight that `fp8_layers` quantize, or a copy of any other weight, by name.

    encode: float32 [], the factor of the global scale, in a format that has one; see `quantize_blockwise`
    Raises: NonFiniteError if the weight has NaN or infinity
    """
    if fp8_layers.quantizes(name):
        quantized = quantize_blockwise(weight, format=format, scale_format=scale_format, encode=encode)
        tensors = {name: quantized.data, format.scale_name(name): quantized.scale_inv}
        if quantized.global_scale is not None:
            tensors[format.global_name(name)] = quantized.global_scale
        return tensors
    if not torch.isfinite(weight).all():
        raise NonFiniteError(describe_non_finite(weight))
    return {name: weight.detach().clone(memory_format=torch.contiguous_format)}
