"""The tensors that NeMo RL's worker hands out for a refit, as parts and values to send."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from nemo_fp8rl.fp8 import BLOCK, FP8, BlockScaled, Format, Fp8Layers, scale_name, scale_shape
from nemo_fp8rl.fp8.block_scaled import E4M3
from nemo_fp8rl.refit.manifest import RefitError, TensorPart

SCALE = scale_name("")


def read_stream(
    weights: Iterable[tuple[str, Tensor]], layers: Fp8Layers
) -> Iterator[tuple[TensorPart, Tensor | BlockScaled]]:
    """Yield (part, values); an FP8 part comes with values in high precision, to be quantized, or as they are stored.

    weights: (HF name, whole tensor); an FP8 weight and its scales, `..._scale_inv`, may come in either order
    layers:  which of the tensors in high precision are FP8 on the wire
    Raises:  RefitError for an FP8 weight without scales, scales without a weight, scales of other blocks than 128x128,
             and an FP8 tensor that is no matrix
    """
    unpaired: dict[str, Tensor] = {}
    for name, tensor in weights:
        weight = name.removesuffix(SCALE)
        if tensor.dtype is not E4M3 and name == weight:
            dtype = FP8 if layers.quantizes(name) else tensor.dtype
            yield _part(name, dtype, tensor.shape), tensor.detach()
        elif (other := unpaired.pop(weight, None)) is None:
            unpaired[weight] = tensor.detach()
        else:
            data, scales = (other, tensor) if other.dtype is E4M3 else (tensor, other)
            yield _part(weight, FP8, data.shape), _pair(weight, data.detach(), scales.detach())
    for name, tensor in unpaired.items():
        missing = f"{name} arrived in FP8 without {scale_name(name)}"
        raise RefitError(missing if tensor.dtype is E4M3 else f"{scale_name(name)} arrived without an FP8 {name}")


def _part(name: str, dtype: torch.dtype | Format, shape: torch.Size) -> TensorPart:
    if dtype is FP8 and len(shape) != 2:
        raise RefitError(
            f"{name} has the shape {list(shape)}: FP8 on the wire is for matrices; leave its layer, or its name, out "
            "of fp8_layers"
        )
    return TensorPart.of(name, dtype, shape)


def _pair(name: str, data: Tensor, scales: Tensor) -> BlockScaled:
    expected = scale_shape(data.shape, BLOCK)
    if data.dtype is not E4M3 or scales.dtype is not torch.float32 or tuple(scales.shape) != expected:
        raise RefitError(
            f"{scale_name(name)} must be float32 {list(expected)} beside an FP8 weight {list(data.shape)}, got "
            f"{str(scales.dtype).removeprefix('torch.')} {list(scales.shape)}"
        )
    return BlockScaled(data.contiguous(), scales.contiguous(), BLOCK)
