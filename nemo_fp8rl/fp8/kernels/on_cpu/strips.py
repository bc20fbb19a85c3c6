"""Neighbouring strips (rows of blocks) of a stack of matrices, as the compiled loops take them, shared among threads.

Each of torch.get_num_threads() threads gets neighbouring strips, counted through all matrices of a stack. Input is read
in place, also that of separate matrices; float16, and rows that are not contiguous, are copied a few strips at a time.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_fp8rl.fp8.kernels.matrices import Matrices, Stack
from nemo_fp8rl.fp8.kernels.on_cpu.threads import run_in_threads
from nemo_fp8rl.fp8.names import Block

PIECE_VALUES = 1 << 20
"""Values copied at a time where x cannot be read in place."""
THREAD_VALUES = 1 << 23
"""Values below which a second thread costs more than it gains, on machines where waking a thread takes long."""

StripsView = tuple[np.ndarray, tuple[np.ndarray, int], int, int]
"""Flat memory; the layout in it (int64 [E], where each matrix begins; stride of rows); first and end of the strips."""


def views(x: Stack, block: Block, first: int, end: int) -> Iterator[StripsView]:
    """Yield strips `first` to `end` of x: in place if each row is contiguous, else as copies of a few strips."""
    (experts, _, columns), (row, column) = x.shape, x.strides if isinstance(x, Matrices) else x.stride()[1:]
    if column == 1 and x.dtype is not torch.float16:
        memory, origins = _memory(x, row)
        yield memory, (origins, row), first, end
        return
    while first < end:
        expert, strip = divmod(first, strips_of(x, block))
        count = min(max(1, PIECE_VALUES // (block[0] * columns)), end - first, strips_of(x, block) - strip)
        top = strip * block[0]
        part = x[expert][top : top + count * block[0]]
        part = part.contiguous() if x.dtype is not torch.float16 else part.float().contiguous()
        yield bits_of(part.view(-1)), (np.full(experts, -top * columns), columns), first, first + count
        first += count


def _memory(x: Stack, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the flat memory from the first of the matrices to the last, and where each begins in it.

    Between separate matrices there may be memory of others, or none at all, which no strip reads.

    row:  stride of rows
    """
    if isinstance(x, Matrices):
        return x.host_memory
    (experts, rows, columns), stride = x.shape, x.stride(0)
    extent = (experts - 1) * stride + (rows - 1) * row + columns
    return bits_of(x.as_strided((extent,), (1,))), np.arange(experts) * stride


def bits_of(values: Tensor) -> np.ndarray:
    """Return the bits of the values: int16 for bfloat16, int32 for float32."""
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32).numpy()


def strips_of(x: Stack, block: Block) -> int:
    """Return the number of strips in one matrix of x [E, N, K]."""
    return -(-x.size(1) // block[0])


def first_row(x: Stack, block: Block, strip: int) -> int:
    """Return the first row of a strip; rows and strips are counted through all matrices."""
    matrix, strip_in_matrix = divmod(strip, strips_of(x, block))
    return matrix * x.size(1) + strip_in_matrix * block[0]


def run_on_strips(work: Callable[[int, int], Any], x: Stack, block: Block) -> list[Any]:
    """Return the results of `work(first, end)` on neighbouring shares of all strips, in their order."""
    strips = x.size(0) * strips_of(x, block) if x.size(2) else 0
    return run_in_threads(work, strips, min(torch.get_num_threads(), 1 + x.numel() // THREAD_VALUES))
