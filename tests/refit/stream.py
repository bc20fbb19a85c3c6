"""A real sender and receiver over links in this process, with an engine in memory, and the damage done to messages."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.fp8 import quantize_blockwise
from nemo_fp8rl.refit.expert_stacks import Matrix, Weight, expert_name
from nemo_fp8rl.refit.manifest import RefitError, Sources, TensorPart
from nemo_fp8rl.refit.message import Entry, Header
from nemo_fp8rl.refit.receiver.piece_receiver import IncomingLink
from nemo_fp8rl.refit.reports import SendReport
from nemo_fp8rl.refit.route_plan import align_up
from nemo_fp8rl.refit.sender.push import Link
from nemo_fp8rl.refit.sender.weight_sender import WeightSender
from nemo_fp8rl.refit.transport.in_process import in_process_link
from tests.refit.memory_engine import (
    Layout,
    MemoryEngine,
    Message,
    Tampered,
    as_whole,
    bf16,
    encode_of,
    fp8,
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
FAULTY = [fp8(UP, 256, 128), fp8(DOWN, 256, 128), bf16(NORM, 100), bf16(EMBED, 128)]
BUCKET = 256 * 128 + 64
"""Four messages: up, down, norm and embed, and before it the first bands where a piece fills no bucket."""
LARGE = [fp8(UP, 1024, 1024), bf16(EMBED, 300, 128), bf16(NORM, 128)]
Change = Callable[[int, Message], Sequence[Message]]
EACH_FORMAT = pytest.mark.parametrize("fmt", ["pow2", "fp32"])
FROM_BF16_OR_FP8 = pytest.mark.parametrize("from_fp8", [False, True], ids=["bf16", "fp8"])


def stack_encodes(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The factors of the matrices of stacks, by the names of the matrices."""
    stacks = {name: stack for name, stack in weights.items() if stack.dim() == 3}
    matrices = {expert_name(name, i): matrix for name, stack in stacks.items() for i, matrix in enumerate(stack)}
    return {name: encode_of(matrices, name) for name in matrices}


class Stream:
    """Real senders and links to the ranks of an engine in memory.

    sources:   the parts of each sender
    sinks:     the parts of each engine rank
    bucket:    bytes of the largest piece and, at least, of a bucket
    change:    what happens to the messages of every link
    full_only: as in `Link`
    from_fp8:  the sources have the FP8 parts in FP8 already
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
        full_only: frozenset[str] = frozenset(),
        from_fp8: bool = False,
    ) -> None:
        self.sources, self.fmt, self.from_fp8 = sources, fmt, from_fp8
        self.senders = [WeightSender(parts, fmt) for parts in sources]
        self.engine = MemoryEngine(sinks, frozenset())
        self.links: list[dict[tuple[int, int], Link]] = [{} for _ in sources]
        self.tampered: list[Tampered] = []
        for i, row in enumerate(Sources(sources).routes(sinks, bucket)):
            for j, route in enumerate(row):
                if route:
                    sending, receiving = in_process_link(max(bucket, *(align_up(p.nbytes) for p in route)), timeout)
                    self.links[i][0, j] = Link(sending, route, full_only)
                    self.tampered.append(Tampered(receiving, change))
                    self.engine.ranks[j].links.append(IncomingLink(self.tampered[-1], route))

    def run(
        self, weights: dict[str, Tensor], version: int, **options: bool
    ) -> tuple[list[SendReport | Exception], list[int | Exception]]:
        """Send a version and return the outcome of each sender and of each receiver."""

        def send(i: int) -> SendReport:
            values = ((part.name, self.rank_values(weights, part)) for part in self.sources[i])
            encodes = {name: encode_of(weights, name) for name in weights} | stack_encodes(weights)
            return self.senders[i].send(values, version, self.links[i], encodes=encodes, **options)

        with ThreadPoolExecutor() as threads:
            loads = [threads.submit(rank.load, version, True, True, lambda: None) for rank in self.engine.ranks]
            sends = [threads.submit(send, i) for i in range(len(self.sources))]
            return [_outcome(send) for send in sends], [_outcome(load) for load in loads]

    def rank_values(self, weights: dict[str, Tensor], part: TensorPart) -> Weight:
        values = weights[part.name][tuple(slice(a, b) for a, b in part.region)]
        if part.is_stack:
            return [self._matrix(weights, part, i, matrix) for i, matrix in enumerate(values, part.region[0][0])]
        return quantize_blockwise(values, scale_format=self.fmt) if self.from_fp8 and bool(part.format) else values

    def _matrix(self, weights: dict[str, Tensor], part: TensorPart, expert: int, values: Tensor) -> Matrix:
        if not (self.from_fp8 and part.format):
            return values
        encode = encode_of({part.name: weights[part.name][expert]}, part.name)
        return quantize_blockwise(values, format=part.format, scale_format=self.fmt, encode=encode)

    def deliver(self, weights: dict[str, Tensor], version: int, **options: bool) -> list[SendReport]:
        """Send a version and return the senders' reports. Raises the error of any side."""
        sent, loaded = self.run(weights, version, **options)
        for answer in (*sent, *loaded):
            if isinstance(answer, Exception):
                raise answer
        return [report for report in sent if isinstance(report, SendReport)]

    def refusal(self, weights: dict[str, Tensor], version: int, **options: bool) -> str:
        """Send a version and return the error of the only receiver."""
        _, (answer,) = self.run(weights, version, **options)
        assert isinstance(answer, RefitError), answer
        return str(answer)

    def has_weights(self, weights: dict[str, Tensor], fmt: Any = "pow2") -> bool:
        parts = {part.name: replace(part, region=tuple((0, n) for n in part.shape)) for s in self.sources for part in s}
        expected, stored = as_whole(list(parts.values()), weights, fmt), self.engine.memory()
        assert set(expected) == set(stored)
        return all(content.equals(expected[name]) for name, content in stored.items())


def _outcome(future: Any) -> Any:
    error = future.exception()
    return future.result() if error is None else error


def change_header(k: int, **changes: Any) -> Change:
    """Replace these fields in the header of message k."""

    def change(at: int, message: Message) -> list[Message]:
        header, payload = message
        return [(replace(Header.decode(header), **changes).encode(), payload) if at == k else message]

    return change


def change_first_entry(**changes: Any) -> Change:
    def change(at: int, message: Message) -> list[Message]:
        header = Header.decode(message[0])
        entries = (header.entries[0]._replace(**changes), *header.entries[1:])
        return [(replace(header, entries=entries).encode(), message[1])] if at == 0 else [message]

    return change


def swap_first_two() -> Change:
    first: list[Message] = []

    def change(at: int, message: Message) -> list[Message]:
        if at == 0:
            first.append((message[0], message[1].clone()))
        return [] if at == 0 else [message, *first] if at == 1 else [message]

    return change


def drop_last_entry(at: int, message: Message) -> list[Message]:
    header = Header.decode(message[0])
    return [(replace(header, entries=header.entries[:-1]).encode(), message[1])] if header.last else [message]


def set_first_scale(value: float) -> Change:
    def change(at: int, message: Message) -> list[Message]:
        if at == 0:
            message[1][:4].view(torch.float32).fill_(value)
        return [message]

    return change


FAULTS: dict[str, tuple[Change, str]] = {
    "the first lost": (lambda k, m: [] if k == 0 else [m], "refit 7: message 1 arrived where 0 was due"),
    "the second lost": (lambda k, m: [] if k == 1 else [m], "refit 7: message 2 arrived where 1 was due"),
    "repeated": (lambda k, m: [m, m] if k == 1 else [m], "refit 7: message 1 arrived where 2 was due"),
    "reordered": (swap_first_two(), "refit 7: message 1 arrived where 0 was due"),
    "of an old version": (change_header(1, version=6), "refit 7: a message of version 6 arrived"),
    "of a later version": (change_header(1, version=8), "refit 7: a message of version 8 arrived"),
    "a piece twice": (change_first_entry(piece=1), f"refit 7: .*{re.escape(DOWN)}"),
    "an unknown piece": (change_first_entry(piece=1000), "refit 7: a piece arrived unexpectedly"),
    "a negative piece": (change_first_entry(piece=-1), "refit 7: a piece arrived unexpectedly"),
    "a piece of another size": (
        change_first_entry(piece=3),
        f"refit 7: {re.escape(EMBED)} has .* bytes, must have 256",
    ),
    "cut off": (lambda k, m: [(m[0], m[1][:-1])], f"refit 7: {re.escape(UP)} was cut off"),
    "without its payload": (lambda k, m: [(m[0], m[1][:0])], f"refit 7: {re.escape(UP)} was cut off"),
    "shorter than announced": (change_first_entry(nbytes=100), f"refit 7: {re.escape(UP)} has 100 bytes, must have"),
    "shorter than its scales": (change_first_entry(nbytes=3), f"refit 7: {re.escape(UP)} was cut off"),
    "of negative length": (change_first_entry(nbytes=-5), f"refit 7: {re.escape(UP)} was cut off"),
    "another digest": (change_first_entry(digest="0" * 16), f"refit 7: {re.escape(UP)} in the engine is not what"),
    "full as a delta": (change_first_entry(encoding="delta"), f"refit 7: {re.escape(UP)}: these bytes are not a delta"),
    "another encoding": (change_first_entry(encoding="zip"), "message of the refit is damaged"),
    "an entry dropped": (drop_last_entry, f"refit 7: 1 pieces did not arrive, among them one of {re.escape(EMBED)}"),
    "the last too early": (
        change_header(0, last=True),
        f"3 pieces did not arrive, among them one of {re.escape(DOWN)}",
    ),
    "given up": (change_header(1, abort="out of memory"), "refit 7: the trainer gave up: out of memory"),
    "a scale of NaN": (set_first_scale(math.nan), f"refit 7: {re.escape(UP)} has a scale that is not finite"),
    "an infinite scale": (set_first_scale(math.inf), f"refit 7: {re.escape(UP)} has a scale that is not finite"),
    "no header": (lambda k, m: [(b"", m[1])], "message of the refit is damaged"),
    "another header": (lambda k, m: [(b"\xff\xfe{", m[1])], "message of the refit is damaged"),
}


def faulty_stream(change: Change, timeout: float = 20.0) -> Stream:
    return Stream([FAULTY], [FAULTY], bucket=BUCKET, change=change, timeout=timeout)


def flip_bit(seed: int) -> Change:
    """Flip one bit, anywhere, in one piece."""
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


def record_entries() -> tuple[Change, dict[int, Entry]]:
    """Return a change that records all entries, by piece, and their dictionary."""
    entries: dict[int, Entry] = {}

    def change(at: int, message: Message) -> list[Message]:
        entries.update({entry.piece: entry for entry in Header.decode(message[0]).entries})
        return [message]

    return change, entries


def halve_some(weights: dict[str, Tensor], share: float, seed: int = 1) -> dict[str, Tensor]:
    """Return the weights with about this share of the smaller values halved, so that the scales stay."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where((torch.rand(w.shape, generator=generator) < share) & (w.abs() < 1), w / 2, w)
        for name, w in weights.items()
    }
