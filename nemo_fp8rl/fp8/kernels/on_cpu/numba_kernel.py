"""The contract at memory speed on a CPU: `loops` does the work, here it is shared out.

Each of torch.get_num_threads() threads gets neighbouring strips (rows of blocks), counted through all matrices of a
stack. Input is read where it is, but float16 and rows that do not lie in one piece are copied, some strips at a time.
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
from nemo_fp8rl.fp8.names import Block, ScaleFormat

LARGEST = {dtype: np.float32(torch.finfo(dtype).max) for dtype in (torch.bfloat16, torch.float16, torch.float32)}
PIECE_VALUES = 1 << 20
"""Values copied at a time where x cannot be read in place."""
THREAD_VALUES = 1 << 23
"""Values below which a second thread, where waking one takes long, costs more than it brings."""
CHUNK_ENTRIES = 1 << 17
"""Entries of a delta recorded before they are put aside."""


def quantize(x: Tensor, block: Block, scale_format: ScaleFormat, data: Tensor, scale_inv: Tensor) -> None:
    """x [E, N, K] -> data, E4M3 [E, N, K], and scale_inv, float32 [E, ceil(N/b0), ceil(K/b1)]."""
    assert data.is_contiguous()
    filled = scale_inv.contiguous()

    def work(first: int, end: int) -> None:
        rule, out = _rule(x, block, scale_format), (data.view(torch.uint8).numpy(), filled.numpy())
        for readable in _readable(x, block, first, end):
            loops.quantize(*readable, *out, *rule)

    _shared_out(work, x, block)
    if filled is not scale_inv:
        scale_inv.copy_(filled)


def quantize_delta(
    x: Tensor, block: Block, scale_format: ScaleFormat, base: Tensor, data: Tensor, scale_inv: Tensor
) -> Delta | None:
    """`quantize`, and in the same pass what differs from base, E4M3 [E, N, K]; None if that is too much to list.

    Reads what `data` holds and writes where it differs, so base is best `data` itself.
    """
    assert data.is_contiguous()
    if base.data_ptr() != data.data_ptr():
        data.copy_(base)
    limit = int(MAX_CHANGED * x.numel())

    def work(first: int, end: int) -> "Recording":
        rule, out = _rule(x, block, scale_format), (data.view(torch.uint8).numpy(), scale_inv.numpy())
        recording = Recording.of(_top(x, block, first) * x.size(2), x)
        for memory, place, a, b in _readable(x, block, first, end):
            row, bottom = _top(x, block, a), _top(x, block, b)
            while row < bottom and recording.changed <= limit:
                row = loops.quantize_delta(memory, place, row, bottom, *out, *rule, *recording.arrays)
                recording.put_aside()
            if row < bottom:  # too much has changed to list it
                loops.quantize(memory, place, a, b, *out, *rule)
        return recording

    recordings = _shared_out(work, x, block)
    if sum(recording.changed for recording in recordings) > limit:
        return None
    return _joined(recordings, x.numel())


def quantize_dequantize(x: Tensor, block: Block, scale_format: ScaleFormat, dtype: torch.dtype) -> Tensor:
    """x [N, K] -> the values that `quantize` keeps, [N, K] in `dtype`: what the emulated matmuls multiply."""
    x = x[None]
    out = torch.empty(x.shape, dtype=torch.bfloat16 if dtype is torch.bfloat16 else torch.float32)

    def work(first: int, end: int) -> None:
        rule = _rule(x, block, scale_format)
        for readable in _readable(x, block, first, end):
            loops.quantize_dequantize(*readable, _bits(out), *rule)

    _shared_out(work, x, block)
    return out[0].to(dtype)


Readable = tuple[np.ndarray, tuple[int, int, int], int, int]
"""Memory, the place in it (origin, stride of matrices, of rows), first and end of the strips to be read there."""


def _readable(x: Tensor, block: Block, first: int, end: int) -> Iterator[Readable]:
    """These strips of x: where they are if each row lies in one piece, else in copies, some strips at a time."""
    (_, rows, columns), (matrix, row, column) = x.shape, x.stride()
    if column == 1 and x.dtype is not torch.float16:
        extent = 1 + (x.size(0) - 1) * matrix + (rows - 1) * row + columns - 1
        yield _bits(x.as_strided((extent,), (1,))), (0, matrix, row), first, end
        return
    while first < end:
        expert, strip = divmod(first, _strips(x, block))
        some = min(max(1, PIECE_VALUES // (block[0] * columns)), end - first, _strips(x, block) - strip)
        top = strip * block[0]
        part = x[expert, top : top + some * block[0]]
        part = part.contiguous() if x.dtype is not torch.float16 else part.float().contiguous()
        origin = -(expert * rows + top) * columns
        yield _bits(part.view(-1)), (origin, rows * columns, columns), first, first + some
        first += some


def _bits(values: Tensor) -> np.ndarray:
    """int16 for bfloat16, int32 for float32."""
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32).numpy()


def _strips(x: Tensor, block: Block) -> int:
    """The number of strips of one matrix of x [E, N, K]."""
    return -(-x.size(1) // block[0])


def _top(x: Tensor, block: Block, strip: int) -> int:
    """The first row of a strip, both counted through all matrices."""
    matrix, own = divmod(strip, _strips(x, block))
    return matrix * x.size(1) + own * block[0]


def _shared_out(work: Callable[[int, int], Any], x: Tensor, block: Block) -> list[Any]:
    """Results of `work(first, end)` on neighbouring shares of the strips, in their order."""
    strips = x.size(0) * _strips(x, block) if x.size(2) else 0
    return run_in_threads(work, strips, min(torch.get_num_threads(), 1 + x.numel() // THREAD_VALUES))


def _rule(x: Tensor, block: Block, scale_format: ScaleFormat) -> tuple[Any, ...]:
    """What the compiled code needs besides the tensors; the last two are its scratch rows, so one rule a thread."""
    k, bits = x.size(2), np.int16 if x.dtype is torch.bfloat16 else np.int32
    return *block, scale_format == "pow2", LARGEST[x.dtype], np.empty(k, bits), np.empty(k, np.float32)


@dataclass
class Recording:
    """The entries of a delta from one thread, as they come. arrays: gaps, differences, state, scratch for a row."""

    origin: int
    arrays: tuple[np.ndarray, ...]
    parts: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    @classmethod
    def of(cls, start: int, x: Tensor) -> "Recording":
        """state: flat index of the last entry; entries in the arrays; changes so far."""
        capacity = max(CHUNK_ENTRIES, x.size(2) + x.numel() // (ESCAPE + 1) + 2)
        state = np.array([start - 1, 0, 0], np.int64)
        arrays = np.empty(capacity, np.uint16), np.empty(capacity, np.uint8), state, np.empty(x.size(2), np.uint8)
        return cls(start - 1, arrays)

    @property
    def last(self) -> int:
        return int(self.arrays[2][0])

    @property
    def changed(self) -> int:
        return int(self.arrays[2][2])

    def put_aside(self) -> None:
        gaps, differences, state, _ = self.arrays
        if state[1]:
            self.parts.append((gaps[: state[1]].copy(), differences[: state[1]].copy()))
            state[1] = 0


def _joined(recordings: list[Recording], numel: int) -> Delta:
    """One delta, the same for any number of threads: each thread's first gap is counted on from the thread before."""
    all_gaps, all_differences, last = [np.empty(0, np.uint16)], [np.empty(0, np.uint8)], -1
    for recording in recordings:
        for i, (gaps, differences) in enumerate(recording.parts):
            if i == 0 and recording.origin != last:
                first = int((differences != 0).argmax())  # after entries that only skip
                at = recording.origin + int(gaps[: first + 1].sum(dtype=np.int64)) + first + 1
                escapes, gap = divmod(at - last - 1, ESCAPE + 1)
                all_gaps += [np.full(escapes, ESCAPE, np.uint16), np.array([gap], np.uint16)]
                all_differences += [np.zeros(escapes, np.uint8), differences[first : first + 1]]
                gaps, differences = gaps[first + 1 :], differences[first + 1 :]
            all_gaps.append(gaps)
            all_differences.append(differences)
        if recording.parts:
            last = recording.last
    return Delta(numel, torch.from_numpy(np.concatenate(all_gaps)), torch.from_numpy(np.concatenate(all_differences)))
