"""Routes bring each engine rank the values that it stores, once, for any two layouts; a mismatch is refused by name."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8rl.common.region import Region, overlap
from nemo_fp8rl.fp8 import BLOCK, FP8, quantize_blockwise
from nemo_fp8rl.refit.manifest import RefitError, Sources, TensorPart, blocks_of, from_json, to_json
from tests.refit.memory_engine import Layout, bf16, fp8, split

UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
PARTS = [fp8(UP, 300, 200), bf16(NORM, 100)]
MIB = 1 << 20


@st.composite
def tensors(draw: st.DrawFn) -> list[TensorPart]:
    """Matrices in FP8 with ragged ends, matrices and vectors in bf16, scalars in float32."""
    parts = []
    for i in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["fp8", "fp8", "matrix", "vector", "scalar"]))
        size = st.integers(1, 400 if kind == "fp8" else 40)
        if kind == "scalar":
            parts.append(TensorPart.of(f"t{i}", torch.float32, ()))
        elif kind == "vector":
            parts.append(bf16(f"t{i}", draw(size)))
        else:
            parts.append((fp8 if kind == "fp8" else bf16)(f"t{i}", draw(size), draw(size)))
    return parts


@st.composite
def layouts(draw: st.DrawFn, parts: list[TensorPart], replicate: bool) -> Layout:
    """Each tensor whole on one rank (as experts are), or cut along a dimension, or on every rank where allowed."""
    ranks = draw(st.integers(1, 3))
    layout: Layout = [[] for _ in range(ranks)]
    for part in parts:
        ways = ["one"] + ["cut"] * (len(part.shape) > 0) + ["every"] * replicate
        way = draw(st.sampled_from(ways))
        if way == "one":
            layout[draw(st.integers(0, ranks - 1))].append(part)
        elif way == "every":
            for held in layout:
                held.append(part)
        else:
            dim = draw(st.integers(0, len(part.shape) - 1))
            step, size = BLOCK[dim] if bool(part.format) else 1, part.shape[dim]
            border = st.integers(0, size // step).map(lambda n, step=step: n * step)
            borders = [0, *sorted(draw(st.lists(border, min_size=ranks - 1, max_size=ranks - 1))), size]
            order = draw(st.permutations(range(ranks)))
            for i, rank in enumerate(order):
                region = list(part.region)
                region[dim] = (borders[i], borders[i + 1])
                if borders[i] < borders[i + 1]:
                    layout[rank].append(part.cut(tuple(region)))
    return layout


def covered(part: TensorPart, pieces: list[TensorPart]) -> torch.Tensor:
    """Count in how many pieces each value of the whole tensor is."""
    count = torch.zeros(part.shape, dtype=torch.int32)
    for piece in pieces:
        count[tuple(slice(a, b) for a, b in piece.region)] += 1
    return count


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_each_rank_gets_what_it_stores_once_and_nothing_else(data):
    parts = data.draw(tensors())
    sources = data.draw(layouts(parts, replicate=True))
    sinks = data.draw(layouts(parts, replicate=True))
    piece_bytes = data.draw(st.sampled_from([1, 100, 20_000, MIB]))
    near, here = ([data.draw(st.sampled_from("ab")) for _ in layout] for layout in (sources, sinks))
    others = data.draw(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=2), max_size=2))
    engine = data.draw(st.integers(0, len(others)))
    domains = [*others[:engine], here, *others[engine:]]
    planned = Sources(sources, near).routes(sinks, piece_bytes, engine=engine, domains=domains)
    assert [len(row) for row in planned] == [len(sinks)] * len(sources)
    for sink, stored in enumerate(sinks):
        by_name = {part.name: part for part in stored}
        arriving = [piece for row in planned for piece in row[sink]]
        assert {piece.name for piece in arriving} == set(by_name)
        for name, part in by_name.items():
            expected = covered(part, [part])
            assert torch.equal(covered(part, [piece for piece in arriving if piece.name == name]), expected)
    for source, row in enumerate(planned):
        order = {part.name: place for place, part in enumerate(sources[source])}
        held = {part.name: part for part in sources[source]}
        for sink, route in enumerate(row):
            places = [order[piece.name] for piece in route]
            assert places == sorted(places)
            for piece in route:
                assert (piece.dtype, piece.shape) == (held[piece.name].dtype, held[piece.name].shape)
                assert overlap(piece.region, held[piece.name].region) == piece.region
                holders = [domain for parts, domain in zip(sources, near, strict=True) if held[piece.name] in parts]
                assert near[source] == here[sink] or here[sink] not in holders
                band = BLOCK[0] if bool(piece.format) else 1
                assert piece.nbytes <= piece_bytes or not piece.size or piece.size[0] <= band
                if bool(piece.format):
                    borders = zip(piece.region, piece.shape, BLOCK, strict=True)
                    assert all(a % n == 0 and (b % n == 0 or b == size) for (a, b), size, n in borders)


@pytest.mark.parametrize("piece_bytes", [1, 40_000, MIB])
def test_ranks_that_store_the_same_are_sent_the_same_pieces(piece_bytes):
    """Then a trainer rank quantizes a piece once for all engines."""
    planned = Sources(split(PARTS, 2, 0, replicate=False)).routes([PARTS, PARTS], piece_bytes)
    assert all(first == second for first, second in planned)


MANY = [bf16(f"t{i}", 100) for i in range(12)]


def sent(copies: str, engines: str) -> list[list[int]]:
    """Return tensor names as [engine][copy]; one letter for the machine of each copy, and of each engine."""
    sources, domains = Sources([MANY] * len(copies), list(copies)), [[machine] for machine in engines]
    planned = [sources.routes([MANY], MIB, engine=engine, domains=domains) for engine in range(len(engines))]
    return [[len(route) for (route,) in of_engine] for of_engine in planned]


@pytest.mark.parametrize(
    ("copies", "engines", "tensors"),
    [
        ("aaa", "a", [[4, 4, 4]]),
        ("aaaa", "aa", [[6, 0, 6, 0], [0, 6, 0, 6]]),
        ("aa", "aaa", [[12, 0], [0, 12], [12, 0]]),
        ("aabb", "aabb", [[12, 0, 0, 0], [0, 12, 0, 0], [0, 0, 12, 0], [0, 0, 0, 12]]),
        ("aabb", "abab", [[12, 0, 0, 0], [0, 0, 12, 0], [0, 12, 0, 0], [0, 0, 0, 12]]),
        ("aabb", "ab", [[6, 6, 0, 0], [0, 0, 6, 6]]),
        ("aabb", "c", [[3, 3, 3, 3]]),
        ("aabb", "cc", [[6, 0, 6, 0], [0, 6, 0, 6]]),
        ("aaaaaa", "c", [[3, 3, 3, 3, 0, 0]]),
    ],
)
def test_copies_send_to_their_machine_and_engines_share_them_out(copies, engines, tensors):
    assert sent(copies, engines) == tensors


def test_a_rank_that_holds_a_tensor_twice_is_refused():
    refused([PARTS * 2], [PARTS], "trainer rank 0 holds a tensor twice")


def test_a_tensor_without_values_needs_no_piece():
    nothing = bf16("nothing", 0, 3)
    assert Sources([[nothing, *PARTS]]).routes([[nothing, *PARTS]], MIB) == [[tuple(PARTS)]]


def test_a_large_tensor_goes_in_bands_of_whole_blocks():
    ((route,),) = Sources([[fp8("t", 1000, 256)]]).routes([[fp8("t", 1000, 256)]], 70_000)
    assert [piece.region for piece in route] == [((a, min(a + 256, 1000)), (0, 256)) for a in (0, 256, 512, 768)]
    assert [piece.nbytes for piece in route] == [256 * 256 + 4 * 4] * 3 + [232 * 256 + 4 * 4]


# What does not fit together


def refused(sources: Layout, sinks: Layout, message: str) -> None:
    with pytest.raises(RefitError, match=message):
        Sources(sources).routes(sinks, MIB)


@pytest.mark.parametrize("name", [UP, NORM])
def test_a_tensor_that_no_rank_sends_is_named(name):
    rest = [part for part in PARTS if part.name != name]
    refused([rest], [PARTS], f"lacks 1 tensors that the engine needs, among them {re.escape(name)}$")
    refused([[], rest], [rest, PARTS], re.escape(name))


def test_a_tensor_that_no_engine_stores_is_named():
    refused([[*PARTS, bf16("model.extra", 2)]], [PARTS], r"1 tensors unknown to the engine, among them model\.extra$")


@pytest.mark.parametrize(
    "other", [fp8(UP, 300, 100), fp8(UP, 200, 300), bf16(UP, 300, 200), bf16(UP, 60_000), bf16(UP, 300, 200, 1)]
)
def test_another_shape_or_dtype_is_named_with_both(other):
    sizes = rf"{re.escape(UP)} is {other.dtype} {re.escape(str(list(other.shape)))} in the trainer and .* \[300, 200\]"
    refused([[other, PARTS[1]]], [PARTS], sizes)
    refused([PARTS], [[other, PARTS[1]]], re.escape(UP))


@pytest.mark.parametrize("second", [PARTS[0].cut(((128, 256), (0, 200))), PARTS[0].cut(((0, 300), (128, 200)))])
def test_parts_that_overlap_without_being_the_same_are_refused(second):
    refused([PARTS, [second]], [PARTS], f"two trainer ranks hold parts of {re.escape(UP)} that overlap")


@pytest.mark.parametrize("other", [bf16(NORM, 100, 1), bf16(NORM, 99), TensorPart.of(NORM, torch.float32, (100,))])
def test_ranks_that_disagree_on_a_tensor_are_refused(other):
    refused([PARTS, [other.cut(tuple((b, b) for _, b in other.region))]], [PARTS], re.escape(NORM))
    refused([PARTS, [other]], [PARTS], re.escape(NORM))


def test_a_part_that_nobody_sends_is_named_with_its_size():
    top, bottom = split(PARTS[:1], 2, 0, replicate=False)
    refused([top], [PARTS[:1]], f"only a part of {re.escape(UP)}: {172 * 200} values are missing")
    Sources([top]).routes([top], MIB)
    refused([top], [bottom], re.escape(UP))


@pytest.mark.parametrize(
    "region", [((0, 64), (0, 200)), ((64, 300), (0, 200)), ((0, 300), (0, 100)), ((0, 300), (1, 200))]
)
def test_a_border_inside_an_fp8_block_is_refused_on_either_side(region):
    part = PARTS[0].cut(region)
    refused([[part]], [[PARTS[0]]], f"{re.escape(UP)}: the trainer holds .* blocks of 128x128")
    refused([[PARTS[0]]], [[part]], f"{re.escape(UP)}: the engine holds .* blocks of 128x128")


@pytest.mark.parametrize("shape", [(256,), (2, 128, 128), ()])
def test_fp8_that_is_no_matrix_is_refused(shape):
    part = TensorPart.of(UP, FP8, shape)
    refused([[part]], [[part]], re.escape(UP))


# A part by itself


def test_parts_round_trip_through_json():
    parts = (
        *PARTS,
        PARTS[0].cut(((128, 300), (0, 128))),
        TensorPart.of("k_scale", torch.float32, ()),
        bf16("ü", 0, 3),
    )
    assert from_json(to_json(parts)) == parts
    assert [part.torch_dtype for part in from_json(to_json(parts))] == [part.torch_dtype for part in parts]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 500), st.integers(1, 500), st.data())
def test_the_scales_of_a_region_are_those_of_quantizing_it_alone(rows, columns, data):
    """`blocks_of` and a part's byte counts agree with the quantizer where the ends are ragged."""

    def side(size: int) -> tuple[int, int]:
        first = data.draw(st.integers(0, (size - 1) // 128))
        last = data.draw(st.integers(first + 1, -(-size // 128)))
        return first * 128, min(size, last * 128)

    region: Region = (side(rows), side(columns))
    weight = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    whole = quantize_blockwise(weight, scale_format="fp32")
    part = fp8("t", rows, columns).cut(region)
    cut = quantize_blockwise(weight[part.cut(((0, rows), (0, columns))).local(region)], scale_format="fp32")
    (a, b), (c, d) = blocks_of(region, FP8)
    assert torch.equal(whole.scale_inv[a:b, c:d], cut.scale_inv)
    assert (part.data_bytes, part.scale_bytes) == (cut.data.nbytes, cut.scale_inv.nbytes)
    assert part.nbytes == part.data_bytes + part.scale_bytes
