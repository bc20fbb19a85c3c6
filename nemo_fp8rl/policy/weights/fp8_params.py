"""Parameters that exist only in FP8 (`nemo_fp8rl.fp8_param`, on a GPU): Transformer Engine's blockwise tensors.

Their bytes equal those of bfloat16 weights that are quantized in every pass, because Transformer Engine rounds the
float32 master to bfloat16 before it quantizes it (pytorch/tensor/utils.py, `quantize_master_weights`). So a pass
quantizes no weight, data-parallel ranks gather half of the bytes, and a refit sends the bytes that the GEMMs read.

A parameter has two forms: rows for the forward, and columns for the gradient of the input. With 128x128 blocks the
columns are the transpose of the rows.
"""

from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.fp8 import BLOCK, BlockScaled
from nemo_fp8rl.fp8.block_scaled import E4M3


def is_fp8(parameter: Tensor) -> bool:
    return hasattr(parameter, "_rowwise_data")


def fp8_view(parameter: Any) -> BlockScaled:
    """Return views of an FP8 parameter's bytes [N, K] and scales."""
    columns = -(-parameter.size(1) // BLOCK[1])  # Transformer Engine pads the scales
    return BlockScaled(parameter._rowwise_data.view(E4M3), parameter._rowwise_scale_inv[:, :columns], BLOCK)


def storage_tensors(parameter: Any) -> list[Tensor]:
    """Return the plain tensors of a parameter, which can be copied and written in place."""
    columns = [parameter._columnwise_data, parameter._columnwise_scale_inv] if is_fp8(parameter) else []
    return row_tensors(parameter) + columns


def row_tensors(parameter: Any) -> list[Tensor]:
    """Return `storage_tensors` without columns."""
    return [parameter._rowwise_data, parameter._rowwise_scale_inv] if is_fp8(parameter) else [parameter.detach()]


@torch.no_grad()
def assign(parameter: Any, values: Tensor) -> None:
    """Set a parameter to the values.

    An FP8 parameter whose master does not exist yet also stores the values, from which the master is made.
    """
    assert values.shape == parameter.shape, f"{tuple(values.shape)} for a parameter {tuple(parameter.shape)}"
    parameter.copy_(values.to(parameter.dtype))  # in FP8 this quantizes
    initial = parameter.get_high_precision_init_val() if hasattr(parameter, "get_high_precision_init_val") else None
    if initial is not None:
        initial.copy_(values)


def freeze(parameter: Any) -> None:
    """Keep a parameter from training; an FP8 parameter forgets the values from which its master would be made."""
    parameter.requires_grad = False
    if hasattr(parameter, "clear_high_precision_init_val"):
        parameter.clear_high_precision_init_val()


def drop_columns(parameter: Any) -> int:
    """Free the columns, which `make_columns` can restore, and return their bytes."""
    if not is_fp8(parameter):
        return 0
    nbytes = parameter._columnwise_data.nbytes + parameter._columnwise_scale_inv.nbytes
    parameter.update_usage(rowwise_usage=True, columnwise_usage=False)
    return int(nbytes)


def make_columns(parameter: Any) -> None:
    if is_fp8(parameter):
        parameter.update_usage(rowwise_usage=True, columnwise_usage=True)
