"""Deltas: made by both kernels, sent, damaged and applied. The model of a delta is a plain loop over its definition."""

import random
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_fp8rl.fp8 import BlockScaled, Delta, DeltaError, quantize_blockwise, quantize_delta
from nemo_fp8rl.fp8 import delta as wire
from nemo_fp8rl.fp8.kernels.on_cpu import numba_kernel, strips

KERNELS = pytest.mark.parametrize("kernel", ["cpu", "reference"])
BLOCKS = [(128, 128), (1, 128), (128, 1), (3, 5)]


def flat(data: Tensor) -> Tensor:
    return data.view(torch.uint8).view(-1)


def entries(positions: list[int], differences: list[int]) -> list[tuple[int, int]]:
    """Return (gap, difference) by the definition: a skip of more than 65535 uses entries of difference 0."""
    result, last = [], -1
    for position, difference in zip(positions, differences, strict=True):
        skip = position - last - 1
        while skip > 65535:
            result.append((65535, 0))
            skip -= 65536
        result.append((skip, difference))
        last = position
    return result


def entries_of(delta: Delta) -> list[tuple[int, int]]:
    return list(zip(delta.gaps.tolist(), delta.differences.tolist(), strict=True))


def matrix(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def base_of(new: Tensor, positions: list[int], differences: list[int]) -> Tensor:
    """Return the bytes before `positions` changed by `differences`."""
    base = new.clone()
    flat(base)[torch.tensor(positions, dtype=torch.int64)] -= torch.tensor(differences, dtype=torch.uint8)
    return base


@contextmanager
def divided_work(
    threads: int = 1, values: int = strips.PIECE_VALUES, chunk: int = numba_kernel.CHUNK_ENTRIES
) -> Iterator[None]:
    """Run `cpu` with this number of threads, small pieces, and buffers for few entries."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    small = {"PIECE_VALUES": values, "THREAD_VALUES": min(values, strips.THREAD_VALUES)}
    try:
        with mock.patch.multiple(strips, **small), mock.patch.object(numba_kernel, "CHUNK_ENTRIES", chunk):
            yield
    finally:
        torch.set_num_threads(before)


def assert_delta_is(
    x: Tensor, positions: list[int], kernel: str, *, block: tuple[int, int] = (128, 128), **cutting: int
) -> None:
    """Change these bytes of x's base; the delta must list exactly them, or be None if they are too many."""
    generator = random.Random(len(positions))
    differences = [generator.randint(1, 255) for _ in positions]
    expected = quantize_blockwise(x, block=block, kernel="reference")
    base = base_of(expected.data, positions, differences)
    before = base.clone()
    with divided_work(**cutting):
        new, delta = quantize_delta(x, base, block=block, kernel=kernel)
        out = BlockScaled(base.clone(), torch.empty_like(new.scale_inv), block)
        in_place, same = quantize_delta(x, out.data, block=block, kernel=kernel, out=out)
    for made in (new, in_place):
        assert torch.equal(flat(made.data), flat(expected.data))
        assert torch.equal(made.scale_inv, expected.scale_inv)
    assert torch.equal(flat(base), flat(before))
    if len(positions) * 8 > x.numel():
        assert delta is same is None
        return
    assert torch.equal(same.gaps, delta.gaps)
    assert torch.equal(same.differences, delta.differences)
    assert delta is not None
    assert delta.numel == x.numel()
    assert delta.changed_bytes == len(positions)
    assert (delta.gaps.dtype, delta.differences.dtype) == (torch.uint16, torch.uint8)
    assert entries_of(delta) == entries(positions, differences)
    delta.apply_(base)
    assert torch.equal(flat(base), flat(new.data))


@st.composite
def changes(draw: st.DrawFn) -> tuple[Tensor, list[int]]:
    """A matrix or a stack of them, and the places that change: none, few, or around and above the limit."""
    experts = draw(st.sampled_from([(), (), (1,), (3,)]))
    widths = st.one_of(st.integers(0, 9), st.sampled_from([63, 64, 65, 128, 130, 200, 256, 513]))
    x = matrix((*experts, draw(widths), draw(widths)), seed=draw(st.integers(0, 100)))
    if draw(st.booleans()):
        x = x.transpose(-1, -2)
    limit = x.numel() // 8
    number = draw(st.one_of(st.integers(0, min(limit, 20)), st.sampled_from([limit, limit + 1, x.numel()])))
    rng = random.Random(draw(st.integers(0, 2**32)))
    return x, sorted(rng.sample(range(x.numel()), min(number, x.numel())))


@settings(deadline=None, max_examples=200)
@given(
    changes(),
    st.sampled_from(BLOCKS),
    st.integers(1, 3),
    st.sampled_from([1, 300, strips.PIECE_VALUES]),
    st.sampled_from([1, 40, numba_kernel.CHUNK_ENTRIES]),
)
def test_the_delta_of_cpu_lists_exactly_the_changes_for_any_division(change, block, threads, values, chunk):
    assert_delta_is(*change, "cpu", block=block, threads=threads, values=values, chunk=chunk)


@settings(deadline=None, max_examples=50)
@given(changes(), st.sampled_from(BLOCKS))
def test_the_delta_of_reference_lists_exactly_the_changes(change, block):
    assert_delta_is(*change, "reference", block=block)


@settings(deadline=None, max_examples=50)
@given(changes(), st.integers(1, 2))
def test_both_kernels_and_a_comparison_of_bytes_give_one_delta(change, threads):
    x, positions = change
    expected = quantize_blockwise(x)
    base = base_of(expected.data, positions, [1] * len(positions))
    between = Delta.between(base, expected.data)
    with divided_work(threads, values=100):
        deltas = [quantize_delta(x, base, kernel=kernel)[1] for kernel in ("cpu", "reference")]
    for delta in deltas:
        assert (delta is None) == (between is None)
        if delta is not None and between is not None:
            assert entries_of(delta) == entries_of(between)


@KERNELS
@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_delta_of_two_steps_leads_from_one_version_to_the_next(dtype, scale_format, kernel):
    old = torch.randn(200, 300, generator=torch.Generator().manual_seed(1))
    moved = old + 0.002 * torch.randn(200, 300, generator=torch.Generator().manual_seed(2))
    how = {"scale_format": scale_format, "kernel": kernel}
    base = quantize_blockwise(old.to(dtype), **how).data
    new, delta = quantize_delta(moved.to(dtype), base, **how)
    expected = quantize_blockwise(moved.to(dtype), **how)
    assert torch.equal(flat(new.data), flat(expected.data))
    assert torch.equal(new.scale_inv, expected.scale_inv)
    assert 100 < delta.changed_bytes == (flat(base) != flat(new.data)).sum()
    delta.apply_(base)
    assert torch.equal(flat(base), flat(new.data))


GAPS = [
    [65534], [65535], [65536], [65537], [131071], [131072], [131073],
    [0, 65535], [0, 65536], [65535, 65535], [65536, 65536], [65536, 0, 131072], [3, 196607], [1, 2, 196608],
]  # fmt: skip
"""Numbers of bytes skipped before each change."""


@pytest.mark.parametrize(
    ("kernel", "shape", "cutting"),
    [
        ("reference", (3, 70_001), {"block": (1, 128)}),
        ("cpu", (1, 210_000), {"block": (1, 128)}),
        ("cpu", (3, 70_001), {"block": (3, 5), "chunk": 1}),
        ("cpu", (210, 1001), {"chunk": 1}),
        ("cpu", (210, 1001), {"threads": 2, "values": 50_000}),
        ("cpu", (2, 105, 1001), {"threads": 3, "values": 5000, "chunk": 1}),
    ],
)
def test_gaps_of_more_than_65535_bytes_are_spanned_exactly(kernel, shape, cutting):
    x = matrix(shape)
    for gaps in GAPS:
        positions = list(np.cumsum(np.array(gaps) + 1) - 1)
        assert_delta_is(x, [int(p) for p in positions], kernel, **cutting)


@KERNELS
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_gap_may_span_the_shares_of_several_threads(threads, kernel):
    x = matrix((300, 1000))
    last = x.numel() - 1
    for positions in ([0], [last], [0, last], [0, 1, last - 1, last], [150_000], [99_999, 100_000, 200_000], []):
        assert_delta_is(x, positions, kernel, threads=threads, values=2000)


@KERNELS
@pytest.mark.parametrize("shape", [(1, 7), (1, 8), (3, 3), (1, 15), (4, 4), (1, 17), (130, 65), (2, 33, 50)])
def test_a_delta_lists_at_most_an_eighth_of_the_bytes(shape, kernel):
    x = matrix(shape)
    assert wire.MAX_CHANGED == 1 / 8
    limit, everywhere = x.numel() // 8, list(range(x.numel()))
    for cutting in ({}, {"threads": 3, "values": 200, "chunk": 1}):
        for positions in (everywhere[:limit], everywhere[-limit:], everywhere[::8][:limit]):
            assert_delta_is(x, positions if limit else [], kernel, **cutting)
        for positions in (everywhere[: limit + 1], everywhere[-limit - 1 :], everywhere[::7][: limit + 1], everywhere):
            assert len(positions) > limit
            assert_delta_is(x, positions, kernel, **cutting)


def test_large_tensors_give_the_same_delta_for_any_number_of_threads():
    x = matrix((2100, 1101))
    positions = sorted(random.Random(0).sample(range(x.numel()), 150_000))  # more than CHUNK_ENTRIES
    for threads in (1, 2, 3):
        assert_delta_is(x, positions, "cpu", threads=threads, values=x.numel() // 2)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("offset", [1, 4])
@pytest.mark.parametrize("width", [384, 200])
def test_bytes_at_any_offset_in_memory_are_compared(offset, width, kernel):
    x = matrix((256, width))
    positions = sorted(random.Random(offset).sample(range(x.numel()), 1000))
    expected = quantize_blockwise(x, kernel="reference")
    stored = torch.empty(x.numel() + offset, dtype=torch.uint8)[offset:].view(x.shape).view(expected.data.dtype)
    stored.copy_(base_of(expected.data, positions, [3] * len(positions)))
    out = BlockScaled(stored, torch.empty_like(expected.scale_inv), (128, 128))
    delta = quantize_delta(x, stored, kernel=kernel, out=out)[1]
    assert entries_of(delta) == entries(positions, [3] * len(positions))
    assert torch.equal(flat(stored), flat(expected.data))


@settings(deadline=None)
@given(st.binary(max_size=200), st.sets(st.integers(0, 199), max_size=20), st.integers(0, 9), st.integers(0, 9))
def test_the_comparison_finds_each_byte_wherever_the_two_begin(content, places, a, b):
    old = torch.tensor([0] * a + list(content), dtype=torch.uint8)[a:]
    new = torch.tensor([0] * b + list(content), dtype=torch.uint8)[b:]
    positions = sorted(place for place in places if place < len(content))
    new[positions] += 7
    delta = Delta.between(old, new)
    if len(positions) > len(content) / 8:
        assert delta is None
    else:
        assert entries_of(delta) == entries(positions, [7] * len(positions))


def test_rows_wider_than_the_buffer_of_entries_are_listed_too():
    x = matrix((1, 3 * 65536 - 1))
    calls, real = [], numba_kernel.loops.quantize_delta

    def counted(*arguments: object) -> int:
        calls.append(0)
        assert len(calls) < 10, "the loop does not get on"
        return real(*arguments)

    with mock.patch.object(numba_kernel.loops, "quantize_delta", counted):
        assert_delta_is(x, [x.numel() - 1], "cpu")


def test_an_rl_step_is_sent_in_less_than_0_7_percent_of_its_bytes():
    generator = torch.Generator().manual_seed(0)
    master = 0.02 * torch.randn(2048, 2048, generator=generator)
    moved = master + 1e-6 * (torch.randint(0, 2, master.shape, generator=generator) * 2 - 1)
    base = quantize_blockwise(master.bfloat16()).data
    new, delta = quantize_delta(moved.bfloat16(), base)
    assert delta.changed_bytes > 0.001 * master.numel()
    assert len(delta.encode()) <= 0.007 * master.numel()
    delta.apply_(base)
    assert torch.equal(flat(base), flat(new.data))


def decode(message: bytes, numel: int) -> Delta:
    """Decode a message for a tensor of numel bytes."""
    return Delta.decode(message, numel)


def receive(message: bytes, data: Tensor) -> None:
    """Decode and apply a message, as the receiver of a refit does."""
    decode(message, data.numel()).apply_(data)


def packed(numel: int, entries: int, frames: list[bytes], magic: bytes = b"FP8D") -> bytes:
    """A message with a correct checksum, whatever it holds."""
    message = struct.pack("<4sQQQQQ", magic, numel, entries, *map(len, frames)) + b"".join(frames)
    return message + struct.pack("<I", zlib.crc32(message))


def compress(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(content)


def streams(gaps: list[int], differences: list[int]) -> list[bytes]:
    contents = bytes(gap & 255 for gap in gaps), bytes(gap >> 8 for gap in gaps), bytes(differences)
    return [compress(content) for content in contents]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 200_000), st.integers(1, 255)), max_size=50), st.integers(0, 100))
def test_a_delta_comes_back_from_the_wire_as_it_was(steps, rest):
    positions = np.cumsum([step for step, _ in steps]) - 1 if steps else np.empty(0, int)
    numel = max(int(positions[-1]) + 1 if steps else 0, 8 * len(steps)) + rest
    differences = torch.tensor([difference for _, difference in steps], dtype=torch.uint8)
    delta = Delta.from_positions(torch.from_numpy(positions), differences, numel)
    assert entries_of(delta) == entries(positions.tolist(), differences.tolist())
    message = delta.encode()
    back = decode(message, numel)
    assert back.numel == numel
    assert entries_of(back) == entries_of(delta)
    assert back.changed_bytes == len(steps)
    assert back.encode() == message
    assert entries_of(decode(memoryview(message), numel)) == entries_of(delta)


def test_the_longest_delta_comes_back_from_the_wire():
    numel = 800_000
    positions = torch.cat([torch.arange(numel // 8 - 1), torch.tensor([numel - 1])])
    delta = Delta.from_positions(positions, torch.ones(numel // 8).byte(), numel)
    assert len(delta.gaps) == numel // 8 + 700_000 // 65536
    assert decode(delta.encode(), numel).changed_bytes == numel // 8


def test_the_wire_format_is_what_the_module_says():
    delta = Delta(200_000, torch.tensor([1, 65535, 515], dtype=torch.uint16), torch.tensor([7, 0, 255]).byte())
    message = delta.encode()
    magic, numel, number, *lengths = struct.unpack("<4sQQQQQ", message[:44])
    assert (magic, numel, number) == (b"FP8D", 200_000, 3)
    assert message[-4:] == struct.pack("<I", zlib.crc32(message[:-4]))
    ends = np.cumsum([44, *lengths])
    assert ends[-1] == len(message) - 4
    contents = [zstandard.decompress(message[a:b]) for a, b in pairwise(ends)]
    assert contents == [bytes([1, 255, 3]), bytes([0, 255, 2]), bytes([7, 0, 255])]
    assert message == packed(200_000, 3, streams([1, 65535, 515], [7, 0, 255]))


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 40), st.lists(st.integers(0, 255), min_size=1, max_size=500))
def test_applying_in_parts_writes_every_byte_once(at_once, values):
    new = torch.tensor(values, dtype=torch.uint8)
    old = new.clone()
    positions = torch.arange(0, len(values), 3)
    differences = (positions % 255 + 1).byte()
    old[positions] -= differences
    with mock.patch.object(wire, "APPLY_CHUNK", at_once):
        Delta.from_positions(positions, differences, len(values)).apply_(old)
    assert torch.equal(old, new)


def test_a_delta_without_changes_leaves_the_bytes_as_they_were():
    data = torch.arange(12, dtype=torch.uint8).view(3, 4)
    receive(Delta.between(data, data.clone()).encode(), data)
    assert data.flatten().tolist() == list(range(12))
    empty = torch.empty(0, dtype=torch.uint8)
    receive(Delta.between(empty, empty).encode(), empty)


def as_delta(numel: int, gaps: list[int], differences: list[int]) -> Delta:
    return Delta(numel, torch.tensor(gaps).to(torch.uint16), torch.tensor(differences).byte())


@pytest.mark.parametrize(
    ("delta", "data", "message"),
    [
        (as_delta(10, [5, 4], [1, 1]), torch.zeros(10), "reaches byte 10 of a tensor of 10"),
        (as_delta(10, [10], [1]), torch.zeros(10), "reaches byte 10 of a tensor of 10"),
        (as_delta(10, [0, 65535], [1, 0]), torch.zeros(10), "reaches byte 65536 of a tensor of 10"),
        (as_delta(10, [0, 0], [1]), torch.zeros(10), "2 gaps has 1 differences"),
        (as_delta(10, [0, 3, 0], [1, 0, 1]), torch.zeros(10), "a change that is none"),
        (as_delta(70_000, [0, 65535], [1, 0]), torch.zeros(70_000), "a change that is none"),
        (as_delta(10, [0], [1]), torch.zeros(9), "of 10 bytes cannot be applied to a tensor of 9"),
        (as_delta(10, [0], [1]), torch.zeros(11), "of 10 bytes cannot be applied to a tensor of 11"),
        (as_delta(10, [0], [1]), torch.zeros(5, 2).t(), "contiguous FP8 bytes, not to torch.uint8 of"),
        (as_delta(10, [0], [1]), torch.zeros(10).view(torch.int32), "contiguous FP8 bytes, not to torch.int32 of"),
    ],
)
def test_a_delta_that_does_not_fit_is_refused_before_a_write(delta, data, message):
    data = data if data.dtype is torch.int32 else data.byte()
    with pytest.raises(DeltaError, match=message), mock.patch.object(wire, "APPLY_CHUNK", 1):
        delta.apply_(data)
    assert not data.any()


def test_a_delta_reaches_the_last_byte():
    data = torch.zeros(10, dtype=torch.uint8)
    as_delta(10, [5, 3], [1, 2]).apply_(data)
    assert data.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0, 2]


NEW = quantize_blockwise(matrix((40, 60)), kernel="reference").data
PLACES = [0, 1, 70, 500, 501, 2000, 2399]
BASE = base_of(NEW, PLACES, [1, 255, 1, 7, 1, 128, 1])
MESSAGE = Delta.between(BASE, NEW).encode()


def refusal(message: bytes) -> str:
    """Why a message is refused; empty if it is not. Anything but a DeltaError, or a byte written, is a failure."""
    data = BASE.clone()
    try:
        receive(message, data)
    except DeltaError as error:
        assert torch.equal(flat(data), flat(BASE))
        return str(error)
    return ""


def test_the_message_that_is_damaged_below_is_accepted():
    data = BASE.clone()
    receive(MESSAGE, data)
    assert torch.equal(flat(data), flat(NEW))
    assert refusal(MESSAGE) == ""


def test_every_flipped_bit_is_found():
    for bit in range(8 * len(MESSAGE)):
        damaged = bytearray(MESSAGE)
        damaged[bit // 8] ^= 1 << bit % 8
        assert refusal(bytes(damaged)), f"bit {bit}"


def test_every_truncation_is_found():
    for length in range(len(MESSAGE)):
        assert refusal(MESSAGE[:length])
        assert refusal(MESSAGE[len(MESSAGE) - length :])


@st.composite
def damaged(draw: st.DrawFn, message: bytes) -> bytes:
    """Some bytes overwritten, inserted or cut out."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(message)))
        inserted = draw(st.binary(max_size=12))
        dropped = draw(st.one_of(st.just(len(inserted)), st.integers(0, 20)))
        message = message[:at] + inserted + message[at + dropped :]
    return message


@settings(deadline=None, max_examples=500)
@given(st.one_of(damaged(MESSAGE), st.binary(max_size=200), st.binary(max_size=100).map(lambda some: b"FP8D" + some)))
def test_damage_on_the_way_is_always_found(message):
    assert bool(refusal(message)) == (message != MESSAGE)


@settings(deadline=None, max_examples=1000)
@given(damaged(MESSAGE[:-4]))
def test_damage_with_a_correct_checksum_is_refused_or_a_valid_delta(body):
    refusal(body + struct.pack("<I", zlib.crc32(body)))


@settings(deadline=None, max_examples=500)
@given(st.data(), st.integers(0, 2), st.integers(0, 2))
def test_damaged_frames_of_right_length_are_refused_or_a_valid_delta(data, one, other):
    frames = streams([0, 0, 68, 429, 0, 1498, 398], [1, 255, 1, 7, 1, 128, 1])
    assert refusal(packed(2400, 7, frames)) == ""
    for index in {one, other}:
        frames[index] = data.draw(damaged(frames[index]))
    refusal(packed(2400, 7, frames))


LENGTHS = st.sampled_from([0, 1, 6, 8, 2399, 2401, 2**16, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])


@settings(deadline=None, max_examples=300)
@given(st.tuples(*[st.one_of(st.none(), LENGTHS)] * 5))
def test_absurd_lengths_in_the_header_are_refused(lengths):
    fields = list(struct.unpack("<4sQQQQQ", MESSAGE[:44]))
    fields = [fields[0], *(new if new is not None else old for new, old in zip(lengths, fields[1:], strict=True))]
    body = struct.pack("<4sQQQQQ", *fields) + MESSAGE[44:-4]
    assert bool(refusal(body + struct.pack("<I", zlib.crc32(body)))) == (body != MESSAGE[:-4])


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 65535), st.integers(0, 255)), max_size=8),
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), max_size=8),
)
def test_entries_that_reach_beyond_the_tensor_are_refused(far, near):
    for made in (far, near):
        gaps, differences = [gap for gap, _ in made], [difference for _, difference in made]
        message = packed(2400, len(made), streams(gaps, differences))
        if sum(gaps) + len(gaps) > 2400:
            with pytest.raises(DeltaError, match="reaches byte"):
                decode(message, 2400)
        else:
            refusal(message)


GOOD = streams([0, 0, 68, 429, 0, 1498, 398], [1, 255, 1, 7, 1, 128, 1])


def announcing(size: int) -> bytes:
    """A zstd frame that announces any content size, with an empty last block."""
    return b"\x28\xb5\x2f\xfd" + bytes([0b11100000]) + struct.pack("<Q", size) + b"\x01\x00\x00"


UNSIZED = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(7))
SKIPPABLE = b"\x50\x2a\x4d\x18" + struct.pack("<I", 7) + bytes(7)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"", "0 bytes is cut off"),
        (MESSAGE[:47], "47 bytes is cut off"),
        (packed(2400, 7, GOOD, magic=b"FP8E"), "not a delta"),
        (packed(2400, 7, GOOD)[:-1] + b"x", "checksum differs"),
        (packed(2400, 7, GOOD)[:-4] + b"more" + bytes(4), r"announces \d+ bytes of content and has \d+ in all"),
        (packed(6, 7, GOOD), " of 6 bytes"),
        (packed(2399, 7, GOOD), " of 2399"),
        (packed(2401, 7, GOOD), "of 2401 bytes cannot be applied to a tensor of 2400"),
        (packed(2400, 6, GOOD), "announces 7 bytes instead of 6"),
        (packed(2400, 8, GOOD), "announces 7 bytes instead of 8"),
        (packed(2400, 7, [GOOD[0], GOOD[1], compress(bytes(8))]), "announces 8 bytes instead of 7"),
        (packed(2400, 7, [GOOD[0], compress(bytes(6)), GOOD[2]]), "announces 6 bytes instead of 7"),
        (packed(2400, 7, [b"", *GOOD[1:]]), "cannot be decompressed"),
        (packed(2400, 7, [GOOD[0] + b"x", *GOOD[1:]]), "cannot be decompressed"),
        (packed(2400, 7, [GOOD[0] + GOOD[0], *GOOD[1:]]), "cannot be decompressed"),
        (packed(2400, 7, [GOOD[0][:-1], *GOOD[1:]]), "cannot be decompressed"),
        (packed(2400, 7, [UNSIZED, *GOOD[1:]]), "announces .* instead of 7"),
        (packed(2**64 - 1, 2**64 - 1, [UNSIZED] * 3), "a delta"),
        (packed(2400, 7, [SKIPPABLE, *GOOD[1:]]), "cannot be decompressed"),
        (packed(2400, 7, [announcing(7), *GOOD[1:]]), "cannot be decompressed"),
        (packed(2400, 7, [announcing(2**62), *GOOD[1:]]), f"announces {2**62} bytes instead of 7"),
        (packed(2400, 2400, [announcing(2400)] * 3), "a delta"),
        (packed(2400, 2**62, [announcing(2**62)] * 3), "changes of a tensor of 2400 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} bytes",
)
def test_the_error_names_what_is_wrong_with_a_message(message, why):
    with pytest.raises(DeltaError, match=why):
        receive(message, BASE.clone())


BOMB = compress(bytes(2**26))


@pytest.mark.parametrize(
    "message",
    [
        packed(2**29, 2**26, [BOMB] * 3),
        packed(2**62, 2**62, [announcing(2**62)] * 3),
        packed(2**40, 2**40, [announcing(2**40)] * 3),
    ],
    ids=["bomb", "2^62 announced", "2^40 announced"],
)
def test_a_small_message_cannot_take_much_memory(message):
    assert len(message) < 10_000
    tracemalloc.start()
    try:
        assert refusal(message)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "message",
    [
        packed(2400, 2, streams([3, 0], [0, 1])),
        packed(2400, 2, streams([3, 0], [1, 0])),
        packed(70_000, 1, streams([65535], [0])),
        packed(2400, 301, streams([0] * 301, [1] * 301)),
    ],
    ids=["a change that is none", "one at the end", "an escape that nothing follows", "more than MAX_CHANGED"],
)
def test_what_encode_cannot_have_written_is_refused(message):
    with pytest.raises(DeltaError):
        decode(message, struct.unpack_from("<Q", message, 4)[0])
