"""From the trainer's weights to what travels: FP8 bytes and scales, quantized once, where the weights live."""

from collections.abc import Iterable

import torch
from torch import Tensor

from nemo_fp8rl.fp8 import Fp8Layers, KernelName, NonFiniteError, ScaleFormat, quantize_blockwise, scale_name
from nemo_fp8rl.refit.manifest import Manifest, RefitError, Update


@torch.no_grad()
def build_update(
    weights: Iterable[tuple[str, Tensor]],
    version: int,
    fp8_layers: Fp8Layers,
    scale_format: ScaleFormat,
    kernel: KernelName = "auto",
) -> Update:
    """Quantize the projections of `fp8_layers` and copy the rest, so that training may go on while this travels.

    weights: (HF name, tensor in the dtype that the trainer's forward reads). Raises RefitError, naming the tensor, on
    a weight that is not finite.
    """
    tensors: dict[str, Tensor] = {}
    for name, weight in weights:
        if fp8_layers.quantizes(name):
            try:
                quantized = quantize_blockwise(weight, scale_format=scale_format, kernel=kernel)
            except NonFiniteError as error:
                raise RefitError(f"refit {version}: {name}: {error}; the last optimizer step diverged") from None
            tensors[name], tensors[scale_name(name)] = quantized.data, quantized.scale_inv
        else:
            if not torch.isfinite(weight).all():
                raise RefitError(f"refit {version}: {name} holds a value that is not finite; training diverged")
            tensors[name] = weight.detach().clone(memory_format=torch.contiguous_format)
    return Update(Manifest.of(version, tensors), tensors)
