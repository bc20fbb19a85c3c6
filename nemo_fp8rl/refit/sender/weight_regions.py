"""Cuts the region of a piece out of a rank's weight, which may be quantized already, or a stack of matrices."""

from dataclasses import replace

import torch
from torch import Tensor

from nemo_fp8rl.common.region import Region
from nemo_fp8rl.fp8 import BlockScaled, scale_shape
from nemo_fp8rl.refit.expert_stacks import Matrix
from nemo_fp8rl.refit.manifest import TensorPart, blocks_of
from nemo_fp8rl.refit.message import Content


def cut_matrix(weight: Matrix, part: TensorPart, region: Region) -> Matrix:
    """Return the region of a rank's weight; of a stack, a stack where the region consists of whole matrices.

    weight: the values of `part`: a tensor of the part's size, or a stack [count, rows, K] of the matrices that lie one
            below the other in it
    """
    if isinstance(weight, BlockScaled):
        assert part.format is not None
        shape, blocks = scale_shape(part.shape, weight.block), blocks_of(part.region, weight.format)
        scales = TensorPart.of(part.name, torch.float32, shape, blocks)
        data = TensorPart.of(part.name, weight.dtype, part.format.data_shape(part.shape), _in_bytes(part.region, part))
        return replace(
            weight,
            data=_cut_tensor(weight.data, data, _in_bytes(region, part), weight.block[0]),
            scale_inv=_cut_tensor(weight.scale_inv, scales, blocks_of(region, weight.format), 1),
        )
    return _cut_tensor(weight, part, region, part.format.weight_block[0] if part.format else 1)


def _in_bytes(region: Region, part: TensorPart) -> Region:
    """Return the region of a quantized part's bytes, which may hold two values each."""
    assert part.format is not None
    *rows, (first, end) = region
    return (*rows, (first // part.format.values_per_byte, end // part.format.values_per_byte))


def _cut_tensor(weight: Tensor, part: TensorPart, region: Region, block: int) -> Tensor:
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


def as_block_scaled(shape: tuple[int, ...], part: TensorPart, content: Content) -> BlockScaled:
    """Return views of the content of a quantized piece for values of `shape`, which may be a stack.

    The global scale of a stack is no view, because each of its matrices needs memory of its own.
    """
    whole = content.as_block_scaled(part)
    if len(shape) == content.data.dim():
        return whole
    scales = whole.scale_inv.view(scale_shape(shape, whole.block))
    global_scale = None if whole.global_scale is None else whole.global_scale.repeat(shape[0])
    return replace(
        whole, data=whole.data.view(whole.format.data_shape(shape)), scale_inv=scales, global_scale=global_scale
    )
