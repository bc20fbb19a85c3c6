"""The contract at memory speed on a CPU: `loops` does the work, here it is cut into pieces and shared out.

A piece is some whole strips of one matrix; neighbouring pieces go to the same one of torch.get_num_threads() threads.
Only strided and float16 input is copied, a piece at a time.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_fp8rl.fp8.delta import ESCAPE, MAX_CHANGED, Delta
from nemo_fp8rl.fp8.format import Block, ScaleFormat
from nemo_fp8rl.fp8.kernels import loops

PIECE_VALUES = 1 << 20
"""Values to a call of the compiled code where strips are low (1x128 blocks), so that the call itself costs nothing."""
THREAD_VALUES = 1 << 20
"""Values below which a second thread costs more than it brings."""
CHUNK_ENTRIES = 1 << 17
"""Entries of a delta recorded before they are put aside."""


def quantize(x: Tensor, block: Block, scale_format: ScaleFormat, data: Tensor, scale_inv: Tensor) -> None:
    """x [E, N, K] -> data, E4M3 [E, N, K], and scale_inv, float32 [E, ceil(N/b0), ceil(K/b1)]."""

    def work(pieces: list["Piece"]) -> None:
        rule = _rule(x, block, scale_format)
        for piece in pieces:
            loops.quantize(piece.values(x), piece.bytes(data), piece.scales(scale_inv), *rule)

    _in_threads(work, _pieces(x, block), x.numel())


def quantize_delta(
    x: Tensor, block: Block, scale_format: ScaleFormat, base: Tensor, data: Tensor, scale_inv: Tensor
) -> Delta | None:
    """`quantize`, and in the same pass what differs from base, E4M3 [E, N, K]; None if that is too much to list."""
    limit = int(MAX_CHANGED * x.numel())

    def work(pieces: list["Piece"]) -> "Recording":
        rule, recording = _rule(x, block, scale_format), Recording.of(pieces[0].start(x), x)
        for piece in pieces:
            values, new, scales, row = piece.values(x), piece.bytes(data), piece.scales(scale_inv), 0
            while row < len(values) and recording.changed <= limit:
                row = loops.quantize_delta(
                    values, new, scales, *rule, piece.bytes(base), row, piece.start(x), *recording.arrays
                )
                recording.put_aside()
            if row < len(values):  # too much has changed to list it
                loops.quantize(values, new, scales, *rule)
        return recording

    recordings = _in_threads(work, _pieces(x, block), x.numel())
    if sum(recording.changed for recording in recordings) > limit:
        return None
    return _joined(recordings, x.numel())


def quantize_dequantize(x: Tensor, block: Block, scale_format: ScaleFormat, dtype: torch.dtype) -> Tensor:
    """x [N, K] -> the values that `quantize` keeps, [N, K] in `dtype`: what the emulated matmuls multiply."""
    x = x[None]
    out = torch.empty(x.shape, dtype=torch.bfloat16 if dtype is torch.bfloat16 else torch.float32)

    def work(pieces: list["Piece"]) -> None:
        rule = _rule(x, block, scale_format)
        for piece in pieces:
            loops.quantize_dequantize(piece.values(x), piece.values(out), *rule)

    _in_threads(work, _pieces(x, block), x.numel())
    return out[0].to(dtype)


@dataclass(frozen=True)
class Piece:
    """Whole strips of one matrix: what one call of the compiled code takes."""

    expert: int
    rows: slice
    strips: slice

    def start(self, x: Tensor) -> int:
        """Flat index of the first value."""
        return (self.expert * x.size(1) + self.rows.start) * x.size(2)

    def values(self, x: Tensor) -> np.ndarray:
        """Bits of the values [rows, K]: int16 for bfloat16, int32 for float32 and for float16 made float32."""
        part = x[self.expert, self.rows]
        part = part.contiguous() if x.dtype is not torch.float16 else part.float().contiguous()
        return part.view(torch.int16 if part.element_size() == 2 else torch.int32).numpy()

    def bytes(self, data: Tensor) -> np.ndarray:
        return data[self.expert, self.rows].view(torch.uint8).numpy()

    def scales(self, scale_inv: Tensor) -> np.ndarray:
        return scale_inv[self.expert, self.strips].numpy()


def _pieces(x: Tensor, block: Block) -> list[Piece]:
    experts, n, k = x.shape
    high = block[0] * max(1, PIECE_VALUES // (block[0] * max(1, k)))
    return [
        Piece(expert, slice(top, min(n, top + high)), slice(top // block[0], -(-min(n, top + high) // block[0])))
        for expert in range(experts if k else 0)
        for top in range(0, n, high)
    ]


def _in_threads(work: Callable[[list[Piece]], Any], pieces: list[Piece], values: int) -> list[Any]:
    """Results of `work` on neighbouring shares of the pieces, in their order."""
    threads = min(torch.get_num_threads(), len(pieces), 1 + values // THREAD_VALUES)
    if threads <= 1:
        return [work(pieces)] if pieces else []
    ends = [len(pieces) * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, [pieces[a:b] for a, b in pairwise(ends)]))


def _rule(x: Tensor, block: Block, scale_format: ScaleFormat) -> tuple[Any, ...]:
    """What the compiled code needs besides the tensors; the last two are its scratch rows, so one rule a thread."""
    k, bits = x.size(2), np.int16 if x.dtype is torch.bfloat16 else np.int32
    largest = np.float32(torch.finfo(x.dtype).max)
    return *block, scale_format == "pow2", largest, np.empty(k, bits), np.empty(k, np.float32)


@dataclass
class Recording:
    """The entries of a delta from one thread, as they come. arrays: gaps, differences, state, a row of differences."""

    origin: int
    arrays: tuple[np.ndarray, ...]
    parts: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    @classmethod
    def of(cls, start: int, x: Tensor) -> "Recording":
        """state: flat index of the last entry; entries in the arrays; changes so far."""
        capacity = max(CHUNK_ENTRIES, x.size(2) + x.numel() // (ESCAPE + 1) + 2)
        state = np.array([start - 1, 0, 0], np.int64)
        row = np.zeros(-(-x.size(2) // 64) * 64, np.uint8)
        return cls(start - 1, (np.empty(capacity, np.uint16), np.empty(capacity, np.uint8), state, row))

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
            if i == 0:
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
