"""The delta in tiles on a CPU: what it is, and what is refused. `tests/refit/test_gpu_kernels.py` has the kernels."""

import random
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_fp8rl.fp8 import DeltaError
from nemo_fp8rl.fp8.kernels.tile_delta import TileDelta, pack
from nemo_fp8rl.fp8.kernels.tile_format import HEADER, MAGIC, MAX_BYTES, TILE, body_capacity, body_start


def versions(numel: int, share: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(old, new), uint8 [numel], of which this share differs."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randint(256, (numel,), dtype=torch.uint8, generator=generator)
    added = torch.randint(1, 256, (numel,), dtype=torch.uint8, generator=generator)
    return old, torch.where(torch.rand(numel, generator=generator) < share, old + added, old)


def message_of(numel: int, share: float = 0.01, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    old, new = versions(numel, share, seed)
    message = pack(old, new)
    assert message is not None
    return old, new, message


@given(st.sampled_from([500, TILE - 1, TILE, TILE + 1, 3 * TILE + 5]), st.sampled_from([0, 1e-3, 0.08]), st.integers(0))
@settings(max_examples=40, deadline=None)
def test_applied_to_the_old_bytes_it_gives_the_new_ones(numel, share, seed):
    old, new, message = message_of(numel, share, seed % 2**32)
    TileDelta.decode(message, numel).apply_(old)
    assert torch.equal(old, new)


def test_the_message_is_what_is_written_down():
    old, new, message = message_of(2 * TILE + 9, 0.02)
    content = message.numpy().tobytes()
    assert struct.unpack("<4sIQ", content[:16]) == (b"FP8T", 1 << 14, 2 * TILE + 9)
    body, changes, used = content[16 + 8 * 3 :], {}, 0
    for tile in range(3):
        start, count = struct.unpack_from("<II", content, 16 + 8 * tile)
        for i in range(count):
            (offset,) = struct.unpack_from("<H", body, start + 2 * i)
            changes[tile * TILE + offset] = body[start + 2 * count + i]
        used += 3 * count + count % 2
    assert used == len(body)
    assert changes == {i: int(new[i] - old[i]) for i in (old != new).nonzero()[:, 0].tolist()}


def test_of_four_in_a_thousand_bytes_it_takes_an_eightieth():
    numel = 1 << 20
    assert len(message_of(numel, 0.004)[2]) == pytest.approx(numel / 80, rel=0.03)


def test_above_an_eighth_there_is_none():
    assert pack(*versions(10 * TILE, 0.12)) is not None
    assert pack(*versions(10 * TILE, 0.13)) is None


def test_rows_of_a_larger_tensor_are_written_where_they_lie():
    old, new, message = message_of(6 * 5 * 1000)
    memory = torch.full((6, 2, 5, 1007), 77, dtype=torch.uint8)
    rows = memory[:, 1, :, 3:1003]
    rows.copy_(old.view(rows.shape))
    TileDelta.decode(message, old.numel()).apply_(rows)
    assert torch.equal(rows.reshape(-1), new)
    rows.fill_(77)
    assert (memory == 77).all()


def table(message: Tensor, tile: int, start: int | None = None, count: int | None = None) -> None:
    """Change a row of the table."""
    at = HEADER.size + 8 * tile
    old_start, old_count = struct.unpack("<II", message[at : at + 8].numpy().tobytes())
    row = struct.pack("<ii", old_start if start is None else start, old_count if count is None else count)
    message[at : at + 8] = torch.frombuffer(bytearray(row), dtype=torch.uint8)


def first_part(message: Tensor, numel: int) -> Tensor:
    """A view of the changes of the first tile."""
    count = struct.unpack_from("<I", message.numpy().tobytes(), HEADER.size + 4)[0]
    return message[body_start(numel) :][: 3 * count]


def swap_offsets(message: Tensor, numel: int) -> None:
    part = first_part(message, numel)
    part[:4] = part[:4].clone()[[2, 3, 0, 1]]


def leave_the_tile(message: Tensor, numel: int) -> None:
    part = first_part(message, numel)
    part[len(part) // 3 * 2 - 1] = 0x40  # the upper half of the last offset: 16384


DAMAGE = {
    "another mark": lambda message, numel: message[0].add_(1),
    "tiles of another size": lambda message, numel: message[4].add_(1),
    "bytes of another tensor": lambda message, numel: message[8].add_(1),
    "a start behind the body": lambda message, numel: table(message, 1, start=1 << 20),
    "a start before the body": lambda message, numel: table(message, 1, start=-2),
    "an odd start": lambda message, numel: table(message, 1, start=1),
    "too many changes": lambda message, numel: table(message, 1, count=TILE + 1),
    "fewer changes than none": lambda message, numel: table(message, 1, count=-1),
    "a change less": lambda message, numel: table(message, 1, count=3),
    "changes out of order": swap_offsets,
    "a change outside of its tile": leave_the_tile,
    "a change that is none": lambda message, numel: first_part(message, numel)[-1].zero_(),
}
"""Damage that a check finds on any device."""


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_message_is_refused_before_anything_is_written(damage):
    old, _, message = message_of(2 * TILE + 9)
    DAMAGE[damage](message, len(old))
    with pytest.raises(DeltaError):
        TileDelta.decode(message, len(old))


def test_parts_of_tiles_that_overlap_are_refused():
    old, _, message = message_of(4 * TILE)
    for tile in range(4):
        table(message, tile, start=0)
    with pytest.raises(DeltaError, match="each byte once"):
        TileDelta.decode(message, len(old))


@pytest.mark.parametrize("seed", range(20))
def test_no_flipped_bit_makes_it_write_outside(seed):
    """A difference of another value is the digest's to find."""
    rng = random.Random(seed)
    old, _, message = message_of(2 * TILE + 9)
    message[rng.randrange(len(message))] ^= 1 << rng.randrange(8)
    memory = torch.full((len(old) + 200,), 5, dtype=torch.uint8)
    memory[100:-100] = old
    try:
        TileDelta.decode(message, len(old)).apply_(memory[100:-100])
    except DeltaError:
        assert torch.equal(memory[100:-100], old)
    assert (memory[:100] == 5).all()
    assert (memory[-100:] == 5).all()


@pytest.mark.parametrize("size", ["nothing", "no body", "a byte less", "a byte more", "above the capacity"])
def test_a_message_of_another_length_is_refused(size):
    old, _, message = message_of(3 * TILE)
    numel = len(old)
    other = {
        "nothing": message[:0],
        "no body": message[: body_start(numel) - 1],
        "a byte less": message[:-1],
        "a byte more": torch.cat([message, message[:1]]),
        "above the capacity": message.new_zeros(body_start(numel) + body_capacity(numel) + 1),
    }[size]
    with pytest.raises(DeltaError):
        TileDelta.decode(other, numel)


def test_a_delta_of_another_tensor_is_refused():
    old, _, message = message_of(3 * TILE)
    with pytest.raises(DeltaError, match="cannot be applied to a tensor of 49151"):
        TileDelta.decode(message, len(old)).apply_(old[1:])
    with pytest.raises(DeltaError, match=f"a delta of {len(old)} bytes cannot be applied"):
        TileDelta.decode(message, len(old) - 1)
    huge = HEADER.pack(MAGIC, TILE, MAX_BYTES + TILE)
    with pytest.raises(DeltaError, match="cannot be one of a tensor"):
        TileDelta.decode(torch.frombuffer(bytearray(huge), dtype=torch.uint8), MAX_BYTES + TILE)
