"""What a rank sends arrives to the bit, resharded, whole or as a delta; damage on the way is found and named."""

import json
import math
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_fp8rl.fp8 import BlockScaled, quantize_blockwise
from nemo_fp8rl.refit.manifest import RefitError, Sources, TensorPart
from nemo_fp8rl.refit.message import Entry, Header
from nemo_fp8rl.refit.receiver import piece_receiver
from nemo_fp8rl.refit.receiver.piece_receiver import IncomingLink, receive_pieces
from nemo_fp8rl.refit.reports import SendReport
from nemo_fp8rl.refit.route_plan import align_up
from nemo_fp8rl.refit.sender import bucket_writer
from nemo_fp8rl.refit.sender.weight_sender import MIN_DELTA_BYTES, Link, WeightSender
from nemo_fp8rl.refit.transport.in_process import in_process_link
from nemo_fp8rl.refit.transport.link import LinkError
from tests.refit.fake_gpu_reads import ScalarReads, fake_gpu_reads
from tests.refit.memory_engine import (
    Layout,
    MemoryEngine,
    Message,
    Tampered,
    as_whole,
    bf16,
    fp8,
    random_weights,
    split,
)

UP, DOWN, EMBED, NORM, SCALE = "mlp.up_proj.weight", "mlp.down_proj.weight", "embed.weight", "norm.weight", "k_scale"
PARTS = [
    bf16(EMBED, 70, 33),
    fp8(UP, 300, 200),
    fp8(DOWN, 256, 300),
    fp8("tiny.weight", 1, 1),
    bf16(NORM, 100),
    bf16("nothing", 0, 3),
    TensorPart.of(SCALE, torch.float32, ()),
]
Change = Callable[[int, Message], Sequence[Message]]
EACH_FORMAT = pytest.mark.parametrize("fmt", ["pow2", "fp32"])
HELD_OR_NOT = pytest.mark.parametrize("held", [False, True], ids=["quantized", "held"])


class Stream:
    """Real senders and links to the ranks of an engine in memory. change: what happens to messages on every link.

    held: sources have the FP8 parts in FP8 already.
    """

    def __init__(
        self,
        sources: Layout,
        sinks: Layout,
        *,
        fmt: Any = "pow2",
        bucket: int = 1 << 21,
        change: Change = lambda k, message: [message],
        timeout: float = 60.0,  # the first call on a machine compiles
        whole: frozenset[str] = frozenset(),
        held: bool = False,
    ) -> None:
        self.sources, self.fmt, self.held = sources, fmt, held
        self.senders = [WeightSender(parts, fmt) for parts in sources]
        self.engine = MemoryEngine(sinks, frozenset())
        self.links: list[dict[tuple[int, int], Link]] = [{} for _ in sources]
        self.tampered: list[Tampered] = []
        for i, row in enumerate(Sources(sources).routes(sinks, bucket)):
            for j, route in enumerate(row):
                if route:
                    sending, receiving = in_process_link(max(bucket, *(align_up(p.nbytes) for p in route)), timeout)
                    self.links[i][0, j] = Link(sending, route, whole)
                    self.tampered.append(Tampered(receiving, change))
                    self.engine.ranks[j].links.append(IncomingLink(self.tampered[-1], route))

    def run(
        self, weights: dict[str, Tensor], version: int, **how: bool
    ) -> tuple[list[SendReport | Exception], list[int | Exception]]:
        """What each sender and each receiver says of a version."""

        def send(i: int) -> SendReport:
            own = ((part.name, self.own_values(weights, part)) for part in self.sources[i])
            return self.senders[i].send(own, version, self.links[i], **how)

        with ThreadPoolExecutor() as threads:
            loads = [threads.submit(rank.load, version, True, lambda: None) for rank in self.engine.ranks]
            sends = [threads.submit(send, i) for i in range(len(self.sources))]
            return [_said(send) for send in sends], [_said(load) for load in loads]

    def own_values(self, weights: dict[str, Tensor], part: TensorPart) -> Tensor | BlockScaled:
        values = weights[part.name][tuple(slice(a, b) for a, b in part.region)]
        return quantize_blockwise(values, scale_format=self.fmt) if self.held and part.is_fp8 else values

    def brings(self, weights: dict[str, Tensor], version: int, **how: bool) -> list[SendReport]:
        """The same, where nothing goes wrong."""
        sent, loaded = self.run(weights, version, **how)
        for answer in (*sent, *loaded):
            if isinstance(answer, Exception):
                raise answer
        return [report for report in sent if isinstance(report, SendReport)]

    def fails(self, weights: dict[str, Tensor], version: int, **how: bool) -> str:
        """What the only receiver says of what went wrong."""
        _, (answer,) = self.run(weights, version, **how)
        assert isinstance(answer, RefitError), answer
        return str(answer)

    def holds(self, weights: dict[str, Tensor], fmt: Any = "pow2") -> bool:
        parts = {part.name: replace(part, region=tuple((0, n) for n in part.shape)) for s in self.sources for part in s}
        expected, held = as_whole(list(parts.values()), weights, fmt), self.engine.memory()
        assert set(expected) == set(held)
        return all(content.equals(expected[name]) for name, content in held.items())


def _said(future: Any) -> Any:
    error = future.exception()
    return future.result() if error is None else error


# What arrives


@EACH_FORMAT
@HELD_OR_NOT
@pytest.mark.parametrize("bucket", [1, 20_000, 1 << 20])
def test_every_kind_of_tensor_arrives_to_the_bit(fmt, held, bucket):
    weights, stream = random_weights(PARTS), Stream([PARTS], [PARTS], fmt=fmt, bucket=bucket, held=held)
    (report,) = stream.brings(weights, 0)
    assert stream.holds(weights, fmt)
    assert (report.nbytes, report.failed) == (sum(piece.nbytes for piece in stream.links[0][0, 0].route), {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_of_any_dtype_arrive_in_that_of_the_engine(dtype):
    weights = {name: weight.to(dtype) for name, weight in random_weights(PARTS).items()}
    stream = Stream([PARTS], [PARTS])
    stream.brings(weights, 0)
    assert stream.holds(weights)


@EACH_FORMAT
@HELD_OR_NOT
@pytest.mark.parametrize("bucket", [5_000, 1 << 20])
@pytest.mark.parametrize(("m", "source_dim"), [(1, 0), (2, 0), (2, 1), (3, 0)])
@pytest.mark.parametrize(("n", "sink_dim"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_resharded_bytes_are_those_of_the_whole_tensor_quantized(fmt, held, bucket, m, source_dim, n, sink_dim):
    sources, sinks = split(PARTS, m, source_dim, replicate=False), split(PARTS, n, sink_dim, replicate=True)
    stream, weights = Stream(sources, sinks, fmt=fmt, bucket=bucket, held=held), random_weights(PARTS)
    stream.brings(weights, 0)
    assert stream.holds(weights, fmt)


def test_a_piece_for_several_ranks_is_quantized_once(monkeypatch):
    quantized = []
    original = WeightSender._quantize
    monkeypatch.setattr(WeightSender, "_quantize", lambda *its: (quantized.append(its[3].shape), original(*its)))
    stream, weights = Stream([PARTS], [PARTS] * 3), random_weights(PARTS)
    (report,) = stream.brings(weights, 0)
    assert len(quantized) == len([part for part in PARTS if all(part.shape)])
    assert report.nbytes == 3 * sum(part.nbytes for part in PARTS)
    assert stream.holds(weights)


def test_a_version_follows_another_over_the_same_links():
    stream = Stream(split(PARTS, 2, 0, replicate=False), split(PARTS, 2, 1, replicate=True), bucket=10_000)
    for version in range(4):
        weights = random_weights(PARTS, seed=version)
        stream.brings(weights, version)
        assert stream.holds(weights)


def test_weights_may_come_in_any_order_and_with_any_strides():
    weights = random_weights(PARTS)
    strided = {name: w.t().contiguous().t() if w.dim() == 2 else w for name, w in reversed(weights.items())}
    stream = Stream([PARTS[::-1]], [PARTS])
    stream.brings(strided, 0)
    assert stream.holds(weights)


# What happens to messages

FAULTY = [fp8(UP, 256, 128), fp8(DOWN, 256, 128), bf16(NORM, 100), bf16(EMBED, 128)]
BUCKET = 256 * 128 + 64
"""Four messages: up, down, norm and embed, and before it the first bands where a piece fills no bucket."""


def heading(k: int, **changes: Any) -> Change:
    """Message k says something else of itself."""

    def change(at: int, message: Message) -> list[Message]:
        header, payload = message
        return [(replace(Header.decode(header), **changes).encode(), payload) if at == k else message]

    return change


def first_entry(**changes: Any) -> Change:
    def change(at: int, message: Message) -> list[Message]:
        header = Header.decode(message[0])
        entries = (header.entries[0]._replace(**changes), *header.entries[1:])
        return [(replace(header, entries=entries).encode(), message[1])] if at == 0 else [message]

    return change


def reordered() -> Change:
    held: list[Message] = []

    def change(at: int, message: Message) -> list[Message]:
        if at == 0:
            held.append((message[0], message[1].clone()))
        return [] if at == 0 else [message, *held] if at == 1 else [message]

    return change


def last_entry_dropped(at: int, message: Message) -> list[Message]:
    header = Header.decode(message[0])
    return [(replace(header, entries=header.entries[:-1]).encode(), message[1])] if header.last else [message]


def not_finite(value: float) -> Change:
    def change(at: int, message: Message) -> list[Message]:
        if at == 0:
            message[1][:4].view(torch.float32).fill_(value)
        return [message]

    return change


FAULTS: dict[str, tuple[Change, str]] = {
    "the first lost": (lambda k, m: [] if k == 0 else [m], "refit 7: message 1 arrived where 0 was due"),
    "the second lost": (lambda k, m: [] if k == 1 else [m], "refit 7: message 2 arrived where 1 was due"),
    "repeated": (lambda k, m: [m, m] if k == 1 else [m], "refit 7: message 1 arrived where 2 was due"),
    "reordered": (reordered(), "refit 7: message 1 arrived where 0 was due"),
    "of an old version": (heading(1, version=6), "refit 7: a message of version 6 arrived"),
    "of a later version": (heading(1, version=8), "refit 7: a message of version 8 arrived"),
    "a piece twice": (first_entry(piece=1), f"refit 7: .*{re.escape(DOWN)}"),
    "an unknown piece": (first_entry(piece=1000), "refit 7: a piece arrived unexpectedly"),
    "a negative piece": (first_entry(piece=-1), "refit 7: a piece arrived unexpectedly"),
    "a piece of another size": (first_entry(piece=3), f"refit 7: {re.escape(EMBED)} has .* bytes, must have 256"),
    "cut off": (lambda k, m: [(m[0], m[1][:-1])], f"refit 7: {re.escape(UP)} was cut off"),
    "without its payload": (lambda k, m: [(m[0], m[1][:0])], f"refit 7: {re.escape(UP)} was cut off"),
    "shorter than said": (first_entry(nbytes=100), f"refit 7: {re.escape(UP)} has 100 bytes, must have"),
    "shorter than its scales": (first_entry(nbytes=3), f"refit 7: {re.escape(UP)} was cut off"),
    "of negative length": (first_entry(nbytes=-5), f"refit 7: {re.escape(UP)} was cut off"),
    "another digest": (first_entry(digest="0" * 16), f"refit 7: {re.escape(UP)} in the engine is not what"),
    "full as a delta": (first_entry(encoding="delta"), f"refit 7: {re.escape(UP)}: these bytes are not a delta"),
    "another encoding": (first_entry(encoding="zip"), "message of the refit is damaged"),
    "an entry dropped": (last_entry_dropped, f"refit 7: 1 pieces did not arrive, among them one of {re.escape(EMBED)}"),
    "the last too early": (heading(0, last=True), f"3 pieces did not arrive, among them one of {re.escape(DOWN)}"),
    "given up": (heading(1, abort="out of memory"), "refit 7: the trainer gave up: out of memory"),
    "a scale of NaN": (not_finite(math.nan), f"refit 7: {re.escape(UP)} has a scale that is not finite"),
    "an infinite scale": (not_finite(math.inf), f"refit 7: {re.escape(UP)} has a scale that is not finite"),
    "no header": (lambda k, m: [(b"", m[1])], "message of the refit is damaged"),
    "another header": (lambda k, m: [(b"\xff\xfe{", m[1])], "message of the refit is damaged"),
}


def faulty(change: Change, timeout: float = 20.0) -> Stream:
    return Stream([FAULTY], [FAULTY], bucket=BUCKET, change=change, timeout=timeout)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_message_is_found_and_named(fault):
    change, message = FAULTS[fault]
    said = faulty(change).fails(random_weights(FAULTY), 7)
    assert re.search(message, said), said


@pytest.mark.parametrize("change", [lambda k, m: [] if k == 2 else [m], heading(2, last=False)])
def test_a_last_message_that_never_comes_ends_the_wait(change):
    assert "no message within 0.3 s" in faulty(change, timeout=0.3).fails(random_weights(FAULTY), 7)


def flipped(seed: int) -> Change:
    """A bit of one piece, anywhere."""
    generator = torch.Generator().manual_seed(seed)

    def flip(at: int, message: Message) -> list[Message]:
        entries, start = Header.decode(message[0]).entries, 0
        if at == seed % 3:
            for entry in entries[: seed % len(entries)]:
                start = align_up(start + entry.nbytes)
            where = start + int(torch.randint(entries[seed % len(entries)].nbytes, (), generator=generator))
            message[1][where] ^= 1 << int(torch.randint(8, (), generator=generator))
        return [message]

    return flip


@pytest.mark.parametrize("seed", range(12))
def test_a_flipped_bit_anywhere_in_a_piece_is_found(seed):
    said = faulty(flipped(seed)).fails(random_weights(FAULTY), 7)
    assert any(part.name in said for part in FAULTY), said


def test_a_refusal_frees_the_sender_at_once():
    """It would otherwise wait until its link's timeout for buffers that nobody gives back."""
    stream = faulty(FAULTS["of an old version"][0], timeout=20.0)
    thread = ThreadPoolExecutor(1).submit(stream.run, random_weights(FAULTY), 7)
    (report,), (answer,) = thread.result(timeout=5)
    assert isinstance(answer, RefitError)
    assert isinstance(report, SendReport)
    assert set(report.failed) <= {(0, 0)}
    assert stream.senders[0].base_version == -1
    for reader in [t for t in threading.enumerate() if t.name.startswith("refit-link")]:
        reader.join(5)
        assert not reader.is_alive()


def test_a_sink_that_its_rank_gave_up_on_hears_so_at_once():
    """It may go on after its rank's patience is at an end, and would then wait for what does not come."""
    sending, receiving = in_process_link(BUCKET, 0.5)
    sender = WeightSender(FAULTY, "pow2")
    report = sender.send(list(random_weights(FAULTY).items()), 0, {(0, 0): Link(sending, FAULTY)}, keep=True)
    assert list(report.failed.values()) == ["no free buffer within 0.5 s, a share of cluster.engine_timeout_seconds"]
    with pytest.raises(LinkError, match="the link is closed"):
        receiving.receive()


def test_a_link_that_breaks_leaves_the_others_whole():
    stream, weights = Stream([FAULTY], [FAULTY] * 3, bucket=BUCKET), random_weights(FAULTY)
    stream.links[0][0, 1].end.close()
    (report,), loaded = stream.run(weights, 7, keep=True)
    assert isinstance(report, SendReport)
    assert list(report.failed) == [(0, 1)]
    assert isinstance(loaded[1], LinkError)
    for sink in (0, 2):
        held = stream.engine.ranks[sink].held
        assert all(content.equals(held[name]) for name, content in as_whole(FAULTY, weights, "pow2").items())
    assert stream.senders[0].base_version == -1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=5),
)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=30) | JSON.map(lambda value: json.dumps(value).encode()))
def test_bytes_that_are_no_header_are_a_refit_error(message):
    try:
        header = Header.decode(message)
    except RefitError:
        return
    assert Header.decode(header.encode()) == header


@pytest.mark.parametrize(
    "message", [b"[" * 100_000, b'[Infinity, 0, [], true, ""]', b'[0, 0, [[0, "full", 1e999, ""]], true, ""]', b"[1]"]
)
def test_json_that_is_no_header_is_a_refit_error(message):
    with pytest.raises(RefitError, match="a message of the refit is damaged"):
        Header.decode(message)


def test_a_header_round_trips():
    header = Header(3, 1, (Entry(0, "full", 10, "ab"), Entry(5, "delta", 0, "")), last=True, abort="why")
    assert Header.decode(header.encode()) == header


# Weights that must not be sent


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [UP, NORM, SCALE])
@pytest.mark.parametrize("delta", [False, True])
def test_a_weight_that_is_not_finite_is_named_on_both_sides(name, bad, delta):
    weights, stream = random_weights(PARTS), Stream([PARTS], [PARTS] * 2)
    stream.brings(weights, 6, keep=True)
    weights[name].view(-1)[-1] = bad
    sent, loaded = stream.run(weights, 7, delta=delta, keep=True)
    for answer in (*sent, *loaded):
        assert isinstance(answer, RefitError)
        assert re.search(rf"refit 7: .*{re.escape(name)}\b.* not finite.*; training diverged", str(answer))
    assert stream.senders[0].base_version == -1


@pytest.mark.parametrize(("row", "code"), [(0, 0x7F), (299, 0xFF)])
@pytest.mark.parametrize("delta", [False, True])
def test_fp8_values_that_are_not_numbers_are_named(row, code, delta):
    part = fp8(UP, 300, 200)
    held = quantize_blockwise(random_weights([part])[UP])
    sender, (sending, _) = WeightSender([part], "pow2"), in_process_link(1 << 20, 20.0)
    if delta:
        sender.send([(UP, held)], 0, {(0, 0): Link(in_process_link(1 << 20, 20.0)[0], (part,))}, keep=True)
    held.data.view(torch.uint8)[row, 7] = code
    with pytest.raises(RefitError, match=rf"refit 1: {re.escape(UP)}: 1 of 60000 FP8 values.* are NaN; training div"):
        sender.send([(UP, held)], 1, {(0, 0): Link(sending, (part,))}, delta=delta, keep=True)


def test_a_value_that_overflows_the_engines_dtype_is_refused():
    weights, parts = {NORM: torch.full((100,), 1e38)}, [TensorPart.of(NORM, torch.float16, (100,))]
    (answer,), _ = Stream([parts], [parts]).run(weights, 0)
    assert isinstance(answer, RefitError)
    assert NORM in str(answer)


# On a GPU, which is waited for once a message


@pytest.fixture
def on_a_gpu(monkeypatch):
    fake_gpu_reads(monkeypatch)


@pytest.mark.usefixtures("on_a_gpu")
@HELD_OR_NOT
def test_numbers_of_a_gpu_are_read_once_a_message(held):
    def reads(experts: int) -> tuple[int, int]:
        parts = [fp8(f"experts.{i}.weight", 128, 256) for i in range(experts)]
        parts += [bf16(f"norms.{i}.weight", 64) for i in range(experts)]
        stream, weights = Stream([parts], [parts], held=held), random_weights(parts)
        own = [(part.name, stream.own_values(weights, part)) for part in parts]
        with ScalarReads() as sending:
            stream.senders[0].send(own, 0, stream.links[0])
        with ScalarReads() as receiving:
            stream.engine.ranks[0].load(0, True, lambda: None)
        assert stream.holds(weights)
        assert stream.tampered[0].seen == 1
        return sending.count, receiving.count

    assert reads(2) == reads(10)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("delta", [False, True])
@EACH_FORMAT
def test_there_every_kind_of_tensor_arrives_to_the_bit(fmt, delta):
    weights, stream = random_weights(PARTS), Stream([PARTS], [PARTS] * 2, fmt=fmt, bucket=20_000)
    stream.brings(weights, 0, keep=True)
    weights = moved(weights, 0.01)
    stream.brings(weights, 1, delta=delta, keep=True)
    assert stream.holds(weights, fmt)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("fault", FAULTS)
def test_there_a_damaged_message_is_found_and_named(fault):
    change, message = FAULTS[fault]
    said = faulty(change).fails(random_weights(FAULTY), 7)
    assert re.search(message, said), said


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("seed", range(6))
def test_there_a_flipped_bit_is_found_before_its_bucket_is_given_back(seed):
    stream = faulty(flipped(seed))
    released, release = [], stream.tampered[0].release
    stream.tampered[0].release = lambda: (released.append(True), release())
    said = stream.fails(random_weights(FAULTY), 7)
    assert any(part.name in said for part in FAULTY), said
    assert len(released) == seed % 3


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [UP, NORM, SCALE])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("bucket", [20_000, 1 << 21])
def test_there_a_weight_that_is_not_finite_is_in_no_message(name, bad, delta, bucket):
    """Though it is in a bucket, of each link, when that is known."""
    brought: list[str] = []

    def look(at: int, message: Message) -> list[Message]:
        entries = Header.decode(message[0]).entries
        brought.extend(route[entry.piece].name for entry in entries)
        return [message]

    weights, stream = random_weights(PARTS), Stream([PARTS], [PARTS] * 2, bucket=bucket)
    route = stream.links[0][0, 0].route
    stream.brings(weights, 6, keep=True)
    weights[name].view(-1)[-1] = bad
    for tampered in stream.tampered:
        tampered.change = look
    sent, loaded = stream.run(weights, 7, delta=delta, keep=True)
    for answer in (*sent, *loaded):
        assert isinstance(answer, RefitError)
        assert re.search(rf"refit 7: .*{re.escape(name)}\b.* not finite.*; training diverged", str(answer))
    pieces = sum(part.name == name for part in route)
    assert brought.count(name) < 2 * pieces
    assert pieces > 1 or name not in brought
    assert stream.senders[0].base_version == -1


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("scale", [False, True], ids=["value", "scale"])
def test_there_fp8_values_that_are_not_numbers_are_named(scale):
    part = fp8(UP, 300, 200)
    held = quantize_blockwise(random_weights([part])[UP])
    sender, (sending, _) = WeightSender([part], "pow2"), in_process_link(1 << 20, 20.0)
    if scale:
        held.scale_inv[2, 1] = math.nan
    else:
        held.data.view(torch.uint8)[299, 7] = 0xFF
    found = "are not finite" if scale else "1 FP8 values are NaN"
    where = rf"values from \[0, 0\] to \[299, 199\].*{found}; training div"
    with pytest.raises(RefitError, match=rf"refit 1: {re.escape(UP)}: {where}"):
        sender.send([(UP, held)], 1, {(0, 0): Link(sending, (part,))})


# Deltas

LARGE = [fp8(UP, 1024, 1024), bf16(EMBED, 300, 128), bf16(NORM, 128)]


def spied() -> tuple[Change, dict[int, Entry]]:
    """A change that is none, and the entries that went by, by piece."""
    entries: dict[int, Entry] = {}

    def change(at: int, message: Message) -> list[Message]:
        entries.update({entry.piece: entry for entry in Header.decode(message[0]).entries})
        return [message]

    return change, entries


def moved(weights: dict[str, Tensor], share: float, seed: int = 1) -> dict[str, Tensor]:
    """About this share of the smaller values halved: scales stay."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where((torch.rand(w.shape, generator=generator) < share) & (w.abs() < 1), w / 2, w)
        for name, w in weights.items()
    }


def test_a_step_at_a_learning_rate_of_rl_is_a_two_hundredth_of_bf16():
    change, entries = spied()
    stream, master = Stream([LARGE], [LARGE], change=change), torch.randn(1024, 1024) * 0.02
    weights = random_weights(LARGE) | {UP: master.bfloat16()}
    stream.brings(weights, 0, keep=True)
    weights |= {UP: (master - 1e-6 * torch.randn_like(master).sign()).bfloat16()}
    (report,) = stream.brings(weights, 1, delta=True, keep=True)
    assert stream.holds(weights)
    assert entries[0].encoding == "delta"
    assert report.quantized_bf16_nbytes == 2 * 1024 * 1024
    assert 0 < report.quantized_nbytes < 0.005 * report.quantized_bf16_nbytes


@EACH_FORMAT
@HELD_OR_NOT
def test_deltas_bring_what_a_full_version_brings(fmt, held):
    parts = [*LARGE, fp8(DOWN, 128, 384)]  # of three scales, so that data do not begin at a multiple of eight bytes
    sources, sinks = split(parts, 2, 0, replicate=False), split(parts, 2, 1, replicate=True)
    weights, stream = random_weights(parts), Stream(sources, sinks, fmt=fmt, held=held)
    stream.brings(weights, 0, keep=True)
    for version in range(1, 4):
        weights = moved(weights, 0.01, seed=version)
        reports = stream.brings(weights, version, delta=True, keep=True)
        assert stream.holds(weights, fmt)
        assert sum(r.nbytes for r in reports) < 0.1 * sum(r.bf16_nbytes for r in reports)


def test_a_delta_of_nothing_is_a_few_bytes():
    weights, stream = random_weights(LARGE[:1]), Stream([LARGE[:1]], [LARGE[:1]])
    stream.brings(weights, 0, keep=True)
    (report,) = stream.brings(weights, 1, delta=True, keep=True)
    assert report.nbytes < 4 * 64 + 200
    assert stream.holds(weights)


@pytest.mark.parametrize(("share", "encodings"), [(0.02, ["delta"] * 2 + ["full"]), (0.5, ["full"] * 3)])
def test_where_more_than_an_eighth_changed_all_bytes_go(share, encodings):
    """As do small tensors: the norm, here."""
    change, entries = spied()
    weights, stream = random_weights(LARGE), Stream([LARGE], [LARGE], change=change)
    stream.brings(weights, 0, keep=True)
    weights = moved(weights, share)
    stream.brings(weights, 1, delta=True, keep=True)
    assert stream.holds(weights)
    assert LARGE[2].data_bytes < MIN_DELTA_BYTES
    assert [entries[piece].encoding for piece in range(3)] == encodings


def test_a_tensor_that_takes_no_delta_goes_whole_and_may_take_one_later():
    change, entries = spied()
    weights, stream = random_weights(LARGE), Stream([LARGE], [LARGE], change=change, whole=frozenset([UP]))
    stream.brings(weights, 0, keep=True)
    weights = moved(weights, 0.01)
    stream.brings(weights, 1, delta=True, keep=True)
    assert [entries[piece].encoding for piece in range(2)] == ["full", "delta"]
    stream.links = [{i: replace(link, whole=frozenset()) for i, link in links.items()} for links in stream.links]
    weights = moved(weights, 0.01, seed=2)
    stream.brings(weights, 2, delta=True, keep=True)
    assert [entries[piece].encoding for piece in range(2)] == ["delta", "delta"]
    assert stream.holds(weights)


@pytest.mark.parametrize("name", [UP, EMBED])
def test_a_delta_on_other_bytes_than_its_base_is_found(name):
    weights, stream = random_weights(LARGE), Stream([LARGE], [LARGE])
    stream.brings(weights, 0, keep=True)
    stream.engine.ranks[0].held[name].data.view(torch.uint8).view(-1)[77] ^= 1
    said = stream.fails(moved(weights, 0.01), 1, delta=True, keep=True)
    assert said == f"refit 1: {name} in the engine is not what the trainer sent"


@pytest.mark.parametrize("seed", range(6))
def test_a_bit_flipped_in_a_delta_is_found(seed):
    generator = torch.Generator().manual_seed(seed)

    def flip(at: int, message: Message) -> list[Message]:
        entry = Header.decode(message[0]).entries[0]
        assert entry.encoding == "delta"
        message[1][int(torch.randint(entry.nbytes, (), generator=generator))] ^= 1 << seed
        return [message]

    weights, stream = random_weights(LARGE), Stream([LARGE], [LARGE])
    stream.brings(weights, 0, keep=True)
    stream.tampered[0].change = flip
    assert f"refit 1: {UP}" in stream.fails(moved(weights, 0.01), 1, delta=True, keep=True)


def test_an_old_version_is_refused():
    weights, stream = random_weights(FAULTY), faulty(lambda k, message: [message])
    stream.brings(weights, 5)
    stream.links[0][0, 0].end.close()
    assert "refit 4 is stale: this engine has had version 5" in stream.fails(weights, 4)


def test_bytes_are_kept_only_for_a_delta():
    weights, stream = random_weights(LARGE), Stream([LARGE], [LARGE])
    (sender,), nbytes = stream.senders, sum(part.nbytes for part in LARGE if part.data_bytes >= MIN_DELTA_BYTES)
    (report,) = stream.brings(weights, 0, keep=True)
    assert (report.base_nbytes, sender.base_version) == (nbytes, 0)
    (report,) = stream.brings(weights, 1, delta=True, keep=True)
    assert (report.base_nbytes, sender.base_version) == (nbytes, 1)
    (report,) = stream.brings(weights, 2)
    assert (report.base_nbytes, sender.base_version) == (0, -1)
    assert sender.base == {}


def test_nothing_is_kept_of_a_refit_that_was_refused():
    weights, stream = random_weights(LARGE), Stream([LARGE], [LARGE])
    stream.brings(weights, 0, keep=True)
    weights[LARGE[-1].name].view(-1)[0] = torch.nan
    (error,), _ = stream.run(weights, 1, delta=True, keep=True)
    assert isinstance(error, RefitError)
    assert (stream.senders[0].base_version, stream.senders[0].base) == (-1, {})


def test_a_delta_is_of_what_was_kept_and_only_what_is_sent_is_kept():
    up, down = (part for part in PARTS if part.data_bytes >= MIN_DELTA_BYTES)
    sender, weights = WeightSender([up, down], "pow2"), random_weights(PARTS)

    def encodings(version: int, *route: TensorPart, delta: bool) -> dict[str, str]:
        sending, receiving = in_process_link(1 << 20, 20.0)
        own = [(part.name, weights[part.name]) for part in (up, down)]
        sender.send(own, version, {(0, version): Link(sending, route)}, delta=delta, keep=True)
        entries = Header.decode(receiving.receive()[0]).entries
        return {route[entry.piece].name: entry.encoding for entry in entries}

    assert encodings(0, up, delta=False) == {UP: "full"}
    assert encodings(1, up, down, delta=True) == {UP: "delta", DOWN: "full"}
    assert encodings(2, down, delta=True) == {DOWN: "delta"}
    assert {name for name, _ in sender.base} == {DOWN}


def test_the_last_delta_leaves_no_base_to_build_on():
    weights, stream = random_weights(LARGE), Stream([LARGE], [LARGE])
    stream.brings(weights, 0, keep=True)
    stream.brings(weights, 1, delta=True)
    assert stream.senders[0].base_version == -1


@pytest.mark.parametrize(
    ("module", "name"), [(bucket_writer, "send"), (piece_receiver, "release")], ids=["sender", "receiver"]
)
def test_a_gpu_has_done_its_work_on_a_bucket_before_the_bucket_changes_hands(monkeypatch, module, name):
    """Links know nothing of streams: what is queued on one is waited for by `finish_gpu_work`."""
    weights, stream, happened = random_weights(PARTS), Stream([PARTS], [PARTS], bucket=20_000), []
    end: Any = stream.links[0][0, 0].end if name == "send" else stream.tampered[0]
    changes_hands = getattr(end, name)

    def told(*args: Any) -> None:
        happened.append(name)
        changes_hands(*args)

    monkeypatch.setattr(module, "finish_gpu_work", lambda bucket: happened.append("finish_gpu_work"))
    monkeypatch.setattr(end, name, told)
    stream.brings(weights, 0)
    assert len(happened) > 4
    assert happened == ["finish_gpu_work", name] * (len(happened) // 2)


def test_whatever_ends_the_reading_of_a_link_ends_the_refit():
    """Or who waits for its messages would wait for ever."""

    class Full:
        closed = False

        def receive(self):
            raise MemoryError("no memory for a header")

        def close(self) -> None:
            self.closed = True

    end = Full()
    with pytest.raises(RefitError, match="MemoryError: no memory for a header"):
        list(receive_pieces([IncomingLink(end, [])], 0))
    assert end.closed
