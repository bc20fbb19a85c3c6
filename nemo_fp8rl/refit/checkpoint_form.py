"""What stands for a whole weight in a refit, by the names of a checkpoint: for what writes or measures it."""

import torch
from torch import Tensor

from nemo_fp8rl.fp8 import Fp8Layers, NonFiniteError, ScaleFormat, quantize_blockwise, scale_name
from nemo_fp8rl.fp8.format import describe_non_finite


@torch.no_grad()
def to_checkpoint_form(
    name: str, weight: Tensor, fp8_layers: Fp8Layers, scale_format: ScaleFormat
) -> dict[str, Tensor]:
    """What stands for one weight: its bytes and its scales where `fp8_layers` quantize it, else a copy of it.

    Raises NonFiniteError on a weight that holds NaN or infinity.
    """
    if fp8_layers.quantizes(name):
        quantized = quantize_blockwise(weight, scale_format=scale_format)
        return {name: quantized.data, scale_name(name): quantized.scale_inv}
    if not torch.isfinite(weight).all():
        raise NonFiniteError(describe_non_finite(weight))
    return {name: weight.detach().clone(memory_format=torch.contiguous_format)}
