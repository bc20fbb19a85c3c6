"""The shared attention on Triton's interpreter: near torch's, and the same bits however a query comes to be asked."""

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.fp8 import cast_through_cache, to_cache
from nemo_fp8rl.ops.attention import BLOCK_KEYS, attend, attention
from tests.gpu_engine.test_ops import values

LENGTHS = (75, 40)
GROUPS, D = 2, 32


def sequence(length: int, heads: int, seed: int, d: int = D, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Queries, keys, values [length, heads or groups, d]."""
    return [values(length, h, d, seed=3 * seed + i, dtype=dtype) for i, h in enumerate((heads, GROUPS, GROUPS))]


def paged(keys: list[Tensor], page_size: int) -> tuple[Tensor, Tensor]:
    """Pages in any order, of which the unwritten parts are NaN, and the block table."""
    counts = [-(-len(k) // page_size) for k in keys]
    pages = torch.full((sum(counts) + 2, page_size, *keys[0].shape[1:]), torch.nan, dtype=keys[0].dtype)
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(0)).split([*counts, 2])
    table = torch.full((len(keys), max(counts) + 1), len(pages) - 1, dtype=torch.int32)
    for row, own, k in zip(table, order, keys, strict=False):
        row[: len(own)] = own
        for i, part in zip(own, k.split(page_size), strict=True):
            pages[i, : len(part)] = part
    return pages, table


def ask(
    sequences: list[list[Tensor]],
    ends: list[int],
    counts: list[int],
    page_size: int,
    cache_scales: tuple[float, float] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """(out, lse [heads, count]) of the last `count` queries before `end`, of each sequence."""
    scales: list[Tensor] = []
    if cache_scales is not None:
        k_scale, v_scale = cache_scales
        sequences = [[q, to_cache(k, k_scale, "nearest"), to_cache(v, v_scale, "nearest")] for q, k, v in sequences]
        scales = [torch.tensor([k_scale]), torch.tensor([v_scale])]
    q = torch.cat([s[0][end - n : end] for s, end, n in zip(sequences, ends, counts, strict=True)])
    caches = [paged([s[i][:end] for s, end in zip(sequences, ends, strict=True)], page_size) for i in (1, 2)]
    (k_pages, table), (v_pages, _) = caches
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    out, lse = attention(q, k_pages, v_pages, table, starts, torch.tensor(ends).int(), q.size(-1) ** -0.5, *scales)
    return list(zip(out.split(counts), lse.split(counts, 1), strict=True))


@pytest.fixture(scope="module")
def sequences():
    return [sequence(length, 4, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=[None, (2.0**-7, 2.0**-5)], ids=["dense", "E4M3"])
def prefilled(request, sequences):
    """(Scales of the cache, answers)."""
    return request.param, ask(sequences, [*LENGTHS], [*LENGTHS], 16, request.param)


def test_codes_are_read_as_the_values_of_the_formula(sequences, prefilled):
    scales, answers = prefilled
    if scales is None:
        pytest.skip("of a cache in the model's dtype")
    k_scale, v_scale = scales
    read = [
        [q, *(cast_through_cache(x, s, "nearest") for x, s in ((k, k_scale), (v, v_scale)))] for q, k, v in sequences
    ]
    for got, expected in zip(answers, ask(read, [*LENGTHS], [*LENGTHS], 16), strict=True):
        assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize(
    ("which", "ends", "counts", "page_size"),
    [
        ((0,), (75,), (75,), 16),  # alone
        ((1, 0), (40, 75), (40, 75), 1),  # without pages, as a trainer asks
        ((1, 0), (33, 51), (1, 31), 32),  # decode beside a chunk
        ((0, 1, 0), (BLOCK_KEYS, 1, BLOCK_KEYS + 1), (1, 1, 1), 16),  # decode at the borders of blocks
    ],
)
def test_a_query_gets_the_same_bits_however_it_is_asked(sequences, prefilled, which, ends, counts, page_size):
    scales, every = prefilled
    answers = ask([sequences[i] for i in which], [*ends], [*counts], page_size, scales)
    for i, end, n, (out, lse) in zip(which, ends, counts, answers, strict=True):
        whole, whole_lse = every[i]
        assert torch.equal(out, whole[end - n : end])
        assert torch.equal(lse, whole_lse[:, end - n : end])


@pytest.mark.parametrize(
    ("heads", "d", "dtype"),
    [(4, 32, torch.bfloat16), (6, 80, torch.float32), (2, 128, torch.float16)],
    ids=str,
)
def test_it_is_near_torchs_attention(heads, d, dtype):
    length = 70
    q, k, v = sequence(length, heads, 5, d, dtype)
    ((out, lse),) = ask([[q, k, v]], [length], [length], 16)
    per_group = heads // GROUPS
    k, v = (x.float().repeat_interleave(per_group, 1).transpose(0, 1) for x in (k, v))
    scores = (q.float().transpose(0, 1) @ k.mT * d**-0.5).masked_fill(
        torch.ones(length, length).triu(1).bool(), -torch.inf
    )
    exact = dtype is torch.float32
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
    expected = (scores.softmax(-1) @ v).transpose(0, 1)
    torch.testing.assert_close(out.float(), expected, atol=1e-5 if exact else 2e-2, rtol=1e-4 if exact else 2e-2)


def test_rows_behind_the_last_sequence_are_left_alone(sequences):
    """As in a CUDA graph, whose batch is filled up with sequences without queries."""
    q, k, v = (x[:10] for x in sequences[0])
    padded, out = torch.full((14, *q.shape[1:]), torch.nan).bfloat16(), torch.full((14, *q.shape[1:]), 7.0).bfloat16()
    padded[:10] = q
    (k_pages, table), (v_pages, _) = (paged([x, x[:1], x[:1]], 16) for x in (k, v))
    starts, lengths = torch.tensor([0, 10, 10, 10]).int(), torch.tensor([10, 0, 1]).int()
    lse = torch.full((q.size(1), 14), 7.0)
    attend(padded, k_pages, v_pages, table, starts, lengths, D**-0.5, out, lse)
    expected, expected_lse = ask(sequences[:1], [10], [10], 16)[0]
    assert torch.equal(out[:10], expected)
    assert torch.equal(lse[:, :10], expected_lse)
    assert (out[10:] == 7).all()
    assert (lse[:, 10:] == 7).all()


def test_it_is_one_operation_for_torch_compile():
    q, k, v = sequence(5, 2, 1)
    table = torch.arange(5, dtype=torch.int32)[None]
    arguments = (q, k[:, None], v[:, None], table, torch.tensor([0, 5]).int(), torch.tensor([5]).int(), 0.2)
    torch.library.opcheck(torch.ops.nemo_fp8rl.attention, arguments)


def test_it_refuses_what_it_would_read_wrongly():
    q, k, v = sequence(5, 2, 1)
    table = torch.arange(5, dtype=torch.int32)[None]
    rest = table, torch.tensor([0, 5]).int(), torch.tensor([5]).int(), 0.2
    with pytest.raises(ValueError, match="side by side in memory"):
        attention(q, k[:, None].mT.contiguous().mT, v[:, None], *rest)
