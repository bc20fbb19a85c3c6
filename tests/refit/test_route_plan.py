"""The buckets of a process have at most `bucket_bytes` together; a small version has small buckets."""

from collections import Counter

from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemo_fp8rl.fp8 import FP8
from nemo_fp8rl.refit.manifest import Sources, TensorPart
from nemo_fp8rl.refit.route_plan import ALIGNMENT, BUCKETS, PIECE_BYTES, align_up, bucket_memory, plan

SHAPE = (1024, 128)
BAND = 128 * 128 + 4
"""Bytes of a piece that cannot be cut further."""
MATRICES = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(12)]


def rows(ranks: int) -> list[list[TensorPart]]:
    """Return the parts of so many ranks, with all matrices cut into bands of rows."""
    step = SHAPE[0] // ranks
    return [
        [TensorPart.of(name, FP8, SHAPE, ((i * step, (i + 1) * step), (0, SHAPE[1]))) for name in MATRICES]
        for i in range(ranks)
    ]


@settings(deadline=None)
@given(
    trainer=st.sampled_from([1, 2, 4, 8]),
    copies=st.integers(1, 4),
    engine=st.sampled_from([1, 2, 4]),
    engines=st.integers(1, 6),
    bucket_bytes=st.integers(200, 10_000).map(lambda kib: kib << 10),
    machines=st.lists(st.sampled_from("ab"), min_size=64, max_size=64),
)
@example(trainer=8, copies=1, engine=4, engines=6, bucket_bytes=200 << 10, machines=["a"] * 64)
@example(trainer=1, copies=2, engine=4, engines=5, bucket_bytes=200 << 10, machines=["a", *"ab" * 31, "b"])
@example(trainer=1, copies=4, engine=1, engines=4, bucket_bytes=10_000 << 10, machines=["a"] * 64)
def test_all_links_of_a_process_have_one_bound(trainer, copies, engine, engines, bucket_bytes, machines):
    sources = Sources(rows(trainer) * copies, machines[: trainer * copies])
    domains = [machines[32 + i * engine : 32 + (i + 1) * engine] for i in range(engines)]
    of_sources: Counter[int] = Counter()
    for number in range(engines):
        routes, capacities = plan(sources, rows(engine), bucket_bytes, number, domains)
        of_sinks: Counter[int] = Counter()
        for source, row in enumerate(capacities):
            for sink, capacity in enumerate(row):
                sizes = [align_up(piece.nbytes) for piece in routes[source][sink]]
                assert bool(capacity) == bool(sizes)
                assert capacity % ALIGNMENT == 0 and capacity >= max(sizes, default=0)
                assert capacity <= max(*sizes, sum(sizes) // BUCKETS) if sizes else True
                if capacity > align_up(BAND):  # which no link goes below, and a process with many so above the bound
                    of_sources[source] += capacity
                    of_sinks[sink] += capacity
        assert all(total <= bucket_bytes for total in of_sinks.values())
    assert all(total <= bucket_bytes for total in of_sources.values())


def test_one_link_has_the_whole_bound_and_sixteen_buckets():
    large = [TensorPart.of("model.layers.0.mlp.up_proj.weight", FP8, (1 << 17, 1 << 14))]
    assert plan(Sources([large]), [large], 64 << 20)[1] == [[64 << 20]]
    ((route,),), ((capacity,),) = plan(Sources([large]), [large], 256 << 20)
    total = sum(align_up(piece.nbytes) for piece in route)
    assert total // BUCKETS - ALIGNMENT < capacity <= total // BUCKETS < 256 << 20
    assert max(piece.nbytes for piece in route) <= PIECE_BYTES


def test_bucket_memory_is_that_of_the_process_which_has_most():
    """Return the bytes of both buckets of each link, as [source][sink] for every engine."""
    assert bucket_memory([[[8, 16]]]) == 2 * (8 + 16)  # the one source
    assert bucket_memory([[[8, 16], [32, 0]]]) == 2 * (8 + 32)  # the first rank of the engine
    assert bucket_memory([[[8], [16]], [[8], [32]]]) == 2 * (16 + 32)  # the second source, with links to both engines


def test_copies_of_a_rank_share_engines_and_have_larger_buckets():
    large = [TensorPart.of("model.layers.0.mlp.up_proj.weight", FP8, (1 << 17, 1 << 14))]
    domains = [["here"]] * 4
    alone, shared = (
        plan(Sources([large] * copies, ["here"] * copies), [large], 64 << 20, 0, domains)[1][0] for copies in (1, 4)
    )
    assert (alone, shared) == ([16 << 20], [64 << 20])
