"""Emulated layers as operations that torch.compile does not look into.

vLLM compiles a model unless `enforce_eager` is set, and the emulation calls kernels that are compiled by numba and
dequantizes lazily, neither of which can be traced. An operation gets the layer's stored weight and finds the layer by
the weight's memory: a number or name of a layer would be written into vLLM's cache of compiled graphs, which other
processes read.
"""

from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn

_layers: WeakSet[nn.Module] = WeakSet()
_by_address: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


def register(layer: nn.Module) -> None:
    """Let operations find a layer by its `weight` or `w13_weight`."""
    _layers.add(layer)


def _stored(layer: Any) -> Tensor:
    return layer.w13_weight if hasattr(layer, "w13_weight") else layer.weight


def _layer_of(weight: Tensor) -> Any:
    address = weight.data_ptr()
    layer = _by_address.get(address)
    if layer is None or _stored(layer).data_ptr() != address:  # new, or its memory has moved
        layer = next(layer for layer in _layers if _stored(layer).data_ptr() == address)
        _by_address[address] = layer
    return layer


@torch.library.custom_op("nemo_fp8rl::emulated_linear", mutates_args=())
def emulated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return `compute` of the layer that stores `weight` [N, K], for x [..., K]."""
    layer = _layer_of(weight)
    return layer.quant_method.compute(layer, x)


@emulated_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.size(0)))


@torch.library.custom_op("nemo_fp8rl::emulated_experts", mutates_args=())
def emulated_experts(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, weight: Tensor) -> Tensor:
    """Return `compute` of the layer that stores `weight` [E, 2 * I, H] as w13, for x [tokens, H]."""
    layer = _layer_of(weight)
    return layer.quant_method.compute(layer, x, topk_weights, topk_ids)


@emulated_experts.register_fake
def _(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)
