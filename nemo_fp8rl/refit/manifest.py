"""What a complete refit is: who holds which part of which tensor, and which pieces travel from whom to whom.

Sources (trainer ranks) and sinks (engine ranks) say what they hold as `TensorPart`s; `Sources.routes` cuts that into
pieces, so that each sink receives what it stores and nothing else, once, and refuses, by name, what does not fit
together. Both sides then speak of a piece by its place in the route's list.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations, product

import torch

from nemo_fp8rl.common.region import Region, index, overlap, shape_of, whole
from nemo_fp8rl.fp8 import BLOCK, scale_shape

FP8 = "float8_e4m3fn"
COPIES = 4
"""Copies of a part from which one engine takes its share of the tensors, at most: each is more links."""


class RefitError(RuntimeError):
    """A refit that must not be applied: the message names the tensors."""


@dataclass(frozen=True)
class TensorPart:
    """What a rank holds, or what travels, of one tensor: `region` of the `shape` that it has as a whole.

    dtype is torch's name without the prefix. A part in float8_e4m3fn has its scales with it, float32, one for each
    128x128 block that its region holds.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    region: Region

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, shape: Sequence[int], region: Region | None = None) -> "TensorPart":
        """region: None for all of it."""
        return cls(name, str(dtype).removeprefix("torch."), tuple(shape), whole(shape) if region is None else region)

    @property
    def is_fp8(self) -> bool:
        return self.dtype == FP8

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @cached_property
    def size(self) -> tuple[int, ...]:
        """The shape of the region."""
        return shape_of(self.region)

    @cached_property
    def data_bytes(self) -> int:
        return math.prod(self.size) * self.torch_dtype.itemsize

    @cached_property
    def scale_bytes(self) -> int:
        return 4 * math.prod(scale_shape(self.size, BLOCK)) if self.is_fp8 else 0

    @property
    def nbytes(self) -> int:
        return self.data_bytes + self.scale_bytes

    def cut(self, region: Region) -> "TensorPart":
        return TensorPart(self.name, self.dtype, self.shape, region)

    def local(self, region: Region) -> tuple[slice, ...]:
        """How to take the region out of a tensor that holds this part."""
        return index(region, self.region)


def blocks_of(region: Region) -> Region:
    """The region of the scales that belong to this region of an FP8 matrix."""
    return tuple((a // size, -(-b // size)) for (a, b), size in zip(region, BLOCK, strict=True))


def to_json(parts: Iterable[TensorPart]) -> str:
    return json.dumps([asdict(part) for part in parts])


def from_json(text: str) -> tuple[TensorPart, ...]:
    return tuple(
        TensorPart(p["name"], p["dtype"], tuple(p["shape"]), tuple((a, b) for a, b in p["region"]))
        for p in json.loads(text)
    )


Route = tuple[TensorPart, ...]
"""The pieces that go from one source to one sink."""


class Sources:
    """What the trainer's ranks hold: copies of the same part are each other's substitutes.

    domains: of each rank; what goes from a rank to another one of its domain stays within the machine. Raises
    RefitError where ranks do not agree on a tensor, their parts of one overlap, or one in FP8 is not of whole blocks.
    """

    def __init__(self, holdings: Sequence[Sequence[TensorPart]], domains: Sequence[str] | None = None) -> None:
        self.holdings, self.domains = holdings, domains or [""] * len(holdings)
        self._order = [{part.name: place for place, part in enumerate(parts)} for parts in holdings]
        self._held: dict[str, dict[TensorPart, list[int]]] = {}
        for source, parts in enumerate(holdings):
            if len(self._order[source]) < len(parts):
                raise RefitError(f"trainer rank {source} holds a tensor twice")
            for part in parts:
                self._held.setdefault(part.name, {}).setdefault(part, []).append(source)
        for name, parts_held in self._held.items():
            for part in parts_held:
                _check_blocks("trainer", part)
            if len({(part.dtype, part.shape) for part in parts_held}) > 1:
                raise RefitError(f"the trainer's ranks do not agree on the shape and the dtype of {name}")
            if any(overlap(a.region, b.region) is not None for a, b in combinations(parts_held, 2)):
                raise RefitError(f"two trainer ranks hold parts of {name} that overlap")
        self.names = frozenset(self._held)

    def routes(
        self,
        sinks: Sequence[Sequence[TensorPart]],
        piece_bytes: int,
        *,
        engine: int = 0,
        domains: Sequence[Sequence[str]] | None = None,
    ) -> list[list[Route]]:
        """[source][sink] -> the pieces, in the source's order, none larger than `piece_bytes` unless a band of rows is.

        sinks: what each rank of this engine stores. domains: of each engine, of each of its ranks. Of ranks with the
        same part those of the sink's domain send it; the engines that could have it of the same ones share them out.

        Raises RefitError unless the sources hold all that the sinks store, alike in shape and dtype, in whole blocks
        where it is FP8; and nothing that no sink stores.
        """
        _check_names({part.name for parts in sinks for part in parts}, set(self.names))
        wanted: dict[tuple[int, int], dict[str, list[TensorPart]]] = {}
        domains = domains or [[""] * len(sinks)]
        choice = _Choice(self.domains, engine, domains)
        for sink, parts in enumerate(sinks):
            for part in parts:
                _check_blocks("engine", part)
                missing = math.prod(part.size)
                for held, holders in self._held[part.name].items():
                    if (held.dtype, held.shape) != (part.dtype, part.shape):
                        raise RefitError(
                            f"{part.name} is {held.dtype} {list(held.shape)} in the trainer and {part.dtype} "
                            f"{list(part.shape)} in the engine"
                        )
                    common = overlap(held.region, part.region)
                    if common is not None:
                        missing -= math.prod(shape_of(common))
                        source = choice.among(holders, held, domains[engine][sink])
                        pieces = _small_enough(part.cut(common), piece_bytes)
                        wanted.setdefault((source, sink), {}).setdefault(part.name, []).extend(pieces)
                if missing:
                    raise RefitError(
                        f"the trainer's ranks hold only a part of {part.name}: {missing} values are missing"
                    )
        routes: list[list[Route]] = [[()] * len(sinks) for _ in self.domains]
        for (source, sink), by_name in wanted.items():
            names = sorted(by_name, key=self._order[source].__getitem__)
            routes[source][sink] = tuple(piece for name in names for piece in by_name[name])
        return routes

    def engines_per_source(self, domains: Sequence[Sequence[str]]) -> list[int]:
        """How many engines each source sends something to, at most. domains: as in `routes`."""
        copies = {tuple(holders) for held in self._held.values() for holders in held.values()}
        served = [0] * len(self.domains)
        for engine, of_ranks in enumerate(domains):
            choice = _Choice(self.domains, engine, domains)
            asked = product(copies, set(of_ranks))
            for source in {source for holders, here in asked for source in choice.candidates(holders, here)}:
                served[source] += 1
        return served


class _Choice:
    """Which of the ranks that hold the same part sends it to an engine; domains as `Sources.routes` has them."""

    def __init__(self, sources: Sequence[str], engine: int, domains: Sequence[Sequence[str]]) -> None:
        self._sources, self._engine, self._everyone = sources, engine, range(len(domains))
        self._peers = {here: [i for i in self._everyone if here in domains[i]] for here in domains[engine]}
        self._to_send = [0] * len(sources)
        self._chosen: dict[tuple[TensorPart, tuple[int, ...]], int] = {}

    def candidates(self, holders: Sequence[int], here: str) -> tuple[int, ...]:
        """The sources on the machine where there are any; of these the engine's own when its peers share them out."""
        near = [source for source in holders if self._sources[source] == here]
        copies, peers = (near, self._peers[here]) if near else (holders, self._everyone)
        return tuple(copies[peers.index(self._engine) % len(copies) :: len(peers)][:COPIES])

    def among(self, holders: Sequence[int], part: TensorPart, here: str) -> int:
        """The candidate with the least to send; the same one for all ranks of the engine there."""
        own = self.candidates(holders, here)
        if (part, own) not in self._chosen:
            source = self._chosen[part, own] = min(own, key=self._to_send.__getitem__)
            self._to_send[source] += part.nbytes
        return self._chosen[part, own]


def cross_domain_share(planned: Sequence[Sequence[Route]], sources: Sequence[str], sinks: Sequence[str]) -> float:
    """Share, of the bytes of these routes [source][sink], of those that leave the source's domain."""
    total = leaving = 0
    for source, row in zip(sources, planned, strict=True):
        for sink, route in zip(sinks, row, strict=True):
            nbytes = sum(piece.nbytes for piece in route)
            total += nbytes
            leaving += nbytes if source != sink else 0
    return leaving / total if total else 0.0


def _small_enough(piece: TensorPart, limit: int) -> list[TensorPart]:
    """The piece in bands of rows."""
    if piece.nbytes <= limit or not piece.region:
        return [piece]
    (top, bottom), *rest = piece.region
    step = BLOCK[0] if piece.is_fp8 else 1
    rows = max(1, limit * (bottom - top) // piece.nbytes // step) * step
    return [piece.cut(((max(top, a), min(bottom, a + rows)), *rest)) for a in range(top - top % rows, bottom, rows)]


def _check_blocks(side: str, part: TensorPart) -> None:
    """Raise unless an FP8 part is a matrix that begins and ends at block borders, or where the tensor ends."""
    if not part.is_fp8:
        return
    borders = zip(part.region, part.shape, BLOCK, strict=False)
    if len(part.shape) != len(BLOCK) or any(a % n or (b % n and b != size) for (a, b), size, n in borders):
        raise RefitError(
            f"{part.name}: the {side} holds {[list(side) for side in part.region]} of {list(part.shape)}, and FP8 is "
            f"shared out in blocks of {BLOCK[0]}x{BLOCK[1]}: take a size of tensor parallelism that keeps blocks whole"
        )


def _check_names(wanted: set[str], got: set[str]) -> None:
    missing, unknown = sorted(wanted - got), sorted(got - wanted)
    if missing:
        raise RefitError(f"the refit lacks {len(missing)} tensors that the engine needs, among them {missing[0]}")
    if unknown:
        raise RefitError(f"the refit holds {len(unknown)} tensors unknown to the engine, among them {unknown[0]}")
