"""From the trainer's weights to what travels: FP8 bytes and scales, quantized once, where the weights live."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from nemo_fp8rl.fp8 import BLOCK, Fp8Layers, KernelName, NonFiniteError, ScaleFormat, quantize_blockwise, scale_name
from nemo_fp8rl.refit.manifest import Manifest, RefitError, Update


@torch.no_grad()
def build_update(
    weights: Iterable[tuple[str, Tensor]],
    version: int,
    fp8_layers: Fp8Layers,
    scale_format: ScaleFormat,
    kernel: KernelName = "auto",
    starts: Mapping[str, tuple[int, ...]] | None = None,
) -> Update:
    """Quantize the projections of `fp8_layers` and copy the rest, so that training may go on while this travels.

    weights: (HF name, tensor in the dtype that the trainer's forward reads). starts: of those that are a part of their
    tensor, where the part begins, at a block border if it is quantized. Raises RefitError, naming the tensor, on a
    weight that is not finite.
    """
    tensors: dict[str, Tensor] = {}
    starts = dict(starts or {})
    for name, weight in weights:
        if fp8_layers.quantizes(name):
            try:
                quantized = quantize_blockwise(weight, scale_format=scale_format, kernel=kernel)
            except NonFiniteError as error:
                raise RefitError(f"refit {version}: {name}: {error}; the last optimizer step diverged") from None
            tensors[name], tensors[scale_name(name)] = quantized.data, quantized.scale_inv
            if start := starts.get(name):
                assert all(at % size == 0 for at, size in zip(start, BLOCK, strict=True)), (name, start)
                starts[scale_name(name)] = tuple(at // size for at, size in zip(start, BLOCK, strict=True))
        else:
            if not torch.isfinite(weight).all():
                raise RefitError(f"refit {version}: {name} holds a value that is not finite; training diverged")
            tensors[name] = weight.detach().clone(memory_format=torch.contiguous_format)
    return Update(Manifest.of(version, tensors, starts), tensors)
