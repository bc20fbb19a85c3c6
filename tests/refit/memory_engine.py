"""A trainer and engines for the tests of a refit: the real protocol on dicts.

`SendingRank`, `WeightSender`, the transports, `receive_pieces` and `RefitBridge` are the package's own. Only what lies
beyond them is replaced: a trainer's model by a dict of weights, vLLM's memory by a dict of tensors that a rank applies
what it receives to as `generation.weight_store` does, and a process that dies by one that answers WorkerDied from then
on.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.common.region import full_region
from nemo_fp8rl.fp8 import FP8, ScaleFormat, encode_scale, quantize_blockwise
from nemo_fp8rl.fp8.delta import DeltaError
from nemo_fp8rl.generation.weights.peer_source import PeerSource
from nemo_fp8rl.refit.deferred_checks import DeferredChecks
from nemo_fp8rl.refit.interface import Addresses, Recover, Transport
from nemo_fp8rl.refit.manifest import RefitError, Sources, TensorPart
from nemo_fp8rl.refit.message import Content
from nemo_fp8rl.refit.receiver.offered_places import OfferedPlaces
from nemo_fp8rl.refit.receiver.piece_receiver import IncomingLink, ReceivedPiece, receive_pieces
from nemo_fp8rl.refit.reports import LoadReport, SendReport
from nemo_fp8rl.refit.route_plan import Links
from nemo_fp8rl.refit.sender.sending_rank import SendingRank
from nemo_fp8rl.refit.sender.weight_sender import WeightSender
from nemo_fp8rl.refit.transport.handshake import connect
from nemo_fp8rl.refit.transport.link import HOST as HOST_MEMORY
from nemo_fp8rl.refit.transport.link import ReceivingEnd
from nemo_fp8rl.refit.transport.places import Offer
from nemo_fp8rl.refit.transport.shared_memory import domain
from nemo_fp8rl.workers import WorkerDied

HOST, TOKEN = "127.0.0.1", "token of the run"
TRANSPORTS = ["in_process", "shared_memory", "cuda_ipc", "collective", *(["nixl"] if find_spec("nixl") else [])]
"""That can be had here: nixl with `make test-nixl`."""
Layout = list[list[TensorPart]]
"""What each rank holds."""
Message = tuple[bytes, Tensor]


def fp8(name: str, rows: int, columns: int) -> TensorPart:
    return TensorPart.of(name, FP8, (rows, columns))


def bf16(name: str, *shape: int) -> TensorPart:
    return TensorPart.of(name, torch.bfloat16, shape)


def split(parts: Sequence[TensorPart], ranks: int, dim: int, replicate: bool) -> Layout:
    """Matrices along `dim`, in whole blocks where they are FP8; the rest on every rank, or on the first alone."""
    layout: Layout = [[] for _ in range(ranks)]
    for part in parts:
        if len(part.shape) != 2 or not all(part.shape):
            for held in layout if replicate else layout[:1]:
                held.append(part)
            continue
        step = part.format.weight_block[dim] if part.format else 1
        steps = -(-part.shape[dim] // step)
        borders = [min(part.shape[dim], steps * rank // ranks * step) for rank in range(ranks + 1)]
        for held, (a, b) in zip(layout, pairwise(borders), strict=True):
            region = list(part.region)
            region[dim] = (a, b)
            if a < b:
                held.append(part.cut(tuple(region)))
    return layout


def at_rest(count: Callable[[], int]) -> None:
    """Wait until it counts something, and then no further."""
    before = 0
    while (now := count()) == 0 or now != before:
        before = now
        time.sleep(0.3)


def random_weights(parts: Sequence[TensorPart], seed: int = 0) -> dict[str, Tensor]:
    """bf16, or float32 where the part is."""
    generator = torch.Generator().manual_seed(seed)
    return {
        part.name: torch.randn(part.shape, generator=generator).to(
            torch.float32 if part.dtype == "float32" else torch.bfloat16
        )
        for part in parts
    }


def as_whole(parts: Sequence[TensorPart], weights: Mapping[str, Tensor], fmt: ScaleFormat) -> dict[str, Content]:
    """What engines must hold of these weights: the specification, on whole tensors."""
    held = {}
    for part in parts:
        if part.format and all(part.shape):
            whole, encode = weights[part.name], encode_of(weights, part.name)
            q = quantize_blockwise(whole, format=part.format, scale_format=fmt, encode=encode, kernel="reference")
            held[part.name] = Content(q.data, q.scale_inv, None if q.global_scale is None else q.global_scale.view(1))
        else:
            held[part.name] = Content(weights[part.name].to(part.torch_dtype).contiguous())
    return held


def encode_of(weights: Mapping[str, Tensor], name: str) -> Tensor:
    """The factor of a global scale, of the whole tensor, for formats that have one."""
    return encode_scale(weights[name].abs().amax() if weights[name].numel() else torch.zeros(()), "pow2", 4)


def empty(part: TensorPart, device: torch.device = HOST_MEMORY) -> Content:
    """Of a part in memory before anything arrived."""
    return Content.of(part, torch.full((part.nbytes,), 0x11, dtype=torch.uint8, device=device))


@dataclass
class Tampered:
    """A receiving end whose messages `change(k, message)` replaces, k counting from 0, by none, one or several."""

    end: ReceivingEnd
    change: Callable[[int, Message], Sequence[Message]]
    seen: int = 0
    ready: deque[tuple[Message, int]] = field(default_factory=deque)
    given: deque[int] = field(default_factory=deque)
    owed: int = 0

    def receive(self) -> Message:
        while not self.ready:
            header, payload = self.end.receive()
            self.owed += 1  # of the link's buffers, given back with the last message made of them
            changed = list(self.change(self.seen, (header, payload)))
            self.seen += 1
            if changed:
                self.ready.extend((message, 0) for message in changed[:-1])
                self.ready.append((changed[-1], self.owed))
                self.owed = 0
        message, buffers = self.ready.popleft()
        self.given.append(buffers)
        return message

    def release(self) -> None:
        for _ in range(self.given.popleft()):
            self.end.release()

    reach = None

    def open_places(self, version: int, offer: Offer | None) -> None:
        """The source writes no places, because that would be no message to change."""
        self.end.open_places(version, None)

    def close(self) -> None:
        self.end.close()


class MemoryRank:
    """One engine rank. repacked: names of tensors that it cannot write in place, as those vLLM keeps otherwise."""

    def __init__(
        self, parts: Sequence[TensorPart], repacked: frozenset[str], device: torch.device = HOST_MEMORY
    ) -> None:
        self.parts = {part.name: part for part in parts}
        self.held = {part.name: empty(part, device) for part in parts}
        self.repacked, self.direct_names, self.version = repacked, frozenset[str](), -1
        self.offered = OfferedPlaces()
        self.links: list[IncomingLink] = []
        self.for_peers = PeerSource(device)

    def contents(self) -> list[tuple[TensorPart, Content]]:
        """`WeightStore.contents`."""
        if names := sorted(self.parts.keys() - self.direct_names):
            raise RefitError(f"vLLM keeps {names[0]} in a form of its own, which cannot be passed on")
        return [(part, self.held[name]) for name, part in self.parts.items()]

    def load(self, version: int, verify: bool, with_frozen: bool, each: Callable[[], None]) -> None:
        """`WeightStore.load`; `each` is called when a piece is written, before it is verified."""
        if version < self.version:
            raise RefitError(f"refit {version} is stale: this engine has had version {self.version}")
        self.for_peers.begin_load(with_frozen)
        checks, contents = DeferredChecks(), {name: self.held[name] for name in self.direct_names}
        places = self.offered.open(
            [link.end for link in self.links],
            version,
            [tensor for content in contents.values() for tensor in content.tensors if tensor.numel()],
            lambda: {name: (self.parts[name], content) for name, content in contents.items()},
        )
        for item in receive_pieces(self.links, version, checks=checks, with_frozen=with_frozen, places=places):
            self.for_peers.record(item)
            self._write(item, version)
            each()
            if verify:
                text = f"refit {version}: {item.part.name} in the engine is not what the trainer sent"
                checks.check_digest(self.at(item.part), item.digest, partial(RefitError, text))
        self.direct_names = frozenset(self.parts) - self.repacked
        self.version = version

    def compare(self, version: int, with_frozen: bool) -> None:
        for item in receive_pieces(self.links, version, with_frozen=with_frozen):
            assert item.content is not None
            if not item.content.equals(self.at(item.part)):
                raise RefitError(f"refit {version}: {item.part.name} in the engine is not what the trainer holds")

    def at(self, part: TensorPart) -> Content:
        """Views of the place of a piece."""
        return self.held[part.name].cut(self.parts[part.name], part.region)

    def _write(self, item: ReceivedPiece, version: int) -> None:
        target = self.at(item.part)
        if item.is_in_place:
            return
        if item.content is None and item.part.name not in self.direct_names:
            raise RefitError(f"refit {version}: a delta of {item.part.name}, which is kept in a form of its own")
        try:
            item.write_data(target.data)
        except DeltaError as error:
            raise RefitError(f"refit {version}: {item.part.name}: {error}") from None
        for stored, received in zip((target.scale_inv, target.global_scale), item.scales, strict=True):
            if stored is not None and received is not None:
                stored.copy_(received)


class MemoryEngine:
    """Its ranks work at once, in threads. Between the first byte of a version and its commit it reads nothing."""

    def __init__(self, layout: Layout, repacked: frozenset[str], device: torch.device = HOST_MEMORY) -> None:
        self.ranks = [MemoryRank(parts, repacked, device) for parts in layout]
        self.policy_version = self.loaded_version = -1
        self.died = False

    def kill(self) -> None:
        """As of a process that ends: no answer, no memory, no links."""
        self.died = True
        self.disconnect()
        for rank in self.ranks:
            rank.for_peers.end()

    def disconnect(self) -> None:
        for rank in self.ranks:
            for link in rank.links:
                link.end.close()
            rank.links = []

    def check(self) -> None:
        if self.died:
            raise WorkerDied("the engine was killed")

    def load(
        self, version: int, verify: bool, compare: bool, with_frozen: bool, each: Callable[[], None]
    ) -> LoadReport:
        self.check()
        self.policy_version = self.loaded_version = -1
        with ThreadPoolExecutor(len(self.ranks)) as threads:
            loads = [
                threads.submit(rank.compare, version, with_frozen)
                if compare
                else threads.submit(rank.load, version, verify, with_frozen, each)
                for rank in self.ranks
            ]
        self.check()
        for load in loads:
            load.result()
        self.loaded_version = version
        direct = frozenset().union(*(rank.direct_names for rank in self.ranks))
        repacked = frozenset().union(*(rank.parts.keys() - rank.direct_names for rank in self.ranks))
        return LoadReport(version, direct - repacked, 0.001, 0.0, repacked)

    def commit(self, version: int) -> None:
        self.check()
        if self.loaded_version != version:
            raise RefitError(f"refit {version} cannot be committed: the engine has loaded {self.loaded_version}")
        self.policy_version = version

    def read(self) -> dict[str, Content]:
        """All tensors, put together of its ranks' parts: what it would generate from. Raises RefitError if fenced."""
        self.check()
        if self.policy_version < 0:
            raise RefitError("this engine has not received weights that were committed: refit before generating")
        return self.memory()

    def memory(self) -> dict[str, Content]:
        """The same, committed or not."""
        wholes: dict[str, Content] = {}
        for rank in self.ranks:
            for name, part in rank.parts.items():
                whole = part.cut(full_region(part.shape))
                joined = wholes.setdefault(name, empty(whole)).cut(whole, part.region)
                for tensor, held in zip(joined.tensors, rank.held[name].tensors, strict=True):
                    tensor.copy_(held)
        return wholes


Hook = Callable[[str, int, MemoryEngine], None]
"""hook(when, engine's number, engine), when: stored, connect, load, piece, loaded, compare, commit, offer, give, given.
"""


class MemoryEngines:
    """`interface.WeightSink`. hook, wrap: what a test does at those times, and to the links of (engine, rank)."""

    def __init__(
        self,
        layout: Layout,
        count: int = 1,
        *,
        repacked: Collection[str] = (),
        max_restarts: int = 3,
        device: torch.device = HOST_MEMORY,
    ) -> None:
        self.layout, self.repacked, self.max_restarts, self.device = layout, frozenset(repacked), max_restarts, device
        self.engines = [MemoryEngine(layout, self.repacked, device) for _ in range(count)]
        self.restarts = 0
        self.lives, self.missing = [0] * count, set[int]()
        self.replacements: list[tuple[int, int | None]] = []  # (engine, life) of every call of `replace`
        self.loads: list[tuple[int, int, bool]] = []  # (engine, version, compare) of every load
        self.gifts: list[tuple[int, int, list[int], bool]] = []  # (source, version, engines, delta) of every pass
        self.hook: Hook = lambda when, number, engine: None
        self.wrap: Callable[[int, int, ReceivingEnd], ReceivingEnd] = lambda engine, rank, end: end
        self.timeout, self.limit = 20.0, 60.0
        self.located: list[list[int]] = []
        self.machines: Sequence[str] = ()
        """The domain of each engine, where that is to be another than this machine's."""

    def present_engines(self) -> list[int]:
        return list(range(len(self.engines)))

    def stored_parts(self, engine: int) -> list[Sequence[TensorPart]]:
        self._alive("stored", engine)
        return [list(rank.parts.values()) for rank in self.engines[engine].ranks]

    def domains(self, engines: Collection[int]) -> dict[int, list[str]]:
        self.located.append(sorted(engines))
        alive = [engine for engine in engines if not self.engines[engine].died]
        return {i: [self.machines[i] if self.machines else domain()] * len(self.layout) for i in alive}

    def connect(self, engine: int, links: Links, addresses: Addresses) -> None:
        self._alive("connect", engine)
        for number, rank in enumerate(self.engines[engine].ranks):
            rank.links = [
                IncomingLink(self.wrap(engine, number, self._end(address)), route)
                for address, route in zip(_column(addresses, number), _column(links.routes, number), strict=True)
                if address is not None
            ]

    def disconnect(self, engine: int) -> None:
        self.engines[engine].disconnect()

    def fence(self, engines: Collection[int]) -> dict[int, int]:
        for engine in engines:
            self.engines[engine].policy_version = -1
        return {engine: -1 if self.engines[engine].died else self.engines[engine].loaded_version for engine in engines}

    def load(
        self, version: int, engines: Collection[int], verify: bool, compare: bool, with_frozen: bool
    ) -> Mapping[int, LoadReport | Exception]:
        threads = ThreadPoolExecutor(len(engines) or 1)
        how = verify, compare, with_frozen
        loads = {engine: threads.submit(self._load, engine, version, *how) for engine in engines}
        in_time, _ = wait(loads.values(), self.limit)
        threads.shutdown(wait=False)
        return {engine: load.result() if load in in_time else self._hung(engine) for engine, load in loads.items()}

    def offer(self, source: int, engine: int, links: Links, transport: Transport) -> Addresses:
        self._alive("offer", source)
        how = transport, HOST, TOKEN, self.timeout
        ranks = zip(self.engines[source].ranks, *links, strict=True)
        return [rank.for_peers.offer(engine, *of_rank, *how) for rank, *of_rank in ranks]

    def withdraw(self, source: int, engine: int) -> None:
        for rank in self.engines[source].ranks:
            rank.for_peers.withdraw(engine)

    def start_push(self, source: int, version: int, engines: Collection[int], **how: bool) -> None:
        self._alive("give", source)
        self.gifts.append((source, version, sorted(engines), how["delta"]))
        if self.engines[source].loaded_version != version:
            raise RefitError(f"this engine has version {self.engines[source].loaded_version}")
        for rank in self.engines[source].ranks:
            rank.for_peers.start_push(rank.contents(), version, engines, **how)

    def finish_push(self, source: int) -> list[SendReport]:
        self._alive("given", source)
        return [rank.for_peers.finish_push() for rank in self.engines[source].ranks]

    def _hung(self, engine: int) -> Exception:
        self.engines[engine].kill()
        return WorkerDied(f"no answer in {self.limit:g} seconds")

    def report_deaths_to(self, recover: Recover) -> None:
        self.recover = recover

    def replace(self, engine: int, death: Exception, life: int | None = None) -> bool:
        self.replacements.append((engine, life))
        if life not in (None, self.lives[engine]):
            return False
        if self.restarts == self.max_restarts:
            raise RuntimeError(f"engine {engine} died after {self.restarts} restarts") from death
        self.restarts += 1
        self.lives[engine] += 1
        self.engines[engine] = MemoryEngine(self.layout, self.repacked, self.device)
        if life is not None:
            self.missing.add(engine)
        return True

    def readmit(self, engine: int) -> None:
        self.missing.remove(engine)

    def is_death(self, outcome: Exception) -> bool:
        return isinstance(outcome, WorkerDied)

    def commit(self, version: int, engines: Collection[int]) -> None:
        for engine in engines:
            self._alive("commit", engine)
            self.engines[engine].commit(version)

    def kill_and_restart(self, engine: int) -> None:
        """As of an engine that dies while it generates."""
        self.engines[engine].kill()
        assert self.recover(engine, WorkerDied("killed"), self.lives[engine], False)
        assert not self.missing

    def _load(
        self, number: int, version: int, verify: bool, compare: bool, with_frozen: bool
    ) -> LoadReport | Exception:
        engine = self.engines[number]
        self.loads.append((number, version, compare))
        try:
            self.hook("compare" if compare else "load", number, engine)
            loaded = engine.load(version, verify, compare, with_frozen, lambda: self.hook("piece", number, engine))
            self.hook("loaded", number, engine)
        except (RefitError, WorkerDied) as outcome:
            return WorkerDied("the engine was killed") if engine.died else outcome
        return loaded

    def _alive(self, when: str, engine: int) -> None:
        self.hook(when, engine, self.engines[engine])
        self.engines[engine].check()

    def _end(self, address: Any) -> ReceivingEnd:
        if not isinstance(address, list):
            return address
        host, port, name = address
        return connect((host, port), TOKEN, name, self.timeout, self.device)


def _column(rows: Sequence[Sequence[Any]], sink: int) -> list[Any]:
    return [row[sink] for row in rows]


class MemoryTrainer:
    """`interface.WeightSource` of real SendingRanks. reading(): called before each weight that a rank hands out."""

    def __init__(
        self,
        weights: dict[str, Tensor],
        layout: Layout,
        *,
        scale_format: ScaleFormat = "pow2",
        transport: Transport = "in_process",
        timeout: float = 60.0,
        device: torch.device = HOST_MEMORY,
    ) -> None:
        self.weights = {name: weight.to(device) for name, weight in weights.items()}
        self.layout, self.steps = layout, 0
        self.ranks = [
            SendingRank(
                WeightSender(parts, scale_format),
                transport=transport,
                host=HOST,
                token=TOKEN,
                timeout=timeout,
                device=device,
            )
            for parts in layout
        ]
        self.domains: Sequence[str] = [domain()] * len(layout)
        self.pushes: list[dict[str, Any]] = []
        self.reports: list[list[SendReport]] = []
        self.reading: Callable[[], None] = lambda: None
        self.died = False
        self.rooms_made = 0
        self.turn = RLock()

    def step(self, **weights: Tensor) -> None:
        with self.hold_weights():
            self.weights |= weights
            self.steps += 1

    def kill(self) -> None:
        """As of a process that ends: its links break and nothing answers."""
        self.died = True
        self.close()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def sources(self) -> Sources:
        self._check()
        return Sources(self.layout, self.domains)

    def hold_weights(self) -> RLock:
        return self.turn

    def updates(self) -> int:
        return self.steps

    def base_version(self) -> int:
        versions = {rank.sender.base_version for rank in self.ranks}
        return versions.pop() if len(versions) == 1 else -1

    def make_room(self) -> None:
        self.rooms_made += 1

    def offer(self, engine: int, links: Links) -> Addresses:
        self._check()
        return [rank.offer(engine, *of_rank) for rank, *of_rank in zip(self.ranks, *links, strict=True)]

    def withdraw(self, engine: int) -> None:
        for rank in self.ranks:
            rank.withdraw(engine)

    def start_push(self, version: int, engines: Collection[int], full_only: frozenset[str], **how: bool) -> None:
        self._check()
        self.pushes.append({"version": version, "engines": list(engines), "full_only": full_only, **how})
        for rank, parts in zip(self.ranks, self.layout, strict=True):
            rank.start(self._weights(parts), version, engines, full_only=full_only, **how)

    def finish_push(self) -> list[SendReport]:
        answers: list[SendReport | Exception] = []
        for rank in self.ranks:  # all of them, whatever one of them raises
            try:
                answers.append(rank.finish())
            except Exception as error:
                answers.append(error)
        self._check()
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        reports = [answer for answer in answers if isinstance(answer, SendReport)]
        self.reports.append(reports)
        return reports

    def _weights(self, parts: Sequence[TensorPart]) -> Iterator[tuple[str, Tensor]]:
        for part in parts:
            self.reading()
            yield part.name, self.weights[part.name][tuple(slice(a, b) for a, b in part.region)]

    def _check(self) -> None:
        if self.died:
            raise WorkerDied("the trainer was killed")
