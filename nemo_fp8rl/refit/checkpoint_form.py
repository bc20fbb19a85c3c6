"""The tensors that a refit sends for a whole weight, by the names of a checkpoint."""

import torch
from torch import Tensor

from nemo_fp8rl.fp8 import Fp8Layers, NonFiniteError, ScaleFormat, quantize_blockwise, scale_name
from nemo_fp8rl.fp8.block_scaled import describe_non_finite


@torch.no_grad()
def to_checkpoint_form(
    name: str, weight: Tensor, fp8_layers: Fp8Layers, scale_format: ScaleFormat
) -> dict[str, Tensor]:
    """Return the FP8 data and scales of a weight that `fp8_layers` quantize, or a copy of any other weight, by name.

    Raises: NonFiniteError if the weight has NaN or infinity
    """
    if fp8_layers.quantizes(name):
        quantized = quantize_blockwise(weight, scale_format=scale_format)
        return {name: quantized.data, scale_name(name): quantized.scale_inv}
    if not torch.isfinite(weight).all():
        raise NonFiniteError(describe_non_finite(weight))
    return {name: weight.detach().clone(memory_format=torch.contiguous_format)}
