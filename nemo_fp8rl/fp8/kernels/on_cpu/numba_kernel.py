"""The `cpu` kernel: the FP8 contract at memory speed on a CPU. This module divides the work; `loops` does it.

Each of torch.get_num_threads() threads gets neighbouring strips (rows of blocks), counted through all matrices of a
stack. Input is read in place; float16, and rows that are not contiguous, are copied a few strips at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_fp8rl.fp8.delta import ESCAPE, MAX_CHANGED, Delta
from nemo_fp8rl.fp8.kernels.on_cpu import loops
from nemo_fp8rl.fp8.kernels.on_cpu.threads import run_in_threads
from nemo_fp8rl.fp8.names import Block, ScaleRule

LARGEST = {dtype: np.float32(torch.finfo(dtype).max) for dtype in (torch.bfloat16, torch.float16, torch.float32)}
RULES = {"fp32": loops.FP32, "pow2": loops.POW2, "e8m0": loops.E8M0}
PIECE_VALUES = 1 << 20
"""Values copied at a time where x cannot be read in place."""
THREAD_VALUES = 1 << 23
"""Values below which a second thread costs more than it gains, on machines where waking a thread takes long."""
CHUNK_ENTRIES = 1 << 17
"""Entries of a delta that a thread records before it stores them as a part."""


def quantize(x: Tensor, block: Block, rule: ScaleRule, data: Tensor, scale_inv: Tensor) -> None:
    """Quantize x; see `Kernel`."""
    assert data.is_contiguous()
    contiguous = scale_inv.contiguous()

    def work(first: int, end: int) -> None:
        arguments, out = _loop_arguments(x, block, rule), (data.view(torch.uint8).numpy(), contiguous.numpy())
        for strips in _views(x, block, first, end):
            loops.quantize(*strips, *out, *arguments)

    _run_on_strips(work, x, block)
    if contiguous is not scale_inv:
        scale_inv.copy_(contiguous)


def quantize_delta(
    x: Tensor, block: Block, rule: ScaleRule, base: Tensor, data: Tensor, scale_inv: Tensor
) -> Delta | None:
    """Quantize x and find the delta in the same pass; see `Kernel`.

    The loop reads `data` and writes only the bytes that differ, so `data` itself is the fastest base.
    """
    assert data.is_contiguous()
    if base.data_ptr() != data.data_ptr():
        data.copy_(base)
    limit = int(MAX_CHANGED * x.numel())

    def work(first: int, end: int) -> "Recording":
        arguments, out = _loop_arguments(x, block, rule), (data.view(torch.uint8).numpy(), scale_inv.numpy())
        recording = Recording.from_position(_first_row(x, block, first) * x.size(2), x)
        for memory, layout, a, b in _views(x, block, first, end):
            row, bottom = _first_row(x, block, a), _first_row(x, block, b)
            while row < bottom and recording.changes <= limit:
                row = loops.quantize_delta(memory, layout, row, bottom, *out, *arguments, *recording.arrays)
                recording.store_part()
            if row < bottom:  # too much differs to list it
                loops.quantize(memory, layout, a, b, *out, *arguments)
        return recording

    recordings = _run_on_strips(work, x, block)
    if sum(recording.changes for recording in recordings) > limit:
        return None
    return _join(recordings, x.numel())


def quantize_dequantize(x: Tensor, block: Block, rule: ScaleRule, dtype: torch.dtype) -> Tensor:
    """Return the values that `quantize` stores for x [N, K], as [N, K] in `dtype`."""
    x = x[None]
    out = torch.empty(x.shape, dtype=torch.bfloat16 if dtype is torch.bfloat16 else torch.float32)

    def work(first: int, end: int) -> None:
        arguments = _loop_arguments(x, block, rule)
        for strips in _views(x, block, first, end):
            loops.quantize_dequantize(*strips, _bits(out), *arguments)

    _run_on_strips(work, x, block)
    return out[0].to(dtype)


StripsView = tuple[np.ndarray, tuple[int, int, int], int, int]
"""Flat memory; the layout in it (origin, stride of matrices, stride of rows); first and end of the strips in it."""


def _views(x: Tensor, block: Block, first: int, end: int) -> Iterator[StripsView]:
    """Yield strips `first` to `end` of x: in place if each row is contiguous, else as copies of a few strips."""
    (_, rows, columns), (matrix, row, column) = x.shape, x.stride()
    if column == 1 and x.dtype is not torch.float16:
        extent = 1 + (x.size(0) - 1) * matrix + (rows - 1) * row + columns - 1
        yield _bits(x.as_strided((extent,), (1,))), (0, matrix, row), first, end
        return
    while first < end:
        expert, strip = divmod(first, _strips(x, block))
        count = min(max(1, PIECE_VALUES // (block[0] * columns)), end - first, _strips(x, block) - strip)
        top = strip * block[0]
        part = x[expert, top : top + count * block[0]]
        part = part.contiguous() if x.dtype is not torch.float16 else part.float().contiguous()
        origin = -(expert * rows + top) * columns
        yield _bits(part.view(-1)), (origin, rows * columns, columns), first, first + count
        first += count


def _bits(values: Tensor) -> np.ndarray:
    """Return the bits of the values: int16 for bfloat16, int32 for float32."""
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32).numpy()


def _strips(x: Tensor, block: Block) -> int:
    """Return the number of strips in one matrix of x [E, N, K]."""
    return -(-x.size(1) // block[0])


def _first_row(x: Tensor, block: Block, strip: int) -> int:
    """Return the first row of a strip; rows and strips are counted through all matrices."""
    matrix, strip_in_matrix = divmod(strip, _strips(x, block))
    return matrix * x.size(1) + strip_in_matrix * block[0]


def _run_on_strips(work: Callable[[int, int], Any], x: Tensor, block: Block) -> list[Any]:
    """Return the results of `work(first, end)` on neighbouring shares of all strips, in their order."""
    strips = x.size(0) * _strips(x, block) if x.size(2) else 0
    return run_in_threads(work, strips, min(torch.get_num_threads(), 1 + x.numel() // THREAD_VALUES))


def _loop_arguments(x: Tensor, block: Block, rule: ScaleRule) -> tuple[Any, ...]:
    """Return the last arguments of the loops: block, rule, largest value, and two scratch rows per thread."""
    k, bits = x.size(2), np.int16 if x.dtype is torch.bfloat16 else np.int32
    return *block, RULES[rule], LARGEST[x.dtype], np.empty(k, bits), np.empty(k, np.float32)


@dataclass
class Recording:
    """The entries of a delta that one thread finds, in their order.

    origin: flat index before the thread's first byte
    arrays: gaps, differences, state, scratch for a row, as `loops.quantize_delta` takes them. The state is int64 [3]:
            flat index of the last entry, entries in the arrays, changes so far.
    parts:  gaps and differences that are stored already
    """

    origin: int
    arrays: tuple[np.ndarray, ...]
    parts: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    @classmethod
    def from_position(cls, start: int, x: Tensor) -> "Recording":
        capacity = max(CHUNK_ENTRIES, x.size(2) + x.numel() // (ESCAPE + 1) + 2)
        state = np.array([start - 1, 0, 0], np.int64)
        arrays = np.empty(capacity, np.uint16), np.empty(capacity, np.uint8), state, np.empty(x.size(2), np.uint8)
        return cls(start - 1, arrays)

    @property
    def last(self) -> int:
        return int(self.arrays[2][0])

    @property
    def changes(self) -> int:
        return int(self.arrays[2][2])

    def store_part(self) -> None:
        gaps, differences, state, _ = self.arrays
        if state[1]:
            self.parts.append((gaps[: state[1]].copy(), differences[: state[1]].copy()))
            state[1] = 0


def _join(recordings: list[Recording], numel: int) -> Delta:
    """Join the recordings to one delta, the same for any number of threads.

    The first gap of each thread is extended to the last entry of the thread before.
    """
    all_gaps, all_differences, last = [np.empty(0, np.uint16)], [np.empty(0, np.uint8)], -1
    for recording in recordings:
        for i, (gaps, differences) in enumerate(recording.parts):
            if i == 0 and recording.origin != last:
                first = int((differences != 0).argmax())  # entries before it only skip
                position = recording.origin + int(gaps[: first + 1].sum(dtype=np.int64)) + first + 1
                escapes, gap = divmod(position - last - 1, ESCAPE + 1)
                all_gaps += [np.full(escapes, ESCAPE, np.uint16), np.array([gap], np.uint16)]
                all_differences += [np.zeros(escapes, np.uint8), differences[first : first + 1]]
                gaps, differences = gaps[first + 1 :], differences[first + 1 :]
            all_gaps.append(gaps)
            all_differences.append(differences)
        if recording.parts:
            last = recording.last
    return Delta(numel, torch.from_numpy(np.concatenate(all_gaps)), torch.from_numpy(np.concatenate(all_differences)))
