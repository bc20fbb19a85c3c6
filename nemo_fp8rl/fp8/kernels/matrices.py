"""Separate matrices that a kernel reads as one stack, wherever each of them lies.

A mixture has thousands of small matrices, such as Megatron's experts, each a parameter of its own. The table of their
addresses makes them one call of a kernel instead of one each.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


class Matrices:
    """A stack [E, N, K] of separate matrices.

    The table of addresses is made once. The memory of a tensor can move without the tensor (storages that are freed and
    allocated again), so `is_in_place` must be asked before the table is used again.

    tensors: [N, K] each, of one dtype, device, shape and strides; at least one
    Raises:  ValueError if they differ
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)
        first, *others = self.tensors
        kind = first.dtype, first.device, first.shape, first.stride()
        if first.dim() != 2 or any((x.dtype, x.device, x.shape, x.stride()) != kind for x in others):
            raise ValueError("a stack has matrices [N, K] of one dtype, device, shape and strides")
        self.dtype, self.device, self.strides = first.dtype, first.device, first.stride()
        self.shape = torch.Size((len(self.tensors), *first.shape))
        self.addresses = self._find_addresses()
        """Of the tensors' first values, in their order."""

    @cached_property
    def table(self) -> Tensor:
        """The addresses, int64 [E], on the device of the matrices."""
        return torch.tensor(self.addresses, dtype=torch.int64).to(self.device)

    @cached_property
    def host_memory(self) -> tuple[np.ndarray, np.ndarray]:
        """The memory from the first of the matrices to the last, flat, and the index at which each begins, int64 [E].

        The bits of values are int16 or int32. The columns of a matrix are neighbours.
        """
        (_, rows, columns), (row, _) = self.shape, self.strides
        start, itemsize = min(self.addresses), self.dtype.itemsize
        origins = (np.array(self.addresses) - start) // itemsize
        count = int(origins.max()) + (rows - 1) * row + columns
        return np.asarray(_Memory(start, count, itemsize)), origins

    def is_in_place(self) -> bool:
        """Return True if every matrix still is where it was when the table was made."""
        return self._find_addresses() == self.addresses

    def _find_addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.tensors]

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, i: int) -> Tensor:
        return self.tensors[i]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def dim(self) -> int:
        return 3

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def stack(self) -> Tensor:
        """Return a copy [E, N, K]."""
        return torch.stack(self.tensors)


class _Memory:
    """Memory by its address, in the form that numpy reads: int16 or int32 [count]."""

    def __init__(self, address: int, count: int, itemsize: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (count,),
            "typestr": f"<i{itemsize}",
        }


Stack = Tensor | Matrices
"""[E, N, K]: in one piece of memory, of any strides, or separate matrices."""


def as_tensor(x: Stack) -> Tensor:
    """Return the stack as one tensor; a copy of separate matrices."""
    return x.stack() if isinstance(x, Matrices) else x
