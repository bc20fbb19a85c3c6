"""Cuts the region of a piece out of a rank's weight, which may be FP8 already, or a stack of matrices."""

import torch
from torch import Tensor

from nemo_fp8rl.common.region import Region
from nemo_fp8rl.fp8 import BLOCK, BlockScaled, scale_shape
from nemo_fp8rl.refit.manifest import TensorPart, blocks_of
from nemo_fp8rl.refit.message import Content


def cut_weight(weight: Tensor | BlockScaled, part: TensorPart, region: Region) -> Tensor | BlockScaled:
    """Return the region of a rank's weight; of a stack, a stack where the region consists of whole matrices.

    weight: the values of `part`: a tensor of the part's size, or a stack [count, rows, K] of the matrices that lie one
            below the other in it
    """
    if isinstance(weight, BlockScaled):
        scales = TensorPart.of(part.name, torch.float32, scale_shape(part.shape, BLOCK), blocks_of(part.region))
        return BlockScaled(
            _cut_tensor(weight.data, part, region), _cut_tensor(weight.scale_inv, scales, blocks_of(region), 1), BLOCK
        )
    return _cut_tensor(weight, part, region)


def _cut_tensor(weight: Tensor, part: TensorPart, region: Region, block: int = BLOCK[0]) -> Tensor:
    """block: rows of a block; a stack is returned only if its matrices consist of whole blocks."""
    is_stack = weight.dim() > len(part.size)
    has_whole_blocks = not is_stack or weight.size(1) % block == 0
    if region == part.region and has_whole_blocks:
        return weight
    index = part.local(region)
    if not is_stack:
        return weight[index]
    (rows, columns), height = index, weight.size(1)
    first, end = rows.start // height, -(-rows.stop // height)
    matrices = weight[first:end, :, columns]
    if has_whole_blocks and (rows.start, rows.stop) == (first * height, end * height):
        return matrices
    return matrices.flatten(0, 1)[rows.start - first * height : rows.stop - first * height]


def as_block_scaled(values: Tensor, content: Content) -> BlockScaled:
    """Return views of the content of an FP8 piece in the shape of `values`, which may be a stack."""
    assert content.scale_inv is not None
    if values.dim() == content.data.dim():
        return BlockScaled(content.data, content.scale_inv, BLOCK)
    shape = scale_shape(values.shape, BLOCK)
    return BlockScaled(content.data.view(values.shape), content.scale_inv.view(shape), BLOCK)
