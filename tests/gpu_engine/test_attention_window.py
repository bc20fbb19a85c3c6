"""The shared attention in a window, on Triton's interpreter: the keys of the rule alone, and the same bits always."""

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.fp8 import cast_through_cache, to_cache
from nemo_fp8rl.ops import attention as shared
from nemo_fp8rl.ops.attention import BLOCK_KEYS, attention
from tests.gpu_engine.test_attention import GROUPS, LENGTHS, D, ask, paged, sequence
from tests.gpu_engine.test_ops import values

HEADS, PAGE = 32, 16
"""So many heads that a tile has 4 queries, and the walk of a late one leaves a block out."""
LONG, PROMPT, WINDOW = 215, 21, 35
SCALES = (2.0**-7, 2.0**-5)


def visible(length: int, prompt: int, window: int) -> Tensor:
    """Which keys a query sees, bool [queries, keys], by the rule's own words."""
    rows = [[k <= q and (k < prompt or q - k < window) for k in range(length)] for q in range(length)]
    return torch.tensor(rows)


def float64_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """(out [length, heads, d], lse [heads, length]) of queries that see these keys."""
    per_group = q.size(1) // k.size(1)
    k, v = (x.double().repeat_interleave(per_group, 1).transpose(0, 1) for x in (k, v))
    scores = (q.double().transpose(0, 1) @ k.mT * q.size(-1) ** -0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1)


def ask_in_window(
    sequences: list[list[Tensor]],
    ends: list[int],
    counts: list[int],
    prompts: list[int],
    window: int,
    scales: tuple[float, float] | None = None,
    page: int = PAGE,
) -> list[tuple[Tensor, Tensor]]:
    """What `ask` returns, from pages of which those that no query sees are NaN, as pages given to another sequence."""
    further: list[Tensor | None] = [None, None]
    if scales is not None:
        sequences = [[q, *(to_cache(x, s, "nearest") for x, s in zip(kv, scales, strict=True))] for q, *kv in sequences]
        further = [torch.tensor([scale]) for scale in scales]
    q = torch.cat([s[0][end - n : end] for s, end, n in zip(sequences, ends, counts, strict=True)])
    (k_pages, table), (v_pages, _) = (
        paged([s[i][:end] for s, end in zip(sequences, ends, strict=True)], page) for i in (1, 2)
    )
    for row, end, n, prompt in zip(table, ends, counts, prompts, strict=True):
        first_gap, last_gap = -(-prompt // page), max(prompt, end - n - window + 1) // page
        for pages in (k_pages, v_pages):
            pages[row[first_gap:last_gap].long()] = torch.nan
        row[first_gap:last_gap] = len(k_pages) - 1
    starts, lengths = torch.tensor([0, *counts]).cumsum(0).int(), torch.tensor(ends).int()
    kept = torch.tensor(prompts).int(), window
    out, lse = attention(q, k_pages, v_pages, table, starts, lengths, q.size(-1) ** -0.5, *further, *kept)
    return list(zip(out.split(counts), lse.split(counts, 1), strict=True))


@pytest.fixture(scope="module")
def long():
    return sequence(LONG, HEADS, 3)


@pytest.fixture(scope="module", params=[None, SCALES], ids=["dense", "E4M3"])
def prefilled(request, long):
    """(Scales of the cache, the answer of all queries)."""
    return request.param, ask_in_window([long], [LONG], [LONG], [PROMPT], WINDOW, request.param)[0]


def test_queries_see_the_keys_of_the_rule(long, prefilled):
    scales, (out, lse) = prefilled
    q, k, v = long
    if scales is not None:
        k, v = (cast_through_cache(x, s, "nearest") for x, s in zip((k, v), scales, strict=True))
    seen = visible(LONG, PROMPT, WINDOW)
    assert seen.sum(1).max() == PROMPT + WINDOW
    expected, expected_lse = float64_attention(q, k, v, seen)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("ends", "count", "page"),
    [
        ((LONG, LONG - 1, PROMPT, PROMPT + WINDOW, BLOCK_KEYS + WINDOW), 1, 16),  # decode, also at borders
        ((LONG, 150), 50, 32),  # chunks
        ((LONG,), 3, 1),
    ],
    ids=["decode", "chunks", "pages of one token"],
)
def test_a_query_gets_the_same_bits_however_it_is_asked(long, prefilled, ends, count, page):
    scales, (whole, whole_lse) = prefilled
    n = len(ends)
    answers = ask_in_window([long] * n, [*ends], [count] * n, [PROMPT] * n, WINDOW, scales, page)
    for end, (out, lse) in zip(ends, answers, strict=True):
        assert torch.equal(out, whole[end - count : end])
        assert torch.equal(lse, whole_lse[:, end - count : end])


def test_sequences_of_a_batch_have_their_own_prompts(long):
    short = sequence(70, HEADS, 4)
    pairs = [(long, LONG, 50), (short, 70, 3), (long, 180, 1)]
    sequences, ends, prompts = (list(x) for x in zip(*pairs, strict=True))
    batch = ask_in_window(sequences, ends, [9] * 3, prompts, 20)
    for (of_one, end, prompt), got in zip(pairs, batch, strict=True):
        ((out, lse),) = ask_in_window([of_one], [end], [end], [prompt], 20)
        assert torch.equal(got[0], out[-9:])
        assert torch.equal(got[1], lse[:, -9:])


@pytest.mark.parametrize("scales", [None, SCALES], ids=["dense", "E4M3"])
def test_a_window_that_reaches_all_keys_changes_no_bit(scales):
    sequences, lengths = [sequence(length, 4, seed) for seed, length in enumerate(LENGTHS)], [*LENGTHS]
    dense = ask(sequences, lengths, lengths, PAGE, scales)
    for prompts, window in (([1, 1], max(LENGTHS)), ([75, 40], 1), ([50, 10], 30)):
        in_window = ask_in_window(sequences, lengths, lengths, prompts, window, scales)
        for expected, got in zip(dense, in_window, strict=True):
            assert all(map(torch.equal, expected, got))


def test_a_late_query_walks_over_the_gap():
    """Its blocks of keys are not loaded, so that numbers of pages that do not exist do no harm there."""
    length, window = 6 * BLOCK_KEYS, 10
    q, k, v = sequence(length, HEADS, 6)
    pages = [torch.stack([x[:BLOCK_KEYS], x[-BLOCK_KEYS:]]) for x in (k, v)]
    table = torch.tensor([[0, *[10**9] * 4, 1]], dtype=torch.int32)
    rest = torch.tensor([0, 1]).int(), torch.tensor([length]).int(), D**-0.5, None, None
    got = attention(q[-1:], *pages, table, *rest, torch.tensor([5]).int(), window)
    ((out, lse),) = ask_in_window([[q, k, v]], [length], [1], [5], window)
    assert torch.equal(got[0], out)
    assert torch.equal(got[1], lse)


def test_it_is_one_operation_for_torch_compile():
    q, k, v = sequence(5, 2, 1)
    table = torch.arange(5, dtype=torch.int32)[None]
    arguments = (q, k[:, None], v[:, None], table, torch.tensor([0, 5]).int(), torch.tensor([5]).int(), 0.2)
    torch.library.opcheck(shared.attention, (*arguments, None, None, torch.tensor([2]).int(), 2))


def test_a_window_without_prompt_lengths_is_refused():
    x = values(5, GROUPS, D)
    table = torch.arange(5, dtype=torch.int32)[None]
    rest = table, torch.tensor([0, 5]).int(), torch.tensor([5]).int(), 0.2
    with pytest.raises(ValueError, match="window is 2, without prompt lengths"):
        attention(x, x[:, None], x[:, None], *rest, window=2)
