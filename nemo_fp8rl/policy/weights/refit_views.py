"""The views of a rank's parameters that a refit reads, made once.

To find the HF tensors in Megatron's parameters takes longer, in a mixture with thousands of matrices, than to send
them. A view shares its parameter's memory, so it follows every step in place, and memory that is freed and allocated
again.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from nemo_fp8rl.fp8 import BlockScaled
from nemo_fp8rl.policy.weights.adapter_names import adapter_views
from nemo_fp8rl.policy.weights.fp8_params import fp8_view, is_fp8
from nemo_fp8rl.policy.weights.hf_names import hf_views
from nemo_fp8rl.policy.weights.layout import Layout

Part = Tensor | BlockScaled


class RefitViews:
    """The parts of the weights that a rank may send.

    They are made anew where a parameter has other memory than before (`parameter.data = ...`). Where one of them is a
    copy, as a bias of several key-value groups, all are made at every refit.

    parameters, modules: of the model, by name
    """

    def __init__(
        self, layout: Layout, parameters: Mapping[str, Tensor], modules: Mapping[str, nn.Module] = MappingProxyType({})
    ) -> None:
        self.layout, self.parameters = layout, parameters
        self.layers = {f"{name}.weight": layer for name, layer in modules.items() if hasattr(layer, "base")}
        """By the names of their weights, the layers whose weight may exist only in a quantized format."""
        self._plain: list[tuple[Tensor, Tensor]] = []
        self._fp8: list[tuple[Any, BlockScaled]] = []
        self._bases: list[tuple[Any, Any]] = []
        """The parameters and layers of the views, each with its memory."""
        self._views: list[tuple[str, Part]] | None = None

    def get(self) -> list[tuple[str, Part]]:
        """Return (HF name, part); the weights of q, k and v as [groups, rows, H], and FP8 as bytes with scales."""
        if self._views is not None and self._are_current():
            return self._views
        self._views = None
        named = self.parameters.items()
        plain = {name: parameter.detach() for name, parameter in named if not is_fp8(parameter)}
        fp8 = {name: fp8_view(parameter) for name, parameter in named if is_fp8(parameter)}
        bases = {name: layer.base for name, layer in self.layers.items()}
        quantized = fp8 | {name: base for name, base in bases.items() if isinstance(base, BlockScaled)}
        parts = chain(
            quantized_views(self.layout, plain, quantized),
            adapter_views(self.layout, lambda name: self.parameters[name].detach()),
        )
        views = [(name, part) for name, part in parts if self.layout.may_send(name)]
        self._plain = [(self.parameters[name], memory) for name, memory in plain.items()]
        self._fp8 = [(self.parameters[name], memory) for name, memory in fp8.items()]
        self._bases = [(self.layers[name], memory) for name, memory in bases.items()]
        tensors = chain(plain.values(), *map(_tensors_of, quantized.values()))
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        if all(x.untyped_storage().data_ptr() in storages for _, part in views for x in _tensors_of(part) if x.numel()):
            self._views = views
        return views

    def _are_current(self) -> bool:
        """Return True if every parameter has the memory of its views, which keep it from being given to another."""
        return (
            all(parameter.data_ptr() == memory.data_ptr() for parameter, memory in self._plain)
            and all(
                parameter._rowwise_data.data_ptr() == memory.data.data_ptr()
                and parameter._rowwise_scale_inv.data_ptr() == memory.scale_inv.data_ptr()
                for parameter, memory in self._fp8
            )
            and all(layer.base is base for layer, base in self._bases)
        )


def quantized_views(
    layout: Layout, plain: Mapping[str, Tensor], quantized: Mapping[str, BlockScaled]
) -> Iterator[tuple[str, Part]]:
    """Yield `hf_views` of the parameters; those that are quantized come as bytes with scales.

    plain:      parameters by Megatron's names
    quantized:  the weights that exist only in a quantized format, by the same names
    """
    weight: BlockScaled | None = None  # of the parameter that `hf_views` asked for last, whose parts it yields next

    def get(name: str) -> Tensor:
        nonlocal weight
        weight = quantized.get(name)
        return plain[name] if weight is None else weight.data

    for name, part in hf_views(layout, get):
        yield name, part if weight is None else replace(weight, data=part, scale_inv=scales_of_rows(part, weight))


def scales_of_rows(part: Tensor, weight: BlockScaled) -> Tensor:
    """Return the scales of some rows of a weight, as a view of the weight's scales.

    part: a view of weight.data, [rows, K] or [groups, rows, K], whose rows are whole blocks
    """
    height, row, scales = weight.block[0], weight.data.stride(-2), weight.scale_inv
    *groups, rows, _ = part.shape
    first, *steps = (n // row for n in (part.storage_offset() - weight.data.storage_offset(), *part.stride()[:-2]))
    assert not any(n % height for n in (first, *steps)), "a part of a quantized weight begins inside a block"
    return scales.as_strided(
        (*groups, -(-rows // height), scales.size(1)),
        (*(step // height * scales.stride(0) for step in steps), *scales.stride()),
        scales.storage_offset() + first // height * scales.stride(0),
    )


def _tensors_of(part: Part) -> list[Tensor]:
    return [part] if isinstance(part, Tensor) else [part.data, part.scale_inv]
