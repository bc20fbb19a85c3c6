"""The routes from every trainer rank to every rank of an engine, and the size of their buckets.

A link has two buckets. The buckets of all links of a process have together at most 2 x `bucket_bytes`.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from nemo_fp8rl.refit.manifest import Route, Sources, TensorPart
from nemo_fp8rl.refit.transport.link import BUFFERS

ALIGNMENT = 64
"""Bytes; each entry in a bucket begins at a multiple of this."""
PIECE_BYTES = 1 << 25
"""The largest piece, in bytes: the unit that is quantized, sent and verified."""
BUCKETS = 16
"""The least number of buckets per version, where pieces are small enough: both sides work at once, in their caches."""


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
    """Plan the links of one engine. The plan assumes that all engines store the same parts.

    A bucket may be larger than its share where a piece cannot be cut smaller: a band of 128 rows of an FP8 matrix.

    stored:          the parts that each rank of this engine stores
    bucket_bytes:    bound of the buckets of a process, of which it has two per link
    engine, domains: as in `Sources.routes`
    """
    piece_bytes = min(PIECE_BYTES, bucket_bytes)
    routes = sources.routes(stored, piece_bytes, engine=engine, domains=domains)
    shares = _link_shares(routes, sources.engines_per_source(domains or [[""] * len(stored)]), bucket_bytes)
    if (smallest := min((share for row in shares for share in row if share), default=piece_bytes)) < piece_bytes:
        routes = sources.routes(stored, smallest, engine=engine, domains=domains)
    capacities = [
        [link_capacity(*link) for link in zip(*rows, strict=True)] for rows in zip(routes, shares, strict=True)
    ]
    return Links(routes, capacities)


def _link_shares(
    routes: Sequence[Sequence[Route]], engines_per_source: Sequence[int], bucket_bytes: int
) -> list[list[int]]:
    """Return each link's share of `bucket_bytes`: a source has links to all its engines, a sink to all its sources."""
    links_into = [sum(map(bool, column)) for column in zip(*routes, strict=True)]
    links_from = [sum(map(bool, row)) * engines for row, engines in zip(routes, engines_per_source, strict=True)]
    return [
        [bucket_bytes // max(links_from[source], links_into[sink]) if route else 0 for sink, route in enumerate(row)]
        for source, row in enumerate(routes)
    ]


def link_capacity(route: Route, share: int) -> int:
    """Return the bytes of each of a link's two buckets; share: their bound, where no piece is larger."""
    sizes = [align_up(piece.nbytes) for piece in route]
    target = min(share, sum(sizes) // BUCKETS)
    return max(*sizes, target - target % ALIGNMENT) if sizes else 0


def bucket_memory(engines: Collection[list[list[int]]]) -> int:
    """Return the bytes of the buckets of all links of a process: of the process that has most.

    engines:  `Links.capacities` of each engine
    """
    sources = [sum(map(sum, rows)) for rows in zip(*engines, strict=True)]
    sinks = [sum(column) for capacities in engines for column in zip(*capacities, strict=True)]
    return BUFFERS * max(sources + sinks)


def align_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
