"""The `cpu` kernel: the contract of E4M3 at memory speed on a CPU. `strips` divides the work; `loops` does it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_fp8rl.fp8.delta import ESCAPE, MAX_CHANGED, Delta
from nemo_fp8rl.fp8.kernels.matrices import Stack
from nemo_fp8rl.fp8.kernels.on_cpu import loops, scales
from nemo_fp8rl.fp8.kernels.on_cpu.strips import bits_of, first_row, run_on_strips, views
from nemo_fp8rl.fp8.names import Block, ScaleRule

LARGEST = {dtype: np.float32(torch.finfo(dtype).max) for dtype in (torch.bfloat16, torch.float16, torch.float32)}
RULES = {"fp32": scales.FP32, "pow2": scales.POW2, "e8m0": scales.E8M0}
CHUNK_ENTRIES = 1 << 17
"""Entries of a delta that a thread records before it stores them as a part."""


def quantize(x: Stack, block: Block, rule: ScaleRule, data: Tensor, scale_inv: Tensor) -> None:
    """Quantize x; see `Kernel`."""
    assert data.is_contiguous()
    contiguous = scale_inv.contiguous()

    def work(first: int, end: int) -> None:
        arguments, out = _loop_arguments(x, block, rule), (data.view(torch.uint8).numpy(), contiguous.numpy())
        for strips in views(x, block, first, end):
            loops.quantize(*strips, *out, *arguments)

    run_on_strips(work, x, block)
    if contiguous is not scale_inv:
        scale_inv.copy_(contiguous)


def quantize_delta(
    x: Stack, block: Block, rule: ScaleRule, base: Tensor, data: Tensor, scale_inv: Tensor
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
        recording = Recording.from_position(first_row(x, block, first) * x.size(2), x)
        for memory, layout, a, b in views(x, block, first, end):
            row, bottom = first_row(x, block, a), first_row(x, block, b)
            while row < bottom and recording.changes <= limit:
                row = loops.quantize_delta(memory, layout, row, bottom, *out, *arguments, *recording.arrays)
                recording.store_part()
            if row < bottom:  # too much differs to list it
                loops.quantize(memory, layout, a, b, *out, *arguments)
        return recording

    recordings = run_on_strips(work, x, block)
    if sum(recording.changes for recording in recordings) > limit:
        return None
    return _join(recordings, x.numel())


def quantize_dequantize(x: Tensor, block: Block, rule: ScaleRule, dtype: torch.dtype) -> Tensor:
    """Return the values that `quantize` stores for x [N, K], as [N, K] in `dtype`."""
    x = x[None]
    out = torch.empty(x.shape, dtype=torch.bfloat16 if dtype is torch.bfloat16 else torch.float32)

    def work(first: int, end: int) -> None:
        arguments = _loop_arguments(x, block, rule)
        for strips in views(x, block, first, end):
            loops.quantize_dequantize(*strips, bits_of(out), *arguments)

    run_on_strips(work, x, block)
    return out[0].to(dtype)


def _loop_arguments(x: Stack, block: Block, rule: ScaleRule) -> tuple[Any, ...]:
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
    def from_position(cls, start: int, x: Stack) -> "Recording":
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
