"""One rank's weights as engines, checkpoints and the reference policy want them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.algorithms.quantization_error import SquaresByGroup, in_groups, squares, summed, weight_squares
from nemo_fp8rl.fp8 import BlockScaled, Fp8Layers, KernelName, ScaleFormat
from nemo_fp8rl.policy.weights.fp8_params import held, is_fp8, storage, views_for_refit
from nemo_fp8rl.policy.weights.hf_names import to_hf
from nemo_fp8rl.policy.weights.layout import Layout
from nemo_fp8rl.policy.weights.optimizer_state import Piece, gathered_masters, pieces


class HeldWeights:
    """Views of a model's parameters, whose memory must be there (`Offload.take_parameters`).

    dtype: policy.precision.
    """

    def __init__(self, layout: Layout, model: torch.nn.Module, optimizer: Any, dtype: torch.dtype) -> None:
        self.layout, self.model, self.optimizer, self.dtype = layout, model, optimizer, dtype
        self.parameters = dict(model.named_parameters())

    def storage(self) -> list[Tensor]:
        """The plain tensors that hold them, columns and all, to be copied and to be written in place."""
        return [tensor for parameter in self.parameters.values() for tensor in storage(parameter)]

    def for_refit(self) -> Iterator[tuple[str, Tensor | BlockScaled]]:
        """(HF name, this rank's part) of those that it may send; of those in FP8 the bytes, with their scales."""
        views = views_for_refit(self.layout, self.parameters)
        return ((name, part) for name, part in views if self.layout.sends(name))

    def for_checkpoint(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, this rank's part) of all; views where possible. All ranks together.

        Of those in FP8 alone: what their bytes were quantized from, on the ranks that write.
        """
        masters = gathered_masters(self.model, self.optimizer)

        def part(name: str) -> Tensor:
            parameter = self.parameters[name]
            return masters(name).to(self.dtype) if is_fp8(parameter) else parameter.detach()

        return to_hf(self.layout, part)

    def squares(self, fp8_layers: Fp8Layers, scale_format: ScaleFormat, kernel: KernelName) -> SquaresByGroup:
        """This rank's part of `quantization_error.weight_error`."""
        own = ((n, w) for n, w in self.for_refit() if self.layout.writes(n) and not isinstance(w, BlockScaled))
        return summed([weight_squares(own, fp8_layers, scale_format, kernel), self._squares_of_fp8()])

    @torch.no_grad()
    def _squares_of_fp8(self) -> SquaresByGroup:
        """Squares of weights in FP8 alone: each rank takes the piece whose masters it has, so nothing is gathered."""

        def of(name: str, piece: Piece) -> SquaresByGroup:
            parameter = self.parameters[name]
            own = piece.master.to(parameter.device, parameter.dtype)
            error = squares(held(parameter).dequantize().flatten()[slice(*piece.place)] - own)
            layer = self.layout.layers[int(name.split(".")[2])]  # decoder.layers.N, counted on this rank
            return in_groups(True, layer, error, squares(own))

        own = pieces(self.model, self.optimizer).items()
        return summed(of(name, piece) for name, piece in own if is_fp8(self.parameters[name]))
