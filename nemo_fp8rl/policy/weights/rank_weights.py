"""The weights of one rank in the forms that engines, checkpoints and the reference policy need."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.algorithms.quantization_error import (
    SquaresByGroup,
    squares,
    squares_by_group,
    sum_squares,
    weight_squares,
)
from nemo_fp8rl.fp8 import BlockScaled, Format, Fp8Layers, ScaleFormat
from nemo_fp8rl.policy.optimizer.scaled_adam import MASTER
from nemo_fp8rl.policy.weights.adapter_names import adapter_views
from nemo_fp8rl.policy.weights.fp8_params import fp8_view, is_fp8, storage_tensors
from nemo_fp8rl.policy.weights.hf_names import layer_norms, to_hf
from nemo_fp8rl.policy.weights.layout import Layout
from nemo_fp8rl.policy.weights.optimizer_state import AwareSlice, StateSlice, make_master_gatherer, state_slices
from nemo_fp8rl.policy.weights.refit_views import RefitViews


class RankWeights:
    """Views of a model's parameters, which must not be offloaded (`Offload.restore_parameters`).

    dtype:  policy.precision
    """

    def __init__(self, layout: Layout, model: torch.nn.Module, optimizer: Any, dtype: torch.dtype) -> None:
        self.layout, self.model, self.optimizer, self.dtype = layout, model, optimizer, dtype
        self.parameters = dict(model.named_parameters())
        self.refit_views = RefitViews(layout, self.parameters, dict(model.named_modules()))

    def storage_tensors(self) -> list[Tensor]:
        """Return the plain tensors of all parameters, with FP8 columns; they can be copied and written in place."""
        return [tensor for parameter in self.parameters.values() for tensor in storage_tensors(parameter)]

    def for_refit(self) -> Iterator[tuple[str, Tensor | BlockScaled]]:
        """Yield (HF name, this rank's part) of the weights that it may send; FP8 weights come as bytes with scales."""
        yield from self.refit_views.get()

    def norms(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (HF name, parameter) of the norms before attention and MLP, to be written in place."""
        return ((name, self.parameters[megatron].detach()) for megatron, name in layer_norms(self.layout))

    def for_checkpoint(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (HF name, this rank's part) of all weights, as views where possible; all ranks call it together.

        With adapters these are the adapters alone, because the base does not change.

        For a weight that exists only in FP8 the ranks that write get the values from which it was quantized.
        """
        masters = make_master_gatherer(self.model, self.optimizer)

        def part(name: str) -> Tensor:
            parameter = self.parameters[name]
            return masters(name).to(self.dtype) if is_fp8(parameter) else parameter.detach()

        return adapter_views(self.layout, part) if self.layout.adapters else to_hf(self.layout, part)

    def squares(
        self, fp8_layers: Fp8Layers, scale_format: ScaleFormat, format: Format, encodes: Mapping[str, Tensor]
    ) -> SquaresByGroup:
        """Return this rank's part of `quantization_error.weight_error`; `weight_squares` has the arguments."""
        weights = ((n, w) for n, w in self.for_refit() if self.layout.is_writer(n) and not isinstance(w, BlockScaled))
        return sum_squares([weight_squares(weights, fp8_layers, scale_format, format, encodes), self._squares_of_fp8()])

    @torch.no_grad()
    def _squares_of_fp8(self) -> SquaresByGroup:
        """Return the squares of FP8 weights; each rank takes the slices whose masters it has and gathers nothing."""

        def slice_squares(name: str, state: StateSlice | AwareSlice) -> SquaresByGroup:
            parameter = self.parameters[name]
            master = state.values(MASTER).to(parameter.device, parameter.dtype)
            error = squares(fp8_view(parameter).dequantize().flatten()[slice(*state.span)] - master)
            layer = self.layout.layers[int(name.split(".")[2])]  # decoder.layers.N, counted on this rank
            return squares_by_group("fp8", layer, error, squares(master))

        states = state_slices(self.model, self.optimizer).items()
        return sum_squares(slice_squares(name, state) for name, state in states if is_fp8(self.parameters[name]))
