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
        try:
            tensors |= as_sent(name, weight, fp8_layers, scale_format, kernel)
        except NonFiniteError as error:
            raise RefitError(f"refit {version}: {name}: {error}; training diverged") from None
        if (start := starts.get(name)) and fp8_layers.quantizes(name):
            assert all(at % size == 0 for at, size in zip(start, BLOCK, strict=True)), (name, start)
            starts[scale_name(name)] = tuple(at // size for at, size in zip(start, BLOCK, strict=True))
    return Update(Manifest.of(version, tensors, starts), tensors)


@torch.no_grad()
def as_sent(
    name: str, weight: Tensor, fp8_layers: Fp8Layers, scale_format: ScaleFormat, kernel: KernelName = "auto"
) -> dict[str, Tensor]:
    """What stands for one weight: its bytes and its scales where `fp8_layers` quantize it, else a copy of it.

    Raises NonFiniteError on a weight that holds NaN or infinity.
    """
    if fp8_layers.quantizes(name):
        quantized = quantize_blockwise(weight, scale_format=scale_format, kernel=kernel)
        return {name: quantized.data, scale_name(name): quantized.scale_inv}
    if bad := int((~torch.isfinite(weight)).sum()):
        raise NonFiniteError(f"{bad} of {weight.numel()} values are not finite")
    return {name: weight.detach().clone(memory_format=torch.contiguous_format)}
