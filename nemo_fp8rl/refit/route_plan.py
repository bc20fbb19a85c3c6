"""What goes from every trainer rank to every rank of an engine, and in buckets of what size.

A link has two buckets; those of all links of a process together are at most `bucket_bytes` large, twice.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from nemo_fp8rl.refit.manifest import Route, Sources, TensorPart
from nemo_fp8rl.refit.transport.link import BUFFERS

ALIGNMENT = 64
"""Bytes to which each entry in a bucket is aligned."""
PIECE_BYTES = 1 << 24
"""Bytes of what is quantized, sent and verified at once, at most."""
BUCKETS = 16
"""Least number of buckets of a version, where pieces are small enough: both sides work at once, in their caches."""


class Links(NamedTuple):
    """The links from the trainer's ranks (sources) to the ranks of one engine (sinks).

    All that concerns links is indexed [source][sink], from the plan to the engine's rank that picks its column.

    routes:      [source][sink], the pieces that the source sends to the sink; an empty route is no link
    capacities:  [source][sink], bytes of each of the link's two buckets; 0 where there is no link
    """

    routes: list[list[Route]]
    capacities: list[list[int]]


def plan(
    sources: Sources,
    stored: Sequence[Sequence[TensorPart]],
    bucket_bytes: int,
    engine: int = 0,
    domains: Sequence[Sequence[str]] | None = None,
) -> Links:
    """stored, engine, domains: see `Sources.routes`. Other engines are taken to store what this one does.

    A piece that cannot be cut smaller, a band of 128 rows, may make a bucket larger than its share.
    """
    piece_bytes = min(PIECE_BYTES, bucket_bytes)
    routes = sources.routes(stored, piece_bytes, engine=engine, domains=domains)
    shares = _shares(routes, sources.engines_per_source(domains or [[""] * len(stored)]), bucket_bytes)
    if (smallest := min((share for row in shares for share in row if share), default=piece_bytes)) < piece_bytes:
        routes = sources.routes(stored, smallest, engine=engine, domains=domains)
    capacities = [[_capacity(*link) for link in zip(*rows, strict=True)] for rows in zip(routes, shares, strict=True)]
    return Links(routes, capacities)


def _shares(routes: Sequence[Sequence[Route]], engines_per_source: Sequence[int], bucket_bytes: int) -> list[list[int]]:
    """The share of `bucket_bytes` of each link: its source has links to other engines, its sink to other sources."""
    into = [sum(map(bool, column)) for column in zip(*routes, strict=True)]
    out = [sum(map(bool, row)) * engines for row, engines in zip(routes, engines_per_source, strict=True)]
    return [
        [bucket_bytes // max(out[source], into[sink]) if route else 0 for sink, route in enumerate(row)]
        for source, row in enumerate(routes)
    ]


def _capacity(route: Route, share: int) -> int:
    sizes = [align_up(piece.nbytes) for piece in route]
    wanted = min(share, sum(sizes) // BUCKETS)
    return max(*sizes, wanted - wanted % ALIGNMENT) if sizes else 0


def bucket_memory(engines: Collection[list[list[int]]]) -> int:
    """Return the bytes of the buckets of all links of a process: of the process that has most.

    engines:  `Links.capacities` of each engine
    """
    sources = [sum(map(sum, rows)) for rows in zip(*engines, strict=True)]
    sinks = [sum(column) for capacities in engines for column in zip(*capacities, strict=True)]
    return BUFFERS * max(sources + sinks)


def align_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
