"""The kernels of a delta in tiles (`tile_format`): pack, check and apply. A program has one tile, and waits for none.

A program that packs compares eight bytes at a time. It counts the changes of its tile, takes room in the body by one
atomic addition, and goes over the tile again, which is in the cache then, to write offsets and differences there. The
order of the tiles in the body differs from run to run; the table says it.

A check adds up, in one number, the bytes that the tiles use and FAULT for each tile that is not valid. The number
starts at minus the bytes of the body, so it is 0 for a valid message alone (but for parts of tiles that overlap, which
the digest finds); `apply_` then writes, and does nothing otherwise.

Numbers are not specialized: those of each message are others, and each new kind would compile in a refit.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_fp8rl.fp8.kernels.tile_format import (
    HEADER,
    MAGIC,
    ROW,
    TILE,
    body_capacity,
    body_start,
    tiles_of,
)
from nemo_fp8rl.fp8.kernels.triton_digest import locate, row_layout

PACK_WARPS, READ_WARPS = 8, 4
WORD = 8
"""Bytes compared at a time."""
WORDS = 32 * PACK_WARPS
"""Words of a tile packed at a time, one by each thread: more would travel between threads before they are stored."""
CHANGES = 1024
"""Changes of a tile that a program reads at a time."""
FAULT = 1 << 40
HEADER_BYTES, MAGIC_NUMBER = HEADER.size, int.from_bytes(MAGIC, "little")


@triton.jit
def read_words(data, word, numel, UNIT: tl.constexpr):
    """Return words of eight bytes, uint64, read in units of bytes; zeros behind the end."""
    if UNIT == 8:
        words = tl.load(data.to(tl.pointer_type(tl.uint64)) + word, mask=word * 8 < numel, other=0)
    else:
        words = tl.zeros_like(word).to(tl.uint64)
        for k in tl.static_range(8):
            byte = tl.load(data + word * 8 + k, mask=word * 8 + k < numel, other=0)
            words |= byte.to(tl.uint64) << (8 * k)
    return words


@triton.jit
def mark_changes(old, new):
    """Return a word with 1 in every byte in which two words differ, and 0 in the others."""
    x = old ^ new
    x = (x | (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = (x | (x >> 2)) & 0x0303030303030303
    return (x | (x >> 1)) & 0x0101010101010101


@triton.jit
def count_marks(marks):
    """Return the number of bytes that are 1 in each word, int32."""
    return ((marks * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit(do_not_specialize=["numel", "capacity"], do_not_specialize_on_alignment=["message", "used"])
def pack_tile(
    old, new, message, used, numel, capacity,
    TILE: tl.constexpr, WORDS: tl.constexpr, UNIT: tl.constexpr,
    HEADER_BYTES: tl.constexpr, ROW: tl.constexpr, MAGIC_NUMBER: tl.constexpr,
):  # fmt: skip
    """Pack the changes of one tile. used: int32 [1], the bytes of the body that are taken; above capacity none goes."""
    tile = tl.program_id(0)
    first = tile * (TILE // 8)
    every = first + tl.arange(0, TILE // 8)
    differs = mark_changes(read_words(old, every, numel, UNIT), read_words(new, every, numel, UNIT))
    count = tl.sum(count_marks(differs), 0)
    size = 3 * count + count % 2
    start = tl.atomic_add(used, size, sem="relaxed")
    row = (message + HEADER_BYTES + ROW * tile).to(tl.pointer_type(tl.int32))
    tl.store(row, start)
    tl.store(row + 1, count)
    if (count > 0) & (start + size <= capacity):
        part = message + HEADER_BYTES + ROW * tl.num_programs(0) + start
        offsets = part.to(tl.pointer_type(tl.uint16))
        packed = 0
        for step in range(0, TILE // 8, WORDS):
            word = step + tl.arange(0, WORDS)
            before = read_words(old, first + word, numel, UNIT)
            after = read_words(new, first + word, numel, UNIT)
            marks = mark_changes(before, after)
            counts = count_marks(marks)
            number = packed + tl.cumsum(counts, 0) - counts
            for k in tl.static_range(8):
                mark = ((marks >> (8 * k)) & 1).to(tl.int32)
                tl.store(offsets + number, (word * 8 + k).to(tl.uint16), mask=mark != 0)
                difference = (after >> (8 * k)).to(tl.uint8) - (before >> (8 * k)).to(tl.uint8)
                tl.store(part + 2 * count + number, difference, mask=mark != 0)
                number += mark
            packed += tl.sum(counts, 0)
        if count % 2 == 1:
            tl.store(part + 3 * count, tl.zeros([], tl.uint8))
    if tile == 0:
        head = message.to(tl.pointer_type(tl.int32))
        tl.store(head, MAGIC_NUMBER)
        tl.store(head + 1, TILE)
        tl.store(head + 2, numel)
        tl.store(head + 3, 0)


@triton.jit(do_not_specialize=["numel", "body_bytes"])
def check_tile(
    message, verdict, numel, body_bytes,
    TILE: tl.constexpr, HEADER_BYTES: tl.constexpr, ROW: tl.constexpr, MAGIC_NUMBER: tl.constexpr,
    CHANGES: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """Add to the verdict the bytes that one tile uses, or FAULT."""
    tile = tl.program_id(0)
    row = (message + HEADER_BYTES + ROW * tile).to(tl.pointer_type(tl.int32))
    start, count = tl.load(row), tl.load(row + 1)
    length = tl.minimum(TILE, numel - tile * TILE)
    size = 3 * count + count % 2
    fits = (count >= 0) & (count <= length) & (start >= 0) & (start % 2 == 0) & (start <= body_bytes - size)
    faults = (fits == 0).to(tl.int32)
    if fits:
        part = message + HEADER_BYTES + ROW * tl.num_programs(0) + start
        offsets = part.to(tl.pointer_type(tl.uint16))
        for first in range(0, count, CHANGES):
            i = first + tl.arange(0, CHANGES)
            offset = tl.load(offsets + i, mask=i < count, other=0).to(tl.int32)
            previous = tl.load(offsets + i - 1, mask=(i < count) & (i > 0), other=0).to(tl.int32)
            difference = tl.load(part + 2 * count + i, mask=i < count, other=1).to(tl.int32)
            bad = (offset >= length) | ((i > 0) & (offset <= previous)) | (difference == 0)
            faults += tl.sum((bad & (i < count)).to(tl.int32), 0)
    if tile == 0:
        head = message.to(tl.pointer_type(tl.int32))
        same = (tl.load(head) == MAGIC_NUMBER) & (tl.load(head + 1) == TILE)
        same = same & (tl.load(head + 2) == numel) & (tl.load(head + 3) == 0)
        faults += (same == 0).to(tl.int32)
    added = tl.where(fits, size, 0).to(tl.int64) + tl.where(faults > 0, FAULT, 0).to(tl.int64)
    tl.atomic_add(verdict, added, sem="relaxed")


@triton.jit(do_not_specialize=["run", "inner", "inner_stride", "outer_stride"])
def apply_tile(
    data, message, verdict, run, inner, inner_stride, outer_stride,
    TILE: tl.constexpr, HEADER_BYTES: tl.constexpr, ROW: tl.constexpr, CHANGES: tl.constexpr,
    STRIDED: tl.constexpr, IS_CHECKED: tl.constexpr,
):  # fmt: skip
    """Apply the changes of one tile to bytes that lie as `row_layout` says."""
    tile = tl.program_id(0)
    valid = True
    if not IS_CHECKED:
        valid = tl.load(verdict) == 0
    if valid:
        row = (message + HEADER_BYTES + ROW * tile).to(tl.pointer_type(tl.int32))
        start, count = tl.load(row), tl.load(row + 1)
        part = message + HEADER_BYTES + ROW * tl.num_programs(0) + start
        offsets = part.to(tl.pointer_type(tl.uint16))
        for first in range(0, count, CHANGES):
            i = first + tl.arange(0, CHANGES)
            offset = tl.load(offsets + i, mask=i < count, other=0).to(tl.int32)
            difference = tl.load(part + 2 * count + i, mask=i < count, other=0)
            place = data + locate(tile * TILE + offset, run, inner, inner_stride, outer_stride, STRIDED)
            old = tl.load(place, mask=i < count, other=0)
            tl.store(place, old + difference, mask=i < count)


def pack(old: Tensor, new: Tensor, message: Tensor, used: Tensor) -> None:
    """Pack what differs between two tensors, without waiting for the GPU.

    old, new: uint8 [numel], contiguous
    message:  output, uint8 [body_start + body_capacity], at a multiple of 8 bytes; its first body_start + used bytes
              are the message
    used:     output, int32 [1], 0 before: bytes of the body; above `body_capacity` there is no message
    """
    numel = len(old)
    unit = WORD if math.gcd(WORD, old.data_ptr(), new.data_ptr(), numel) == WORD else 1
    with torch.cuda.device_of(old):
        pack_tile[tiles_of(numel),](
            old, new, message, used, numel, body_capacity(numel), TILE, WORDS, unit, HEADER_BYTES, ROW, MAGIC_NUMBER,
            num_warps=PACK_WARPS,
        )  # fmt: skip


def check(message: Tensor, numel: int) -> Tensor:
    """Return a number, int64 [], that is 0 if the message is one for `numel` bytes, without waiting for the GPU.

    message: uint8 [bytes], at a multiple of 8 bytes, at least `body_start`
    """
    body_bytes = len(message) - body_start(numel)
    verdict = torch.full((), -body_bytes, dtype=torch.int64, device=message.device)
    if numel:
        with torch.cuda.device_of(message):
            check_tile[tiles_of(numel),](
                message, verdict, numel, body_bytes, TILE, HEADER_BYTES, ROW, MAGIC_NUMBER, CHANGES, FAULT,
                num_warps=READ_WARPS,
            )  # fmt: skip
    return verdict


def apply_(data: Tensor, message: Tensor, verdict: Tensor | None) -> None:
    """Apply a message to data if it is valid.

    data:    any dtype and strides, of the bytes for which the message is
    verdict: of `check`; None if the message is known to be valid
    """
    layout = row_layout(data)
    target = data if layout is not None else data.contiguous()
    run, inner, inner_stride, outer_stride = layout or (data.nbytes, 0, 0, 0)
    if data.numel():
        with torch.cuda.device_of(data):
            apply_tile[tiles_of(data.nbytes),](
                _first_byte(target), message, message if verdict is None else verdict,
                run, inner, inner_stride, outer_stride,
                TILE, HEADER_BYTES, ROW, CHANGES, inner > 0, verdict is None,
                num_warps=READ_WARPS,
            )  # fmt: skip
    if target is not data:
        data.copy_(target)


def _first_byte(tensor: Tensor) -> Tensor:
    """Return uint8 [1], a view of a tensor's first byte, as a pointer for a kernel."""
    first = tensor.as_strided((1,), (1,), tensor.storage_offset())
    return first.view(torch.uint8)[:1]
