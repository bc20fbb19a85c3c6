"""The digest of words (`refit.digest`) of many tensors in one launch, which reads every byte once.

A table on the GPU describes the tensors. A word is read at once where addresses allow it, else in parts of 4 bytes or
of one; rows of a larger tensor are read where they lie. Each program sums words in registers and adds its sum to that
of its content by one atomic addition modulo 2**64, whose order does not matter.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 1024
"""Words that a program reads at a time."""
PROGRAMS = 512
"""Most programs of a tensor: a GPU's multiprocessors are busy, and each program adds one number."""
FIELDS = 10
"""Numbers of a tensor in the table."""
MAX_STRIDED_BYTES = 1 << 31
"""Rows are found by divisions of 32 bits."""


@triton.jit
def locate(offset, run, inner, inner_stride, outer_stride, STRIDED: tl.constexpr):
    """Return the place, int64, of a byte of a tensor's contiguous bytes."""
    if STRIDED:
        short = offset.to(tl.int32)
        row = short // run
        outer = row // inner
        within = (row - outer * inner).to(tl.int64) * inner_stride + (short - row * run).to(tl.int64)
        place = outer.to(tl.int64) * outer_stride + within
    else:
        place = offset
    return place


@triton.jit
def mix(word, number, K: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Return what a word adds to the sum, uint64. word, number: uint64"""
    x = (word ^ (number * K)) * A
    x = x ^ (x >> 32)
    x = x * B
    return x ^ (x >> 29)


@triton.jit
def read_words(
    address, words, run, inner, inner_stride, outer_stride, first, UNIT: tl.constexpr, STRIDED: tl.constexpr,
    WORDS: tl.constexpr, K: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Return the sum, uint64 [WORDS], of a program's share of the whole words of a tensor, read in units of bytes."""
    total = tl.zeros([WORDS], tl.uint64)
    dtype: tl.constexpr = tl.uint64 if UNIT == 8 else (tl.uint32 if UNIT == 4 else tl.uint8)
    base = address.to(tl.pointer_type(dtype))
    for start in range(tl.program_id(0) * WORDS, words, tl.num_programs(0) * WORDS):
        index = (start + tl.arange(0, WORDS)).to(tl.int64)
        inside = index < words
        word = tl.zeros([WORDS], tl.uint64)
        for part in tl.static_range(8 // UNIT):
            place = locate(index * 8 + part * UNIT, run, inner, inner_stride, outer_stride, STRIDED)
            word |= tl.load(base + place // UNIT, mask=inside, other=0).to(tl.uint64) << (8 * UNIT * part)
        total += tl.where(inside, mix(word, index.to(tl.uint64) + first, K, A, B), 0)
    return total


@triton.jit
def sum_tensor(
    table, sums, FIELDS: tl.constexpr, WORDS: tl.constexpr, K: tl.constexpr, A: tl.constexpr, B: tl.constexpr
):
    """Add a program's share of a tensor to the sum of the content to which the tensor belongs."""
    row = table + tl.program_id(1) * FIELDS
    address, words, tail = tl.load(row), tl.load(row + 1).to(tl.int32), tl.load(row + 2)
    run, inner = tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32)
    inner_stride, outer_stride = tl.load(row + 5), tl.load(row + 6)
    unit, first, content = tl.load(row + 7), tl.load(row + 8).to(tl.uint64), tl.load(row + 9)
    if tl.program_id(0) * WORDS < words:
        total = tl.zeros([WORDS], tl.uint64)
        if inner == 0:
            total = read_words(address, words, 1, 1, 0, 0, first, 8, False, WORDS, K, A, B)
        elif unit == 8:
            total = read_words(address, words, run, inner, inner_stride, outer_stride, first, 8, True, WORDS, K, A, B)
        elif unit == 4:
            total = read_words(address, words, run, inner, inner_stride, outer_stride, first, 4, True, WORDS, K, A, B)
        else:
            total = read_words(address, words, run, inner, inner_stride, outer_stride, first, 1, True, WORDS, K, A, B)
        tl.atomic_add(sums + content, tl.sum(total, 0).to(tl.int64, bitcast=True), sem="relaxed")
    if (tl.program_id(0) == 0) & (tail > 0):
        byte = tl.arange(0, 8)
        offset = words.to(tl.int64) * 8 + byte
        if inner == 0:
            place = locate(offset, 1, 1, 0, 0, False)
        else:
            place = locate(offset, run, inner, inner_stride, outer_stride, True)
        values = tl.load(address.to(tl.pointer_type(tl.uint8)) + place, mask=byte < tail, other=0).to(tl.uint64)
        word = tl.sum(values << (8 * byte).to(tl.uint64), 0)
        last = mix(word, words.to(tl.uint64) + first, K, A, B)
        tl.atomic_add(sums + content, last.to(tl.int64, bitcast=True), sem="relaxed")


def sum_contents(contents: Sequence[Sequence[Tensor]], constants: tuple[int, int, int]) -> Tensor:
    """Return the sum of each content's words, int64 [contents], on the tensors' device, without waiting for it.

    contents:  the tensors of each content; all on one device, unchanged until the work queued now is done
    constants: K, A and B of `refit.digest`
    """
    device = contents[0][0].device
    sums = torch.zeros(len(contents), dtype=torch.int64, device=device)
    rows, copies, most_words = list[int](), list[Tensor](), 0
    for i, tensors in enumerate(contents):
        for number, tensor in enumerate(tensors):
            if tensor.numel():
                rows += (*_describe(tensor, copies), number << 40, i)
                most_words = max(most_words, tensor.nbytes // 8)
    if not rows:
        return sums
    # from memory that the GPU reads by itself: a copy from other memory may wait for the work that is queued
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    programs = min(PROGRAMS, max(1, triton.cdiv(most_words, WORDS)))
    with torch.cuda.device_of(sums):
        sum_tensor[programs, len(rows) // FIELDS](table, sums, FIELDS, WORDS, *constants, num_warps=8)
    return sums


def row_layout(tensor: Tensor) -> tuple[int, int, int, int] | None:
    """Return how the bytes of a tensor lie: (run, inner, inner stride, outer stride), all but `inner` in bytes.

    Byte b of the contiguous bytes is byte b % run of row b // run; row r begins at r // inner * outer stride +
    r % inner * inner stride. A contiguous tensor is one run, with inner 0. None: the layout has more than two steps.
    """
    if tensor.is_contiguous():
        return tensor.nbytes, 0, 0, 0
    run = tensor.element_size()
    steps: list[list[int]] = []
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        distance = stride * tensor.element_size()
        if size == 1:
            continue
        if not steps and distance == run:
            run *= size
        elif steps and distance == steps[-1][0] * steps[-1][1]:
            steps[-1][0] *= size
        else:
            steps.append([size, distance])
    if not steps:
        return run, 0, 0, 0
    if len(steps) > 2 or tensor.nbytes >= MAX_STRIDED_BYTES:
        return None
    (inner, inner_stride), (_, outer_stride) = steps[0], (steps[1] if len(steps) == 2 else (1, 0))
    return run, inner, inner_stride, outer_stride


def _describe(tensor: Tensor, copies: list[Tensor]) -> tuple[int, ...]:
    """Return the first numbers of a row of the table; a tensor of another layout is copied, and added to `copies`."""
    layout, nbytes = row_layout(tensor), tensor.nbytes
    if layout is None or (layout[1] == 0 and tensor.data_ptr() % 8 and nbytes >= MAX_STRIDED_BYTES):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        copies.append(tensor)
        layout = nbytes, 0, 0, 0
    run, inner, inner_stride, outer_stride = layout
    address = tensor.data_ptr()
    aligned = math.gcd(8, address, inner_stride, outer_stride, run if inner else 0)
    unit = aligned if aligned in (4, 8) else 1
    if unit < 8 and not inner:  # one row, which is read as rows are
        inner = 1
    return address, nbytes // 8, nbytes % 8, run, inner, inner_stride, outer_stride, unit
