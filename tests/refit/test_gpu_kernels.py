"""The kernels of digests and of deltas in tiles, in Triton's interpreter: against the formulas, and in a refit."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.fp8.kernels import tile_delta
from nemo_fp8rl.fp8.kernels.tile_delta import TileDelta
from nemo_fp8rl.fp8.kernels.tile_format import MAX_BYTES, ROW, TILE, body_capacity, body_start
from nemo_fp8rl.refit.digest import A, B, K, sum_words
from nemo_fp8rl.refit.message import Header, message_start
from nemo_fp8rl.refit.route_plan import align_up
from nemo_fp8rl.refit.sender import tile_deltas
from tests.fp8.test_tile_delta import DAMAGE, message_of, versions
from tests.interpreted_triton import interpret, lengthen_steps
from tests.refit.fake_gpu_reads import ScalarReads, fake_gpu_reads
from tests.refit.memory_engine import Message, bf16, fp8, random_weights, split
from tests.refit.stream import DOWN, EMBED, NORM, UP, Stream, halve_some, record_entries

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable]:
    """interpreted(function, *arguments): its result in a process whose Triton kernels run on the CPU."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=interpret) as process:
        yield lambda function, *arguments: process.submit(function, *arguments).result(timeout=600)


def layouts() -> list[tuple[Tensor, ...]]:
    """Contents of tensors of every alignment and layout: of none, of bytes, of rows of larger tensors, transposed."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(256, (3, 70, 336), dtype=torch.uint8, generator=generator)
    flat, values = data.view(-1), torch.randn(41, 33, generator=generator)
    return [
        (data,),
        (flat[1:], flat[4:1001], flat[8:], flat[3:3]),
        (flat[4 : 4 + 4 * 801].view(torch.float32), values),
        (data[:, :50],),  # rows of w13: of each expert the first
        (data[:, 20:50, 8:24],),
        (data[:, 20:50, 4:40], data[1:, ::2, 1:18]),
        (values.t(), values[3:20, 1:9], values[:1, :1]),
        (data.permute(2, 0, 1)[::3],),
        (torch.tensor(3.5), values.bfloat16()[:, 3:17]),
        (values[:0],),
        (torch.full((3000,), -1, dtype=torch.int64),),
    ]


def _sum(contents: list[tuple[Tensor, ...]]) -> list[int]:
    from nemo_fp8rl.fp8.kernels.triton_digest import sum_contents

    return sum_contents(contents, (K, A, B)).tolist()


def _sums_of_layouts() -> list[int]:
    return _sum(layouts())


def test_digests_are_those_of_the_formula(interpreted):
    assert interpreted(_sums_of_layouts) == [int(sum_words(*tensors)) for tensors in layouts()]


def test_a_digest_of_nothing_is_that_of_the_formula(interpreted):
    nothing = torch.empty(0, 3)
    assert interpreted(_sum, [(nothing,)]) == [int(sum_words(nothing))] == [0]


def _pack(old: Tensor, new: Tensor) -> tuple[Tensor, int]:
    from nemo_fp8rl.fp8.kernels import triton_tiles

    message = torch.full((body_start(len(old)) + body_capacity(len(old)),), 9, dtype=torch.uint8)
    used = torch.zeros(1, dtype=torch.int32)
    triton_tiles.pack(old, new, message, used)
    return message, int(used)


@pytest.mark.parametrize("numel", [1, 100, TILE, 2 * TILE + 777, 3 * TILE + 8])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.11])
@pytest.mark.parametrize("shift", [0, 1])
def test_what_it_packs_is_the_specifications_message(interpreted, numel, share, shift):
    """The interpreter runs the tiles in order; on a GPU the body has them in any order."""
    old, new = versions(numel + shift, share)
    message, used = interpreted(_pack, old[shift:], new[shift:])
    expected = tile_delta.pack(old[shift:], new[shift:])
    if expected is None:
        assert used > body_capacity(numel)
    else:
        assert torch.equal(message[: body_start(numel) + used], expected)


def test_above_the_capacity_nothing_is_written_behind_it(interpreted):
    old, new = versions(3 * TILE, 0.5)
    message, used = interpreted(_pack, old, new)
    assert used > body_capacity(len(old)) == len(message) - body_start(len(old))


def _check_and_apply(message: Tensor, memory: Tensor, part: tuple[slice, ...]) -> tuple[int, Tensor]:
    """(verdict, the memory afterwards) of a message for a part of this memory."""
    from nemo_fp8rl.fp8.kernels import triton_tiles

    verdict = triton_tiles.check(message, memory[part].nbytes)
    triton_tiles.apply_(memory[part], message, verdict)
    return int(verdict), memory


@pytest.mark.parametrize(
    "part",
    [
        (slice(None),),
        (slice(None), 0),
        (slice(1, 4), slice(None), slice(5, 900)),
        (slice(0, 6, 2), 0, slice(0, 1024, 3)),
    ],
    ids=["whole", "experts", "columns", "scattered"],
)
def test_it_is_applied_to_rows_of_a_larger_tensor(interpreted, part):
    memory = torch.randint(256, (6, 2, 1024), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    old = memory[part].reshape(-1)
    changed = torch.rand(old.shape, generator=torch.Generator().manual_seed(2)) < 0.02
    message = tile_delta.pack(old, old + changed.to(torch.uint8))
    expected = memory.clone()
    expected[part] += changed.view(expected[part].shape).to(torch.uint8)
    verdict, memory = interpreted(_check_and_apply, message, memory, part)
    assert verdict == 0
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("damage", DAMAGE)
def test_of_a_damaged_message_nothing_is_written(interpreted, damage):
    old, _, message = message_of(2 * TILE + 9)
    DAMAGE[damage](message, len(old))
    verdict, memory = interpreted(_check_and_apply, message, old.clone(), (slice(None),))
    assert verdict != 0
    assert torch.equal(memory, old)


# A refit whose trainer, and whose engine where `both`, believe that the host's memory is a GPU's.


PARTS = [fp8(UP, 256, 256), fp8(DOWN, 128, 384), bf16(EMBED, 100, 128), bf16(NORM, 128)]
"""The second has three scales, so that its data do not begin at a multiple of eight bytes of a piece."""


def _believe(both: bool) -> pytest.MonkeyPatch:
    from nemo_fp8rl.fp8.kernels import triton_digest, triton_tiles
    from nemo_fp8rl.refit import deferred_checks

    patch = pytest.MonkeyPatch()
    patch.setattr(triton_digest, "WORDS", triton_digest.WORDS)  # so that it comes back
    patch.setattr(triton_tiles, "WORDS", triton_tiles.WORDS)
    lengthen_steps()
    fake_gpu_reads(patch)
    patch.setattr(deferred_checks, "sum_contents", lambda contents: triton_digest.sum_contents(contents, (K, A, B)))
    patch.setattr(tile_deltas, "kernels_for", lambda tensor: triton_tiles)
    if both:
        patch.setattr(tile_delta, "kernels_for", lambda tensor: triton_tiles)
    return patch


def _refit(both: bool, share: float, from_fp8: bool = False) -> list[str]:
    """Encodings of the pieces of a second version; the third must arrive to the bit, too."""
    change, entries = record_entries()
    sources, sinks = split(PARTS, 1, 0, replicate=False), split(PARTS, 2, 1, replicate=True)
    patch = _believe(both)
    try:
        stream = Stream(sources, sinks, change=change, from_fp8=from_fp8, timeout=600.0)
        weights = random_weights(PARTS)
        stream.deliver(weights, 0, keep=True)
        entries.clear()
        weights = halve_some(weights, share)
        stream.deliver(weights, 1, delta=True, keep=True)
        encodings = [entry.encoding for _, entry in sorted(entries.items())]
        assert stream.has_weights(weights)
        weights = halve_some(weights, share, seed=1)
        stream.deliver(weights, 2, delta=True, keep=True)
        assert stream.has_weights(weights)
    finally:
        patch.undo()
    return encodings


@pytest.mark.parametrize(("both", "from_fp8"), [(False, False), (True, False), (True, True)])
def test_an_engine_gets_the_deltas_that_a_gpu_packs(interpreted, both, from_fp8):
    assert set(interpreted(_refit, both, 0.01, from_fp8)) == {"tiles", "full"}


def test_where_more_than_an_eighth_changed_all_bytes_go(interpreted):
    assert set(interpreted(_refit, True, 0.5)) == {"full"}


def _count_reads(experts: int) -> tuple[int, int]:
    """Return the numbers that each side reads for a delta of so many matrices."""
    parts = [fp8(f"experts.{i}.weight", 128, 256) for i in range(experts)]
    patch = _believe(True)
    try:
        stream, weights = Stream([parts], [parts], timeout=600.0), random_weights(parts)
        stream.deliver(weights, 0, keep=True)
        weights = halve_some(weights, 0.01)
        values = [(part.name, stream.rank_values(weights, part)) for part in parts]
        with ScalarReads() as sending:
            stream.senders[0].send(values, 1, stream.links[0], delta=True, keep=True)
        with ScalarReads() as receiving:
            stream.engine.ranks[0].load(1, True, True, lambda: None)
        assert stream.has_weights(weights)
    finally:
        patch.undo()
    return sending.count, receiving.count


def test_no_number_is_read_for_each_piece(interpreted):
    assert interpreted(_count_reads, 2) == interpreted(_count_reads, 7)


def _refusal(damage: str) -> str:
    """Return the engine's words about a delta that is damaged on its way."""

    def change(number: int, message: Message) -> list[Message]:
        at = 0
        for entry in Header.decode(message[0]).entries:
            if entry.piece == 0:
                assert entry.encoding == "tiles"
                content = message[1][at + message_start(PARTS[0]) : at + entry.nbytes]
                DAMAGE[damage](content, PARTS[0].data_bytes)
            at = align_up(at + entry.nbytes)
        return [message]

    patch = _believe(True)
    try:
        stream, weights = Stream([PARTS], [PARTS], timeout=600.0), random_weights(PARTS)
        stream.deliver(weights, 0, keep=True)
        stream.tampered[0].change = change
        return stream.refusal(halve_some(weights, 0.01), 1, delta=True, keep=True)
    finally:
        patch.undo()


@pytest.mark.parametrize("damage", ["another mark", "changes out of order", "too many changes"])
def test_a_damaged_delta_is_named_before_the_commit(interpreted, damage):
    assert interpreted(_refusal, damage) == f"refit 1: {UP}: a delta in tiles was damaged on its way"


def test_bands_too_large_for_the_kernels_go_as_a_list():
    part = bf16(EMBED, MAX_BYTES // 2 + 1)
    assert not tile_deltas.can_pack(part, torch.empty(0))


# What the kernels compile to. ptxas comes with Triton, so this needs neither a GPU nor a CUDA toolkit.

BYTES, NUMBER, WIDE = "*u8", "i32", "i64"


def kernels() -> dict[str, tuple[Any, dict[str, str], dict[str, int]]]:
    """By name: (kernel, types, constants)."""
    from nemo_fp8rl.fp8.kernels import triton_digest, triton_tiles

    frame = {"TILE": TILE, "HEADER_BYTES": triton_tiles.HEADER_BYTES, "ROW": ROW}
    mark = {"MAGIC_NUMBER": triton_tiles.MAGIC_NUMBER}
    packing = {"old": BYTES, "new": BYTES, "message": BYTES, "used": "*i32", "numel": NUMBER, "capacity": NUMBER}
    checking = {"message": BYTES, "verdict": "*i64", "numel": NUMBER, "body_bytes": NUMBER}
    layout = {"run": NUMBER, "inner": NUMBER, "inner_stride": WIDE, "outer_stride": WIDE}
    applying = {"data": BYTES, "message": BYTES, "verdict": "*i64", **layout}
    changes = {"CHANGES": triton_tiles.CHANGES}
    words = {"WORDS": triton_digest.WORDS, "FIELDS": triton_digest.FIELDS, "K": K, "A": A, "B": B}
    pack, apply_ = triton_tiles.pack_tile, triton_tiles.apply_tile
    return {
        "pack words": (pack, packing, {**frame, **mark, "WORDS": triton_tiles.WORDS, "UNIT": 8}),
        "pack bytes": (pack, packing, {**frame, **mark, "WORDS": triton_tiles.WORDS, "UNIT": 1}),
        "check": (triton_tiles.check_tile, checking, {**frame, **mark, **changes, "FAULT": triton_tiles.FAULT}),
        "apply": (apply_, applying, {**frame, **changes, "STRIDED": False, "IS_CHECKED": False}),
        "apply to rows": (apply_, applying, {**frame, **changes, "STRIDED": True, "IS_CHECKED": True}),
        "digest": (triton_digest.sum_tensor, {"table": "*i64", "sums": "*i64"}, words),
    }


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("name", ["pack words", "pack bytes", "check", "apply", "apply to rows", "digest"])
def test_it_compiles(name, arch, tmp_path: Path, monkeypatch):
    if "TRITON_INTERPRET" in os.environ:
        pytest.skip("nothing is compiled where TRITON_INTERPRET is set")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, types, constants = kernels()[name]
    signature = {argument: types.get(argument, "constexpr") for argument in kernel.arg_names}
    program = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", arch, 32))
    assert program.asm["cubin"]


def test_a_kernels_delta_is_read_by_a_cpu(interpreted):
    old, new = versions(2 * TILE + 777, 0.01)
    message, used = interpreted(_pack, old, new)
    TileDelta.decode(message[: body_start(len(old)) + used], len(old)).apply_(old)
    assert torch.equal(old, new)
