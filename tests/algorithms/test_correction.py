"""Importance ratios and their truncation against float64; float32 `exp` is good to 1e-6."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8rl.algorithms.correction import RolloutError, token_importance_ratio, truncated_importance_weights

GARBAGE = [math.nan, math.inf, -math.inf, 1e30]
logprobs = st.floats(-20, 0, width=32)


def row(values) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float32)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(logprobs, logprobs, st.booleans(), st.sampled_from(GARBAGE)), min_size=1, max_size=12))
def test_ratio_is_trainer_over_rollout_inside_the_mask_and_zero_outside(tokens):
    train = row([t if inside else junk for t, _, inside, junk in tokens])
    rollout = row([r if inside else -junk for _, r, inside, junk in tokens])
    ratio = token_importance_ratio(train, rollout, row([float(inside) for _, _, inside, _ in tokens]))
    # The difference of two float32 log-probs of up to 20 is rounded at 1e-6.
    expected = [math.exp(t - r) if inside else 0.0 for t, r, inside, _ in tokens]
    assert ratio.dtype == torch.float32
    assert ratio[0].tolist() == pytest.approx(expected, rel=3e-6)


def test_a_token_that_the_trainer_likes_more_weighs_more_than_one():
    assert token_importance_ratio(row([-1.0]), row([-2.0]), row([1.0])).item() == pytest.approx(math.e)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_non_finite_logprobs_inside_the_mask_are_refused_and_counted(side, bad):
    sides = [row([-1.0, -1.0, -1.0, -1.0, -1.0]), row([-1.0, -1.0, -1.0, -1.0, -1.0])]
    sides[side][0, [1, 3, 4]] = bad
    with pytest.raises(RolloutError, match=r"2 of 4 generated tokens .*generation_logprobs or prev_logprobs"):
        token_importance_ratio(*sides, row([1.0, 1.0, 1.0, 1.0, 0.0]))


def test_ratio_is_differentiable_in_the_trainers_logprobs_with_no_gradient_in_padding():
    train = row([-1.0, -2.0, math.nan]).requires_grad_()
    token_importance_ratio(train, row([-1.5, -1.0, math.inf]), row([1.0, 1.0, 0.0])).sum().backward()
    assert train.grad[0].tolist() == pytest.approx([math.exp(0.5), math.exp(-1), 0.0])


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(0, 1e4, width=32), min_size=1, max_size=8),
    st.floats(0.5, 100, width=32),
    st.floats(0, 0.5, width=32),
)
def test_weights_are_cut_at_both_bounds(ratios, maximum, minimum):
    weights = truncated_importance_weights(row(ratios), maximum, minimum)
    assert weights[0].tolist() == [min(max(r, minimum), maximum) for r in ratios]


def test_an_unreached_bound_leaves_the_ratios_as_they_are():
    ratios = row([0.0, 1e-6, 1.0, 3.7])
    assert torch.equal(truncated_importance_weights(ratios, math.inf), ratios)
    assert torch.equal(truncated_importance_weights(ratios, 1e9), ratios)


def test_a_ratio_beyond_float32_is_cut_at_the_maximum():
    ratio = token_importance_ratio(row([-1.0]), row([-201.0]), row([1.0]))
    assert truncated_importance_weights(ratio, 2.0).item() == 2.0


def test_weights_carry_no_gradient():
    assert not truncated_importance_weights(row([1.0]).requires_grad_(), 2.0).requires_grad
