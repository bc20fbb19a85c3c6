"""The content of a complete refit: which rank has which part of which tensor, and which pieces travel where.

Sources (trainer ranks) and sinks (engine ranks) describe their parts as `TensorPart`s. `Sources.routes` cuts these
parts into pieces, so that each sink receives every value that it stores exactly once, and nothing else. It raises
RefitError, with the tensor's name, where the two sides do not fit together. Both sides then name a piece by its index
in the route.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise, product

import torch

from nemo_fp8rl.common.region import Region, full_region, overlap, region_slices, shape_of
from nemo_fp8rl.fp8 import FORMATS, Format, scale_shape
from nemo_fp8rl.fp8.block_scaled import DATA_DTYPES, SCALE_DTYPES

GLOBAL_BYTES = 4
"""Bytes of a global scale, float32."""
EXPERTS = ".experts."
"""In the names of experts' matrices and of their stacks."""
COPIES = 4
"""The largest number of copies of a part among which one engine spreads its tensors; each copy costs more links."""
PIECE_COST = 1 << 19
"""The bytes of a piece that take as long as what is done for each piece, however small it is."""


class RefitError(RuntimeError):
    """A refit that must not be applied. The message names the tensors."""


@dataclass(frozen=True)
class TensorPart:
    """One tensor's part that a rank has, or that travels.

    The matrices of a layer's experts are one tensor [experts, rows, columns] (`expert_stacks`).

    name:   the HF name of the tensor
    dtype:  the name of a format, whose parts include their scales, or torch's name without the prefix
    shape:  the shape of the whole tensor
    region: (start, end) in each dimension of the whole tensor
    is_frozen: the trainer never changes it, so it travels to an engine once
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    region: Region
    is_frozen: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        dtype: torch.dtype | Format,
        shape: Sequence[int],
        region: Region | None = None,
        is_frozen: bool = False,
    ) -> "TensorPart":
        """Make a part; the default region is the whole tensor."""
        kind = dtype.name if isinstance(dtype, Format) else str(dtype).removeprefix("torch.")
        return cls(name, kind, tuple(shape), full_region(shape) if region is None else region, is_frozen)

    @cached_property
    def is_stack(self) -> bool:
        """True for matrices of experts."""
        return len(self.shape) == 3 and EXPERTS in self.name

    @cached_property
    def format(self) -> Format | None:
        """The format of a quantized part; None for other parts."""
        return FORMATS.get(self.dtype)

    @cached_property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the data in memory."""
        if self.format is not None:
            return DATA_DTYPES[self.format.element]
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @cached_property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of a quantized part's block scales."""
        assert self.format is not None
        return SCALE_DTYPES[self.format.scale]

    @cached_property
    def size(self) -> tuple[int, ...]:
        """The shape of the region."""
        return shape_of(self.region)

    @cached_property
    def data_shape(self) -> tuple[int, ...]:
        """The shape of the region in memory."""
        return self.size if self.format is None else self.format.data_shape(self.size)

    @cached_property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the block scales of the region."""
        assert self.format is not None
        return scale_shape(self.size, self.format.weight_block)

    @cached_property
    def data_bytes(self) -> int:
        return math.prod(self.data_shape) * self.torch_dtype.itemsize

    @cached_property
    def scale_bytes(self) -> int:
        """Bytes of the block scales and of the global scales."""
        return self.global_bytes + (self.format.scale_itemsize * math.prod(self.scale_shape) if self.format else 0)

    @cached_property
    def global_bytes(self) -> int:
        """Bytes of the global scales, one of each matrix."""
        return GLOBAL_BYTES * math.prod(self.size[:-2]) if self.format is not None and self.format.has_global else 0

    @cached_property
    def nbytes(self) -> int:
        return self.data_bytes + self.scale_bytes

    @cached_property
    def bf16_bytes(self) -> int:
        """The bytes that a quantized part has in bfloat16; of another part, its own."""
        return 2 * math.prod(self.size) if self.format else self.data_bytes

    @property
    def matrix(self) -> "TensorPart":
        """The part of each matrix of a part of a stack."""
        return replace(self, shape=self.shape[1:], region=self.region[1:])

    def cut(self, region: Region) -> "TensorPart":
        return replace(self, region=region)

    def local(self, region: Region) -> tuple[slice, ...]:
        """Return the index of the region within a tensor that has the size of this part."""
        return region_slices(region, self.region)

    def local_data(self, region: Region) -> tuple[slice, ...]:
        """Return the index of the region within the bytes of this part, which may hold two values each."""
        if self.format is None or self.format.values_per_byte == 1:
            return self.local(region)
        *rows, columns = self.local(region)
        return (*rows, slice(columns.start // 2, columns.stop // 2))

    def local_scales(self, region: Region) -> tuple[slice, ...]:
        """Return the index of the region's block scales within those of this part."""
        assert self.format is not None
        blocks = (blocks_of(each, self.format) for each in (region, self.region))
        return region_slices(*blocks)


def blocks_of(region: Region, format: Format) -> Region:
    """Return the region of the block scales that belong to this region of a quantized matrix, or of a stack of them."""
    matrices = region[:-2]
    return matrices + tuple((a // n, -(-b // n)) for (a, b), n in zip(region[-2:], format.weight_block, strict=True))


def to_json(parts: Iterable[TensorPart]) -> str:
    return json.dumps([asdict(part) for part in parts])


def from_json(text: str) -> tuple[TensorPart, ...]:
    return tuple(
        TensorPart(
            p["name"], p["dtype"], tuple(p["shape"]), tuple((a, b) for a, b in p["region"]), bool(p["is_frozen"])
        )
        for p in json.loads(text)
    )


Route = tuple[TensorPart, ...]
"""The pieces that one source sends to one sink, in order."""


class Sources:
    """The parts of all trainer ranks. Ranks with the same part can replace each other.

    holdings: the parts of each rank
    domains:  the domain of each rank, such as its machine: traffic between ranks of one domain stays in the machine
    Raises:   RefitError if ranks disagree about a tensor, if their parts of a tensor overlap, or if a quantized part
              does not consist of whole blocks
    """

    def __init__(self, holdings: Sequence[Sequence[TensorPart]], domains: Sequence[str] | None = None) -> None:
        self.holdings, self.domains = holdings, domains or [""] * len(holdings)
        self._order = [{part.name: position for position, part in enumerate(parts)} for parts in holdings]
        self._holders: dict[str, dict[TensorPart, list[int]]] = {}
        for source, parts in enumerate(holdings):
            if len(self._order[source]) < len(parts):
                raise RefitError(f"trainer rank {source} holds a tensor twice")
            for part in parts:
                self._holders.setdefault(part.name, {}).setdefault(part, []).append(source)
        for name, holders in self._holders.items():
            for part in holders:
                _check_blocks("trainer", part)
            if len({(part.dtype, part.shape) for part in holders}) > 1:
                raise RefitError(f"the trainer's ranks do not agree on the shape and the dtype of {name}")
            if any(overlap(a.region, b.region) is not None for a, b in combinations(holders, 2)):
                raise RefitError(f"two trainer ranks hold parts of {name} that overlap")
        self.names = frozenset(self._holders)

    def routes(
        self,
        sinks: Sequence[Sequence[TensorPart]],
        piece_bytes: int,
        *,
        engine: int = 0,
        domains: Sequence[Sequence[str]] | None = None,
    ) -> list[list[Route]]:
        """Return the pieces from each source to each sink of one engine, as [source][sink], in the source's order.

        Among ranks with the same part, one in the sink's domain sends it. Engines that could use the same ranks share
        them out.

        sinks:       the parts that each rank of this engine stores
        piece_bytes: upper bound of a piece; only a piece of one band of rows may be larger
        engine:      the number of this engine
        domains:     the domain of each rank of each engine
        Raises:      RefitError unless the sources have all that the sinks store, with the same shapes and dtypes and,
                     where they are quantized, in whole blocks, and nothing that no sink stores
        """
        _check_names({part.name for parts in sinks for part in parts}, set(self.names))
        pieces: dict[tuple[int, int], dict[str, list[TensorPart]]] = {}
        domains = domains or [[""] * len(sinks)]
        needs: list[tuple[int, TensorPart, list[int], Region]] = []
        for sink, parts in enumerate(sinks):
            for part in parts:
                _check_blocks("engine", part)
                missing = math.prod(part.size)
                for source_part, holders in self._holders[part.name].items():
                    _check_match(source_part, part)
                    common = overlap(source_part.region, part.region)
                    if common is not None:
                        missing -= math.prod(shape_of(common))
                        needs.append((sink, source_part, holders, common))
                if missing:
                    raise RefitError(
                        f"the trainer's ranks hold only a part of {part.name}: {missing} values are missing"
                    )
        choice = _SourceChoice(self.domains, engine, domains)
        choice.share_out((holders, part, domains[engine][sink]) for sink, part, holders, _ in needs)
        for sink, part, holders, common in needs:
            source = choice.source(holders, part, domains[engine][sink])
            bands = split_rows(part.cut(common), piece_bytes)
            pieces.setdefault((source, sink), {}).setdefault(part.name, []).extend(bands)
        routes: list[list[Route]] = [[()] * len(sinks) for _ in self.domains]
        for (source, sink), by_name in pieces.items():
            names = sorted(by_name, key=self._order[source].__getitem__)
            routes[source][sink] = tuple(piece for name in names for piece in by_name[name])
        return routes

    def engines_per_source(self, domains: Sequence[Sequence[str]]) -> list[int]:
        """Return an upper bound of the number of engines to which each source sends. domains: as in `routes`."""
        copies = {tuple(ranks) for holders in self._holders.values() for ranks in holders.values()}
        counts = [0] * len(self.domains)
        for engine, rank_domains in enumerate(domains):
            choice = _SourceChoice(self.domains, engine, domains)
            pairs = product(copies, set(rank_domains))
            for source in {source for ranks, domain in pairs for source in choice.candidates(ranks, domain)}:
                counts[source] += 1
        return counts


class _SourceChoice:
    """Chooses which of the ranks with the same part sends it to an engine. domains: as in `Sources.routes`."""

    def __init__(self, sources: Sequence[str], engine: int, domains: Sequence[Sequence[str]]) -> None:
        self._sources, self._engine, self._engines = sources, engine, range(len(domains))
        self._peers = {domain: [i for i in self._engines if domain in domains[i]] for domain in domains[engine]}
        self._choices: dict[tuple[TensorPart, tuple[int, ...]], int] = {}

    def candidates(self, holders: Sequence[int], domain: str) -> tuple[int, ...]:
        """Return this engine's share of the sources in the domain, or of all sources where the domain has none."""
        near = [source for source in holders if self._sources[source] == domain]
        copies, peers = (near, self._peers[domain]) if near else (holders, self._engines)
        return tuple(copies[peers.index(self._engine) % len(copies) :: len(peers)][:COPIES])

    def share_out(self, needs: Iterable[tuple[Sequence[int], TensorPart, str]]) -> None:
        """Choose a source for every part: of those that several have, the largest first, whoever has least to send.

        needs: (the part's holders, part, domain) of each rank of the engine that needs it
        """
        ranks = Counter((part, self.candidates(holders, domain)) for holders, part, domain in needs)
        load = [0] * len(self._sources)
        for part, candidates in sorted(ranks, key=lambda key: (len(key[1]) > 1, -key[0].nbytes)):
            source = self._choices[part, candidates] = min(candidates, key=load.__getitem__)
            load[source] += part.nbytes + PIECE_COST * ranks[part, candidates]

    def source(self, holders: Sequence[int], part: TensorPart, domain: str) -> int:
        """Return the source of a part; the same one for all ranks of the engine in a domain."""
        return self._choices[part, self.candidates(holders, domain)]


def cross_domain_share(routes: Sequence[Sequence[Route]], sources: Sequence[str], sinks: Sequence[str]) -> float:
    """Return the share of the bytes of routes [source][sink] that leave the domain of their source, 0 to 1."""
    total = leaving = 0
    for source, row in zip(sources, routes, strict=True):
        for sink, route in zip(sinks, row, strict=True):
            nbytes = sum(piece.nbytes for piece in route)
            total += nbytes
            leaving += nbytes if source != sink else 0
    return leaving / total if total else 0.0


def split_rows(piece: TensorPart, limit: int) -> list[TensorPart]:
    """Split the piece into bands of at most `limit` bytes; a band has at least one row, or one row of blocks.

    A band of a stack consists of whole matrices, or of rows of one.
    """
    if piece.nbytes <= limit or not piece.region:
        return [piece]
    (top, bottom), *rest = piece.region
    step = piece.format.weight_block[0] if piece.format is not None and not piece.is_stack else 1
    rows = max(1, limit * (bottom - top) // piece.nbytes // step) * step
    if piece.is_stack:
        count = -(-(bottom - top) // rows)
        borders = [top + (bottom - top) * i // count for i in range(count + 1)]
        bands = [piece.cut((pair, *rest)) for pair in pairwise(borders)]
        return [part for band in bands for part in _split_matrix(band, limit)]
    return [piece.cut(((max(top, a), min(bottom, a + rows)), *rest)) for a in range(top - top % rows, bottom, rows)]


def _split_matrix(piece: TensorPart, limit: int) -> list[TensorPart]:
    """Split a stack of one matrix that is above the limit into bands of its rows."""
    if piece.nbytes <= limit:
        return [piece]
    first = piece.region[0]
    rows = piece.matrix
    return [piece.cut((first, *band.region)) for band in split_rows(rows, limit)]


def _check_match(source: TensorPart, sink: TensorPart) -> None:
    if (source.dtype, source.shape) != (sink.dtype, sink.shape):
        raise RefitError(
            f"{sink.name} is {source.dtype} {list(source.shape)} in the trainer and {sink.dtype} {list(sink.shape)} "
            "in the engine"
        )


def _check_blocks(side: str, part: TensorPart) -> None:
    """Raise unless a quantized part is a matrix that begins and ends at block borders, or where the tensor ends."""
    if part.format is None:
        return
    block, is_matrix = part.format.weight_block, len(part.shape) == 2 or part.is_stack
    borders = zip(part.region[-2:], part.shape[-2:], block, strict=False)
    if not is_matrix or any(a % n or (b % n and b != size) for (a, b), size, n in borders):
        raise RefitError(
            f"{part.name}: the {side} holds {[list(bounds) for bounds in part.region]} of {list(part.shape)}, and "
            f"{part.dtype} is split into blocks of {block[0]}x{block[1]}: choose a tensor parallel size that keeps "
            "blocks whole"
        )


def _check_names(needed: set[str], sent: set[str]) -> None:
    missing, unknown = sorted(needed - sent), sorted(sent - needed)
    if missing:
        raise RefitError(f"the refit lacks {len(missing)} tensors that the engine needs, among them {missing[0]}")
    if unknown:
        raise RefitError(f"the refit holds {len(unknown)} tensors unknown to the engine, among them {unknown[0]}")
