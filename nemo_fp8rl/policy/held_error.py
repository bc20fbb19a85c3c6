"""How far weights that are held in FP8 alone are from the bfloat16 ones that their bytes were made of."""

from typing import Any

import torch

from nemo_fp8rl.algorithms.quantization_error import SquaresByGroup, squares, summed
from nemo_fp8rl.policy.layout import Layout
from nemo_fp8rl.policy.optimizer_state import Piece, pieces
from nemo_fp8rl.policy.primary_weights import held, is_fp8


@torch.no_grad()
def held_squares(layout: Layout, model: torch.nn.Module, optimizer: Any) -> SquaresByGroup:
    """As `weight_squares` of all others: each rank of the piece whose masters it has, so that nothing is gathered."""
    parameters = dict(model.named_parameters())

    def of(name: str, piece: Piece) -> SquaresByGroup:
        parameter = parameters[name]
        own = piece.master.to(parameter.device, parameter.dtype)
        error = squares(held(parameter).dequantize().flatten()[slice(*piece.place)] - own)
        layer = layout.layers[int(name.split(".")[2])]  # decoder.layers.N, counted on this rank
        return dict.fromkeys(("fp8", f"layer_{layer}"), (error, squares(own)))

    return summed(of(name, piece) for name, piece in pieces(model, optimizer).items() if is_fp8(parameters[name]))
