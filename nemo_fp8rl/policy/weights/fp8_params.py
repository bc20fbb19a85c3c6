"""Weights that a rank on a GPU holds in FP8 alone (`nemo_fp8rl.fp8_param`): Transformer Engine's blockwise tensors.

Their bytes are those of weights that are held in bfloat16 and quantized in every pass: Transformer Engine rounds the
float32 master to bfloat16 before it quantizes it (pytorch/tensor/utils.py, `quantize_master_weights`). A pass has
nothing to quantize then, data-parallel ranks gather half of the bytes, and a refit sends what the GEMMs read.

Two forms are held, rows for the forward and columns for the gradients of its input; of 128x128 blocks the second is the
transpose of the first.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.fp8 import BLOCK, BlockScaled
from nemo_fp8rl.fp8.format import E4M3
from nemo_fp8rl.policy.weights.hf_names import views_for_hf
from nemo_fp8rl.policy.weights.layout import Layout


def is_fp8(parameter: Tensor) -> bool:
    return hasattr(parameter, "_rowwise_data")


def held(parameter: Any) -> BlockScaled:
    """Views of the bytes [N, K] and scales of one."""
    columns = -(-parameter.size(1) // BLOCK[1])  # Transformer Engine pads scales
    return BlockScaled(parameter._rowwise_data.view(E4M3), parameter._rowwise_scale_inv[:, :columns], BLOCK)


def views_for_refit(layout: Layout, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor | BlockScaled]]:
    """`views_for_hf` of parameters by Megatron's names; of those in FP8 the bytes, with their scales."""
    if not any(map(is_fp8, parameters.values())):
        yield from views_for_hf(layout, lambda name: parameters[name].detach())
        return

    def data(name: str) -> Tensor:
        return held(parameters[name]).data if is_fp8(parameters[name]) else parameters[name].detach()

    def scales(name: str) -> Tensor:
        """A row of them for each row of the weight, so that they are cut as it is."""
        if not is_fp8(parameters[name]):
            return parameters[name].detach()
        return held(parameters[name]).scale_inv.repeat_interleave(BLOCK[0], 0)

    both = zip(views_for_hf(layout, data), views_for_hf(layout, scales), strict=True)
    for (name, part), (_, rows) in both:
        yield name, BlockScaled(part, rows[..., :: BLOCK[0], :], BLOCK) if part.dtype is E4M3 else part


def storage(parameter: Any) -> list[Tensor]:
    """The plain tensors that hold any parameter, to be copied and to be written in place."""
    if not is_fp8(parameter):
        return [parameter.detach()]
    of_columns = [parameter._columnwise_data, parameter._columnwise_scale_inv]
    return [parameter._rowwise_data, parameter._rowwise_scale_inv, *of_columns]


@torch.no_grad()
def assign(parameter: Any, values: Tensor) -> None:
    """Set any parameter. Of one in FP8 the master, where it is still to be made, is made from the values themselves."""
    assert values.shape == parameter.shape, f"{tuple(values.shape)} for a parameter {tuple(parameter.shape)}"
    parameter.copy_(values.to(parameter.dtype))  # from which the bytes are made
    initial = parameter.get_high_precision_init_val() if hasattr(parameter, "get_high_precision_init_val") else None
    if initial is not None:
        initial.copy_(values)


def drop_columns(parameter: Any) -> int:
    """Give back what can be made of the rows; its bytes."""
    if not is_fp8(parameter):
        return 0
    nbytes = parameter._columnwise_data.nbytes + parameter._columnwise_scale_inv.nbytes
    parameter.update_usage(rowwise_usage=True, columnwise_usage=False)
    return int(nbytes)


def make_columns(parameter: Any) -> None:
    if is_fp8(parameter):
        parameter.update_usage(rowwise_usage=True, columnwise_usage=True)
