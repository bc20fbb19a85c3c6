"""The values of a piece, cut out of a rank's weight once for many pushes.

A mixture has thousands of matrices, and what Python does for each of them in a refit takes longer than its bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor

from nemo_fp8rl.common.region import Region
from nemo_fp8rl.fp8 import BlockScaled, Matrices
from nemo_fp8rl.refit.expert_stacks import Matrix, Weight
from nemo_fp8rl.refit.manifest import TensorPart
from nemo_fp8rl.refit.sender.weight_regions import cut_matrix


@dataclass(frozen=True)
class QuantizedMatrices:
    """Separate matrices that are quantized already.

    data, scale_inv: of each matrix, as bytes where a number is one byte
    global_scale:    of each matrix, float32 []; empty where the format has none
    """

    data: list[Tensor]
    scale_inv: list[Tensor]
    global_scale: list[Tensor]

    @classmethod
    def of(cls, matrices: Sequence[BlockScaled]) -> "QuantizedMatrices":
        return cls(
            [_as_bytes(x.data) for x in matrices],
            [_as_bytes(x.scale_inv) for x in matrices],
            [x.global_scale for x in matrices if x.global_scale is not None],
        )

    @property
    def device(self) -> torch.device:
        return self.data[0].device

    def copy_to(self, out: BlockScaled) -> None:
        """Copy them into a stack of as many."""
        copy_matrices(_as_bytes(out.data), self.data)
        copy_matrices(_as_bytes(out.scale_inv), self.scale_inv)
        if out.global_scale is not None and self.global_scale:
            copy_matrices(out.global_scale, self.global_scale)


Values = Matrix | Matrices | QuantizedMatrices
"""The values of a piece: one weight, or the matrices of a piece of a stack of experts."""


class PieceCut:
    """Cuts the values of one piece.

    What was cut is returned again if the trainer hands out the very same tensors, and these are where they were: it
    consists of views of them, and of a table of their addresses. So the tensors of one push live until the next.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._addresses: list[int] = []
        self._values: Values | None = None

    def values(self, weight: Weight, part: TensorPart, region: Region) -> Values:
        """Return the region of the weight. weight, part: as in `cut_matrix`; of a stack, the matrices of experts."""
        if isinstance(weight, list):
            start = part.region[0][0]
            weight = weight[region[0][0] - start : region[0][1] - start]
        tensors = _tensors_of(weight)
        addresses = [tensor.data_ptr() for tensor in tensors]
        is_same = len(tensors) == len(self._tensors) and all(map(is_, tensors, self._tensors))
        if is_same and addresses == self._addresses and self._values is not None:
            return self._values
        values = _cut(weight, part, region)
        if _share_memory(values, tensors):
            self._tensors, self._addresses, self._values = tensors, addresses, values
        return values


def copy_matrices(out: Tensor, matrices: Sequence[Tensor]) -> None:
    """Copy separate matrices into a stack, by one launch where a GPU can."""
    torch._foreach_copy_(list(out.unbind()), list(matrices))


def _cut(weight: Weight, part: TensorPart, region: Region) -> Values:
    if not isinstance(weight, list):
        return cut_matrix(weight, part, region)
    of_part, of_region = part.matrix, region[1:]
    cuts = [cut_matrix(matrix, of_part, of_region) for matrix in weight]
    quantized = [cut for cut in cuts if isinstance(cut, BlockScaled)]
    return QuantizedMatrices.of(quantized) if quantized else Matrices([cut for cut in cuts if isinstance(cut, Tensor)])


def _tensors_of(weight: Weight | Values) -> list[Tensor]:
    if isinstance(weight, Tensor):
        return [weight]
    if isinstance(weight, BlockScaled):
        return [x for x in (weight.data, weight.scale_inv, weight.global_scale) if x is not None]
    if isinstance(weight, Matrices):
        return list(weight.tensors)
    if isinstance(weight, QuantizedMatrices):
        return [*weight.data, *weight.scale_inv, *weight.global_scale]
    if isinstance(weight[0], Tensor):
        return weight  # type: ignore[return-value]
    return [tensor for matrix in weight for tensor in _tensors_of(matrix)]


def _share_memory(values: Values, tensors: Sequence[Tensor]) -> bool:
    """Return True if the values are views of the tensors, and no copies."""
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return all(tensor.untyped_storage().data_ptr() in memory for tensor in _tensors_of(values))


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.itemsize == 1 else x
