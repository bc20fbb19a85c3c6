"""Pieces that a trainer rank writes into an engine's memory: only while it loads, never where it is in use."""

import gc
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.fp8 import FP8
from nemo_fp8rl.refit.deferred_checks import DeferredChecks
from nemo_fp8rl.refit.manifest import TensorPart
from nemo_fp8rl.refit.message import Content
from nemo_fp8rl.refit.transport import double_buffer
from nemo_fp8rl.refit.transport.cuda_memory import FREE_AT_ONCE, Buckets, CudaMemory
from nemo_fp8rl.refit.transport.handshake import Listener
from nemo_fp8rl.refit.transport.link import HOST
from nemo_fp8rl.refit.transport.places import Offer, Places, read_offer
from nemo_fp8rl.refit.transport.shared_file import SharedFile, map_file
from tests.refit.memory_engine import MemoryEngine, Tampered, bf16, empty, fp8, random_weights
from tests.refit.remote_end import RemoteEnd
from tests.refit.stream import PARTS, Stream, change_first_entry
from tests.refit.test_bridge import DOWN, UP, Run, flip_a_byte, make, once  # noqa: F401
from tests.refit.test_expert_stacks import GATE, by_experts, check, stack_values
from tests.refit.transport.conftest import cleanup  # noqa: F401
from tests.refit.transport.links import CAPACITY, LONG, SHORT, TOKEN, control_pair, raises_link_error

MAPPING = ["shared_memory", "nearest", "cuda_ipc"]
DIRECT = ["in_process", *MAPPING]


@pytest.fixture
def start(make, cuda_runtime):  # noqa: F811
    """start(transport, ...) -> a run of which the first refit is done; with cuda_ipc engines are on a fake GPU."""

    def one(transport: str, engines: int = 2, **how: Any) -> Run:
        run = make(engines, transport=transport, **how)
        if transport == "cuda_ipc":
            for engine in run.engines.engines:
                for rank in engine.ranks:
                    rank.memory = {name: gpu_memory(part.nbytes) for name, part in rank.parts.items()}
                    rank.held = {name: Content.of(rank.parts[name], m[0]) for name, m in rank.memory.items()}
        run.bridge.refit()
        return run

    return one


def gpu_memory(nbytes: int) -> Buckets:
    memory = CudaMemory(HOST).allocate(nbytes, FREE_AT_ONCE)
    memory[0].fill_(0x11)
    return memory


def mapped_files() -> list[str]:
    """The shared files that this process maps, by the kernel's lines."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:nemo_fp8rl" in line]


@pytest.mark.parametrize("verify", ["digest", "full", "off"])
@pytest.mark.parametrize("transport", DIRECT)
def test_pieces_are_written_into_their_places(start, transport, verify):
    run = start(transport, verify=verify)
    for _ in range(3):
        run.step()
        report = run.bridge.refit()
        assert (report.direct, report.retries) == (1.0, 0)
        assert run.holds()
    assert report.metrics()["refit/direct"] == 1.0


@pytest.mark.parametrize("transport", ["in_process", "shared_memory"])
def test_engines_on_a_way_of_their_own_get_the_same_bytes(start, transport):
    """One by buckets, one in place; the first one has the piece first in one case, and last in the other."""
    for through_buckets in (0, 1):
        run = start(transport, 3)
        run.engines.wrap = lambda engine, rank, end, number=through_buckets: (
            Tampered(end, lambda at, message: [message]) if engine == number else end
        )
        run.bridge.links.disconnect(through_buckets)
        run.step()
        assert run.bridge.refit().direct == pytest.approx(2 / 3)
        assert run.holds()


@pytest.mark.parametrize("transport", DIRECT)
def test_nothing_is_written_before_an_engine_loads(start, transport):
    run = start(transport)
    before = {name: content.data.clone() for name, content in run.engines.engines[1].memory().items()}
    seen = []

    def wait(engine: MemoryEngine) -> None:
        time.sleep(0.5)  # the trainer has begun
        seen.extend(torch.equal(before[name], content.data) for name, content in engine.memory().items())

    run.engines.hook = once("load", 1, wait)
    run.step()
    assert run.bridge.refit().direct == 1.0
    assert seen
    assert all(seen)


@pytest.mark.parametrize("transport", DIRECT)
def test_a_compare_writes_nothing(start, transport):
    """The second sending finds what differs in memory, and does not overwrite it."""
    run = start(transport, verify="full")
    run.engines.hook = once("loaded", 1, flip_a_byte(UP))
    run.step()
    report = run.bridge.refit()
    assert report.retries == 1
    assert run.holds()


@pytest.mark.parametrize("transport", DIRECT)
def test_memory_that_changes_after_it_was_written_is_found(start, monkeypatch, transport):
    run, changed = start(transport), []
    engine, check_digest = run.engines.engines[1], DeferredChecks.check_digest
    place = engine.ranks[1].held[DOWN].data.data_ptr

    def change(checks: DeferredChecks, content: Content, *how: Any) -> None:
        if not changed and content.data.data_ptr() == place():
            changed.append(flip_a_byte(DOWN)(engine))
        check_digest(checks, content, *how)

    monkeypatch.setattr(DeferredChecks, "check_digest", change)
    run.step()
    assert run.bridge.refit().retries == 1 and changed
    assert run.holds()


@pytest.mark.parametrize("transport", DIRECT)
def test_a_trainer_that_gives_up_midway_leaves_no_version(start, transport):
    run = start(transport)
    good = run.trainer.weights[DOWN].clone()
    run.trainer.weights[DOWN][3, 4] = torch.nan
    run.refused("not finite")
    assert {engine.loaded_version for engine in run.engines.engines} == {-1}
    run.trainer.weights[DOWN] = good
    run.step()
    run.bridge.refit()
    assert run.holds()


@pytest.mark.parametrize("transport", DIRECT)
@pytest.mark.parametrize("when", ["load", "piece", "loaded", "commit"])
def test_an_engine_that_dies_gets_all_again_and_leaves_no_mapping(start, transport, when):
    run = start(transport)
    run.bridge.refit()
    before = len(mapped_files())
    run.engines.hook = once(when, 1, MemoryEngine.kill)
    run.step()
    assert run.bridge.refit().retries == 1
    assert run.holds()
    run.step()
    assert run.bridge.refit().direct == (0.5 if transport == "cuda_ipc" else 1.0)  # the new one is on no fake GPU
    assert run.holds()
    gc.collect()
    assert len(mapped_files()) <= before


def test_a_trainer_that_lost_its_link_writes_into_memory_that_nothing_reads(start):
    run = start("shared_memory", 1)
    run.step()
    run.bridge.refit()
    rank = run.trainer.ranks[0]
    end, route = rank.link_ends[0, 0].result(), rank.routes[0, 0]
    places = [place for piece in route if (place := end._places.find(piece)) is not None]
    assert places
    run.bridge.links.disconnect(0)
    run.step()
    assert run.bridge.refit().direct == 1.0
    for place in places:
        for tensor in place.tensors:
            tensor.zero_()
    assert run.holds()
    run.step()
    assert run.bridge.refit().direct == 1.0
    assert run.holds()


def test_an_engine_that_frees_its_weights_offers_nothing_any_more(start):
    run = start("shared_memory", 1)
    run.bridge.refit()
    end = run.trainer.ranks[0].link_ends[0, 0].result()
    place = end._places.find(run.trainer.ranks[0].routes[0, 0][0])
    assert place.data.view(torch.uint8).any()
    for rank in run.engines.engines[0].ranks:
        rank.offered.withdraw()
    assert not place.data.view(torch.uint8).any()  # the pages are gone, although this process maps them
    for _ in range(2):
        run.step()
        assert run.bridge.refit().direct == 0.0
        assert run.holds()


def test_memory_that_cannot_be_mapped_is_written_through_buckets(start, monkeypatch, caplog):
    def refuse(fields: Any) -> Tensor:
        raise OSError("another container")

    monkeypatch.setattr("nemo_fp8rl.refit.transport.shared_memory.map_file", refuse)
    run = start("shared_memory")
    for _ in range(2):
        run.step()
        assert run.bridge.refit().direct == 0.0
        assert run.holds()
    records = [record for record in caplog.records if record.name == double_buffer.__name__]
    assert len(records) == 8  # one for each link
    assert "through buckets, because this rank cannot map its memory (another container)" in records[0].getMessage()


def test_engines_without_memory_to_share_are_written_through_buckets(start, monkeypatch, caplog):
    def refuse(*args: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(SharedFile, "take", refuse)
    run = start("shared_memory", 1)
    run.step()
    assert run.bridge.refit().direct == 0.0
    assert run.holds()
    assert any("no memory to share" in record.getMessage() for record in caplog.records)


@pytest.fixture
def remote():
    """An engine rank in another process."""
    process = RemoteEnd()
    yield process
    process.kill()


def test_another_process_is_written_to_and_killed(remote, cleanup):  # noqa: F811
    """Its memory goes with it, and with the link here, and nothing here is disturbed."""
    listener, nbytes, before = Listener("shared_memory", "127.0.0.1", TOKEN, LONG), 1 << 22, mapped_files()
    cleanup.append(listener)
    remote.start("connect", listener.address, TOKEN, "sink", LONG)
    sender = listener.accept("sink", CAPACITY)
    remote.result()
    part = TensorPart.of("weight", torch.uint8, (nbytes,))
    values = torch.randint(256, (nbytes,), dtype=torch.uint8)
    for version in range(2):
        remote.start("open_places", version, nbytes)
        places = sender.wait_for_places(version)
        remote.result()
        values += 1
        places.find(part).data.copy_(values)
        assert remote.read_tensor() == values.numpy().tobytes()
    assert len(mapped_files()) == len(before) + 1
    remote.kill()
    places.find(part).data.zero_()  # as of a rank that has not noticed
    with raises_link_error("gone"):
        sender.acquire_buffer()
    with raises_link_error("gone"):
        sender.wait_for_places(2)
    sender.close()
    del places
    assert mapped_files() == before


def test_the_places_of_a_version_are_waited_for_and_not_for_ever(remote, cleanup):  # noqa: F811
    listener = Listener("shared_memory", "127.0.0.1", TOKEN, LONG)
    cleanup.append(listener)
    remote.start("connect", listener.address, TOKEN, "sink", LONG)
    sender = listener.accept("sink", CAPACITY)
    remote.result()
    remote.open_places(1, 100)
    sender._control.timeout = SHORT
    with raises_link_error("silent"):
        sender.wait_for_places(2)


def test_another_file_than_was_offered_is_not_mapped(tmp_path):
    file = SharedFile(8192)
    assert map_file(file.fields).numel() == 8192
    for change in ({"inode": 1}, {"nbytes": 4096}, {"descriptor": 10**6}, {"process": 2**30}):
        with pytest.raises(OSError):
            map_file(file.fields | change)
    with open(tmp_path / "nemo_fp8rl", "wb") as other, pytest.raises(OSError, match="no memory of nemo_fp8rl"):
        map_file(file.fields | {"descriptor": other.fileno()})


BAD_OFFERS = {
    "outside of the memory": {"places": [[[0, 4096, [1]]]]},
    "before it": {"places": [[[0, -8, [1]]]]},
    "backwards": {"places": [[[0, 4000, [-1]]]]},
    "in another memory": {"places": [[[1, 0, [1]]]]},
    "of another shape": {"places": [[[0, 0, [1, 1]]]]},
    "with scales": {"places": [[[0, 0, [1]], [0, 0, [1]]]]},
    "without a place": {"places": [[]]},
    "of two tensors": {"places": [[[0, 0, [1]]], [[0, 0, [1]]]]},
    "without parts": {"parts": 7},
    "not aligned": {"places": [[[0, 1, [1]]]]},
}


@pytest.mark.parametrize("what", BAD_OFFERS)
def test_places_that_do_not_fit_are_refused(what):
    part, memory = bf16("weight", 100), torch.zeros(4096, dtype=torch.uint8)
    offer = Offer(Places({"weight": (part, empty(part))}), "host", [], {"weight": [(0, 64)]}).fields
    assert read_offer(offer, [memory]).find(part).data.shape == (100,)
    with pytest.raises(ValueError, match=r"."):
        read_offer(offer | BAD_OFFERS[what], [memory])


def test_an_offer_that_is_none_ends_the_link():
    for text in (b"{", b"[]", b'{"version": 1}', b'{"version": 1, "opens": true, "offer": {"memory": 3}}'):
        with control_pair(LONG) as (source, sink):
            sender = double_buffer.Sender(source, [torch.empty(8, dtype=torch.uint8)] * 2, map_file)
            sink.send(b"O" + text)
            with raises_link_error("offers places that are none"):
                sender.wait_for_places(1)


def test_a_piece_in_a_place_that_was_not_opened_is_refused():
    stream = Stream([PARTS], [PARTS], change=change_first_entry(encoding="direct"))
    assert "is said to be in its place, which was not opened" in stream.refusal(random_weights(PARTS), 0)


def test_which_pieces_have_places():
    """Rows, stacks of experts within larger ones; but no columns of what is quantized."""
    matrix, plain, stack = fp8("a.weight", 256, 256), bf16("b.weight", 256, 256), fp8_stack("m.experts.up_proj.weight")
    w13 = empty(stack.cut(((0, 4), (0, 256), (0, 128))))
    up = Content(w13.data[:, 128:], w13.scale_inv[:, 1:])
    places = Places({"a.weight": (matrix, empty(matrix)), "b.weight": (plain, empty(plain)), stack.name: (stack, up)})
    for piece, has_place in (
        (matrix, True),
        (matrix.cut(((128, 256), (0, 256))), True),
        (matrix.cut(((0, 256), (0, 128))), False),
        (plain.cut(((3, 256), (5, 7))), True),
        (stack, True),
        (stack.cut(((1, 3), (0, 128), (0, 128))), True),
        (bf16("a.weight", 256, 256), False),
        (fp8("other.weight", 256, 256), False),
    ):
        content = places.find(piece)
        assert (content is not None) == has_place
        assert content is None or content.data.shape == piece.data_shape


def fp8_stack(name: str) -> TensorPart:
    return TensorPart.of(name, FP8, (4, 128, 128))


@pytest.mark.parametrize("format", ["fp8", "mxfp8", "nvfp4", "bfloat16"])
def test_experts_are_written_into_larger_stacks(format):
    stream, weights = Stream(by_experts(format, 2), by_experts(format, 1), bucket=60_000), stack_values()
    (rank,) = stream.engine.ranks
    rank.links = [replace(link, end=link.end.end) for link in rank.links]  # whose messages nothing changes
    rank.held[GATE], rank.direct_names = lower_half_of_w13(rank.parts[GATE]), frozenset(rank.parts)
    for version in range(2):
        reports = stream.deliver(weights, version, direct=True)
        check(stream, weights, format)
        assert all(report.direct_nbytes == report.nbytes > 0 for report in reports)
        weights = stack_values(seed=1)


def lower_half_of_w13(part: TensorPart) -> Content:
    experts, rows, columns = part.shape
    shape = (experts, 2 * rows, columns)
    w13 = empty(TensorPart(part.name, part.dtype, shape, tuple((0, n) for n in shape)))
    scales = None if w13.scale_inv is None else w13.scale_inv[:, w13.scale_inv.size(1) // 2 :]
    of_parts = None if w13.global_scale is None else torch.zeros(experts, 2)[:, 1]
    return Content(w13.data[:, rows:], scales, of_parts)
