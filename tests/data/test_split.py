"""Train and validation never share a prompt."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.data.records import Record
from nemo_fp8rl.data.split import split_records

NUMBERED = [Record(f"{i}?", str(i)) for i in range(100)]


@settings(deadline=None, max_examples=60)
@given(
    prompts=st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=20).filter(lambda p: len(set(p)) > 1),
    share=st.floats(0.05, 0.95),
    seed=st.integers(0, 9),
)
def test_a_split_keeps_every_record_on_one_side_and_in_order(prompts, share, seed):
    records = [Record(p, str(i)) for i, p in enumerate(prompts)]
    held_out = round(len(set(prompts)) * share)
    if not 0 < held_out < len(set(prompts)):
        with pytest.raises(UserError, match="leaves a side empty"):
            split_records(records, None, share, seed)
        return
    train, validation = split_records(records, None, share, seed)
    assert len({r.prompt for r in validation}) == held_out
    assert not {r.prompt for r in train} & {r.prompt for r in validation}
    assert sorted(train + validation, key=lambda r: int(r.answer)) == records
    for side in (train, validation):
        assert side == sorted(side, key=lambda r: int(r.answer))


def test_a_split_depends_on_the_seed_and_the_prompts_alone():
    one = split_records(NUMBERED, None, 0.2, 0)
    assert split_records(list(NUMBERED), None, 0.2, 0) == one
    assert split_records(NUMBERED, None, 0.2, 1)[1] != one[1]
    reordered = split_records(NUMBERED[::-1], None, 0.2, 0)
    assert set(reordered[1]) == set(one[1])


@pytest.mark.parametrize("share", [0.0, 1.0, 0.001, 0.999, 1.5, -0.5, math.nan, math.inf])
def test_a_share_that_leaves_a_side_empty_or_means_nothing_is_refused(share):
    with pytest.raises(UserError, match=r"data\.train\.split_validation_size"):
        split_records(NUMBERED, None, share, 0)


def test_a_single_prompt_cannot_be_split():
    with pytest.raises(UserError, match=r"data\.train\.split_validation_size"):
        split_records([Record("a", "1"), Record("a", "2")], None, 0.5, 0)


def test_given_sets_are_taken_as_they_are():
    assert split_records(NUMBERED[:7], NUMBERED[7:], 0.5, 0) == (NUMBERED[:7], NUMBERED[7:])


def test_given_sets_that_share_a_prompt_are_refused_and_the_prompt_is_named():
    with pytest.raises(UserError, match=r"data\.validation\.data_path: 2 prompts .*'6\?'"):
        split_records(NUMBERED[:8], [Record("6?", "other answer"), *NUMBERED[7:9]], 0.5, 0)
