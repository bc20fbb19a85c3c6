"""What collate fills, and how a batch is cut into rows and shards."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8rl.batch import Completion, Prompt, RolloutBatch, balanced_order, collate, split_by_tokens, split_shards

PAD = 63
token_lists = st.lists(st.integers(0, 62), min_size=1, max_size=6).map(tuple)
samples = st.lists(st.tuples(token_lists, token_lists), min_size=1, max_size=7)


def prompt(tokens: tuple[int, ...]) -> Prompt:
    return Prompt(0, "", "", tokens)


def completion(tokens: tuple[int, ...], logprobs: tuple[float, ...] | None = None) -> Completion:
    return Completion(tokens, tuple(-0.5 * t for t in tokens) if logprobs is None else logprobs, "stop", 0)


def columns(batch: RolloutBatch) -> dict[str, torch.Tensor]:
    return {name: column for name, column in vars(batch).items() if column is not None}


def batch_of(pairs):
    return collate([prompt(p) for p, _ in pairs], [completion(c) for _, c in pairs], PAD)


def test_collate_puts_prompt_completion_and_padding_in_a_row():
    batch = collate([prompt((5, 6)), prompt((7,))], [completion((8,)), completion((1, 2, 3), (-1.0, -2.0, -3.0))], PAD)
    assert batch.input_ids.tolist() == [[5, 6, 8, PAD], [7, 1, 2, 3]]
    assert batch.input_lengths.tolist() == [3, 4]
    assert batch.token_mask.tolist() == [[0, 0, 1, 0], [0, 1, 1, 1]]
    assert batch.generation_logprobs.tolist() == [[0, 0, -4, 0], [0, -1, -2, -3]]
    assert batch.sample_mask.tolist() == [1, 1]
    assert batch.routed_experts is None
    assert batch.prompt_lengths.tolist() == [2, 1]
    assert [part.prompt_lengths.tolist() for part in split_shards(batch, 2, torch.tensor([1, 0]))] == [[1], [2]]
    assert batch.input_ids.dtype == batch.input_lengths.dtype == torch.int64
    assert {c.dtype for c in (batch.token_mask, batch.generation_logprobs, batch.sample_mask)} == {torch.float32}


@settings(deadline=None, max_examples=50)
@given(samples)
def test_collated_rows_hold_exactly_their_tokens(pairs):
    batch = batch_of(pairs)
    assert batch.num_rows == len(pairs)
    for i, (p, c) in enumerate(pairs):
        length = len(p) + len(c)
        assert batch.input_lengths[i] == length
        assert tuple(batch.input_ids[i, :length].tolist()) == p + c
        assert (batch.input_ids[i, length:] == PAD).all()
        generated = batch.token_mask[i].nonzero().flatten().tolist()
        assert generated == list(range(len(p), length))
        assert batch.generation_logprobs[i, generated].tolist() == [-0.5 * t for t in c]
        assert not batch.generation_logprobs[i][batch.token_mask[i] == 0].any()


def test_logprobs_that_were_not_asked_for_are_zero():
    batch = collate([prompt((1,))], [completion((2, 3), ())], PAD)
    assert batch.generation_logprobs.tolist() == [[0, 0, 0]]
    assert batch.token_mask.tolist() == [[0, 1, 1]]


@pytest.mark.parametrize("counts", [(1, 2), (2, 1)])
def test_each_prompt_needs_its_completion(counts):
    with pytest.raises(ValueError, match="zip"):
        collate([prompt((1,))] * counts[0], [completion((2,))] * counts[1], PAD)


@settings(deadline=None, max_examples=50)
@given(samples, st.data())
def test_rows_are_cut_to_the_longest_of_them(pairs, data):
    batch = batch_of(pairs)
    start = data.draw(st.integers(0, len(pairs) - 1))
    stop = data.draw(st.integers(start + 1, len(pairs) + 2))
    part, alone = columns(batch.take_trimmed_rows(slice(start, stop))), columns(batch_of(pairs[start:stop]))
    assert all(torch.equal(part[name], alone[name]) for name in part | alone)


@settings(deadline=None, max_examples=50)
@given(samples, st.integers(1, 5))
def test_shards_are_the_rows_in_order_and_as_even_as_they_go(pairs, count):
    batch = batch_of(pairs)
    parts = split_shards(batch, count)
    assert len(parts) == count
    for name, column in columns(batch).items():
        assert torch.equal(torch.cat([columns(part)[name] for part in parts]), column)
    sizes = [part.num_rows for part in parts]
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 8))
def test_shards_of_dealt_rows_have_about_as_many_tokens(lengths, count):
    order = balanced_order(torch.tensor(lengths), count)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    parts = [part.tolist() for part in order.tensor_split(count)]
    assert all(part == sorted(part) for part in parts)
    tokens = [sum(lengths[i] for i in part) for part in parts]
    if len(lengths) % count == 0:
        assert max(tokens) - min(tokens) <= max(lengths)  # no further than one row can set them apart


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 400), st.sampled_from([1, 8, 64]))
def test_microbatches_hold_every_row_once_within_their_tokens(lengths, tokens, multiple):
    parts = split_by_tokens(torch.tensor(lengths), tokens, multiple)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(lengths)))
    rounded = [-(-length // multiple) * multiple for length in lengths]
    for part in parts:
        assert len(part) == 1 or len(part) * max(rounded[i] for i in part) <= tokens
    for part, following in pairwise(parts):  # and no fewer rows than there is room for
        assert (len(part) + 1) * rounded[following[0]] > tokens
        assert max(lengths[i] for i in part) <= lengths[following[0]]
