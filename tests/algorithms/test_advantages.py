"""Advantages against exact rational arithmetic or float64 formulas, one sample or token at a time.

The grid of rewards keeps deviations above 0.01, so float32 leaves relative errors of some 1e-6; 1e-5 is asked for.
"""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8rl.algorithms.advantages import (
    group_advantages,
    group_metrics,
    groups_with_signal,
    overlong_penalty,
    reinforce_plus_plus_advantages,
    stop_properly_penalty,
)
from nemo_fp8rl.common.errors import UserError

SWITCHES = pytest.mark.parametrize(("normalize", "leave_one_out"), [(a, b) for a in (0, 1) for b in (0, 1)])
REWARDS = [0.0, 0.1, 0.25, 0.5, 0.7, 1.0]
GARBAGE = [math.nan, math.inf, -math.inf, 1e30]


def advantages(rewards, groups, normalize: int, leave_one_out: int) -> torch.Tensor:
    return group_advantages(
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(groups, dtype=torch.int64),
        normalize_rewards=bool(normalize),
        use_leave_one_out_baseline=bool(leave_one_out),
    )


def brute_force(rewards: list[float], groups: list[int], normalize: int, leave_one_out: int) -> list[float]:
    """r - mean(compared), over their unbiased deviation + 1e-6 where it is not 0; 0 for a sample that is alone."""
    exact = [Fraction(float(torch.tensor(r, dtype=torch.float32))) for r in rewards]
    out = []
    for i, reward in enumerate(exact):
        group = [j for j in range(len(exact)) if groups[j] == groups[i]]
        compared = [exact[j] for j in group if not (leave_one_out and j == i)]
        if len(group) == 1:
            out.append(0.0)
            continue
        mean = sum(compared) / len(compared)
        variance = sum((r - mean) ** 2 for r in compared) / max(len(compared) - 1, 1)
        divisor = math.sqrt(variance) + 1e-6 if normalize and variance else 1.0
        out.append(float(reward - mean) / divisor)
    return out


@SWITCHES
@settings(deadline=None, max_examples=80)
@given(batch=st.lists(st.tuples(st.sampled_from(REWARDS), st.integers(-3, 3)), min_size=1, max_size=24))
def test_advantages_equal_brute_force(batch, normalize, leave_one_out):
    rewards, groups = map(list, zip(*batch, strict=True))
    got = advantages(rewards, groups, normalize, leave_one_out)
    assert got.dtype == torch.float32
    expected = brute_force(rewards, groups, normalize, leave_one_out)
    assert got.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 8, 16, 33])
def test_leave_one_out_does_not_divide_when_the_others_are_all_equal(size):
    got = advantages([1.0] + [0.0] * (size - 1), [0] * size, normalize=1, leave_one_out=1)
    assert got[0].item() == pytest.approx(1.0, rel=1e-6)
    assert got.tolist() == pytest.approx(brute_force([1.0] + [0.0] * (size - 1), [0] * size, 1, 1), rel=1e-5)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(REWARDS), min_size=2, max_size=16))
def test_leave_one_out_without_normalizing_is_rloo(rewards):
    k = len(rewards)  # arXiv 2402.14740: R_i - 1/(k-1) * sum over j != i of R_j
    rloo = [r - math.fsum(rewards[:i] + rewards[i + 1 :]) / (k - 1) for i, r in enumerate(rewards)]
    assert advantages(rewards, [7] * k, normalize=0, leave_one_out=1).tolist() == pytest.approx(rloo, abs=1e-6)


@SWITCHES
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, 1.0, -2.3])
def test_equal_rewards_carry_no_signal(reward, normalize, leave_one_out):
    for size in (2, 3, 5, 7, 8, 16, 17, 64):
        assert advantages([reward] * size, [4] * size, normalize, leave_one_out).tolist() == [0.0] * size


@SWITCHES
def test_a_group_of_one_carries_no_signal(normalize, leave_one_out):
    assert advantages([0.7, 1.0, -5.0], [2, 0, 9], normalize, leave_one_out).tolist() == [0, 0, 0]
    assert advantages([0.0, 0.7, 1.0], [1, 2, 1], normalize, leave_one_out)[1] == 0


@SWITCHES
@settings(deadline=None, max_examples=30)
@given(
    batch=st.lists(st.tuples(st.sampled_from(REWARDS), st.integers(0, 3)), min_size=1, max_size=16),
    random=st.randoms(use_true_random=False),
)
def test_order_and_names_of_groups_do_not_matter(batch, random, normalize, leave_one_out):
    order = random.sample(range(len(batch)), len(batch))
    straight = advantages(*map(list, zip(*batch, strict=True)), normalize, leave_one_out)
    shuffled = advantages(
        [batch[i][0] for i in order], [1000 - 7 * batch[i][1] for i in order], normalize, leave_one_out
    )
    assert shuffled.tolist() == pytest.approx([straight[i].item() for i in order], rel=1e-5, abs=1e-6)


@SWITCHES
def test_no_samples_give_no_advantages(normalize, leave_one_out):
    assert advantages([], [], normalize, leave_one_out).shape == (0,)


def group_mean(rewards: list[float], groups: list[int], i: int) -> float:
    group = [r for r, g in zip(rewards, groups, strict=True) if g == groups[i]]
    return math.fsum(group) / len(group)


def reinforce_plus_plus(rewards, groups, mask, minus_baseline, kl) -> list[list[float]]:
    """Token by token on Python floats; 0 outside the mask."""
    raw = {
        (i, t): reward - (group_mean(rewards, groups, i) if minus_baseline else 0.0) - (kl[i][t] if kl else 0.0)
        for i, reward in enumerate(rewards)
        for t, inside in enumerate(mask[i])
        if inside
    }
    mean = math.fsum(raw.values()) / len(raw)
    variance = math.fsum((a - mean) ** 2 for a in raw.values()) / len(raw)
    scale = math.sqrt(max(variance, 1e-8))
    return [[(raw[i, t] - mean) / scale if (i, t) in raw else 0.0 for t in range(len(m))] for i, m in enumerate(mask)]


@st.composite
def token_batches(draw):
    """(rewards, groups of two or more, mask with a token at least, kl or None, garbage for the padding)."""
    groups = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6)) * 2
    rewards = [draw(st.sampled_from(REWARDS)) for _ in groups]
    row = st.lists(st.booleans(), min_size=5, max_size=5)
    mask = [draw(row) for _ in groups]
    mask[0][draw(st.integers(0, 4))] = True
    penalties = st.lists(st.sampled_from([-0.3, 0.0, 0.05, 1.5]), min_size=5, max_size=5)
    kl = [draw(penalties) for _ in groups] if draw(st.booleans()) else None
    return rewards, groups, mask, kl, draw(st.sampled_from(GARBAGE))


@pytest.mark.parametrize("minus_baseline", [False, True])
@settings(deadline=None, max_examples=60)
@given(batch=token_batches())
def test_reinforce_plus_plus_equals_the_formula_and_never_reads_padding(batch, minus_baseline):
    rewards, groups, mask, kl, garbage = batch
    dirty = [
        [value if inside else garbage for value, inside in zip(*row, strict=True)]
        for row in zip(kl or [], mask, strict=kl is not None)
    ]
    got = reinforce_plus_plus_advantages(
        torch.tensor(rewards),
        torch.tensor(groups),
        torch.tensor(mask).float(),
        minus_baseline=minus_baseline,
        kl=torch.tensor(dirty) if kl else None,
    )
    assert got.dtype == torch.float32
    rewards, kl = torch.tensor(rewards).tolist(), torch.tensor(kl).tolist() if kl else None  # as float32 has them
    expected = reinforce_plus_plus(rewards, groups, mask, minus_baseline, kl)
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-9)


def test_reinforce_plus_plus_is_white_over_the_tokens_of_the_mask():
    generator = torch.Generator().manual_seed(0)
    rewards, mask = torch.rand(8, generator=generator), torch.rand(8, 30, generator=generator) < 0.6
    got = reinforce_plus_plus_advantages(rewards, torch.arange(8) // 2, mask)
    assert got[mask].double().mean().item() == pytest.approx(0.0, abs=1e-7)
    assert got[mask].double().square().mean().item() == pytest.approx(1.0, rel=1e-6)
    assert (got[~mask] == 0).all()


@pytest.mark.parametrize("minus_baseline", [False, True])
def test_reinforce_plus_plus_of_equal_rewards_is_zero(minus_baseline):
    got = reinforce_plus_plus_advantages(
        torch.full((6,), 0.7), torch.arange(6) // 3, torch.ones(6, 4), minus_baseline=minus_baseline
    )
    assert torch.equal(got, torch.zeros(6, 4))


def test_reinforce_plus_plus_does_not_blow_up_rewards_that_hardly_differ():
    got = reinforce_plus_plus_advantages(torch.tensor([0.0, 1e-5]), torch.tensor([0, 0]), torch.ones(2, 1))
    assert got[:, 0].tolist() == pytest.approx([-0.05, 0.05])  # 5e-6 / sqrt(1e-8)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.sampled_from([0.1, 0.7, 1.0]), min_size=2, max_size=6), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_groups_with_signal_are_those_whose_rewards_differ(groups, random):
    samples = [(i, r, len(set(own)) > 1) for i, own in enumerate(groups) for r in own]
    random.shuffle(samples)
    ids, rewards, expected = zip(*samples, strict=True)
    assert groups_with_signal(torch.tensor(rewards), torch.tensor(ids)).tolist() == list(expected)


def test_rewards_that_differ_by_a_rounding_carry_signal_and_equal_ones_do_not():
    close = torch.tensor([0.1, torch.nextafter(torch.tensor(0.1), torch.tensor(1.0)), 0.1, 0.1])
    assert groups_with_signal(close, torch.tensor([0, 0, 1, 1])).tolist() == [True, True, False, False]


LENGTHS = {"max_response_length": 25, "overlong_buffer_length": 5, "overlong_buffer_penalty": 0.5}


def test_overlong_penalty_is_nemo_rls_up_to_the_maximal_length():
    # NeMo RL's tests/unit/algorithms/test_reward_functions.py has these lengths and values.
    penalty = overlong_penalty(torch.tensor([10, 22, 25]), **LENGTHS)
    assert penalty.tolist() == pytest.approx([0.0, -0.2, -0.5])
    assert penalty.dtype == torch.float32


def test_overlong_penalty_is_linear_in_the_buffer_and_bounded_beyond_the_maximal_length():
    got = overlong_penalty(torch.arange(15, 40), **LENGTHS)
    # DAPO, eq. 13: ((L_max - L_cache) - |y|) / L_cache in the buffer, -1 beyond; here times 0.5
    expected = [0.0 if n <= 20 else 0.5 * (20 - n) / 5 if n <= 25 else -0.5 for n in range(15, 40)]
    assert got.tolist() == pytest.approx(expected)
    assert not torch.signbit(got[:6]).any(), "no penalty is 0, not -0"


def test_truncated_answers_keep_a_share_of_their_reward():
    got = stop_properly_penalty(torch.tensor([1.0, 0.5, 1.0]), torch.tensor([True, False, False]), 0.25)
    assert got.tolist() == [0.25, 0.5, 1.0]


@pytest.mark.parametrize(("rewards", "groups"), [((3,), (2,)), ((2, 2), (2, 2)), ((), ())])
@pytest.mark.parametrize("function", [group_advantages, groups_with_signal])
def test_shapes_that_do_not_match_are_refused(function, rewards, groups):
    with pytest.raises(ValueError, match=r"\[B\]"):
        function(torch.zeros(rewards), torch.zeros(groups, dtype=torch.int64))


@pytest.mark.parametrize(
    ("rewards", "groups", "why"),
    [
        (torch.tensor([1, 0]), torch.tensor([0, 0]), "rewards must be floating point, got torch.int64"),
        (torch.zeros(2), torch.zeros(2), "group_ids must be integers, got torch.float32"),
        (torch.tensor([0.0, math.nan, math.inf]), torch.tensor([0, 0, 0]), "of 2 samples .* first is sample 1"),
    ],
)
@pytest.mark.parametrize("function", [group_advantages, groups_with_signal])
def test_rewards_and_groups_of_the_wrong_kind_are_refused(function, rewards, groups, why):
    with pytest.raises(ValueError, match=why):
        function(rewards, groups)


def test_a_group_of_one_is_refused_where_groups_are_compared():
    rewards, groups = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([4, 4, 9])
    with pytest.raises(ValueError, match=r"group 9 has one sample.*num_generations_per_prompt"):
        groups_with_signal(rewards, groups)
    with pytest.raises(ValueError, match=r"group 9 has one sample.*minus_baseline=false"):
        reinforce_plus_plus_advantages(rewards, groups, torch.ones(3, 2))
    reinforce_plus_plus_advantages(rewards, groups, torch.ones(3, 2), minus_baseline=False)


@pytest.mark.parametrize(
    ("mask", "kl", "why"),
    [
        (torch.ones(3, 4), None, r"must be \[B, T\] with B = 2"),
        (torch.ones(2), None, r"must be \[B, T\] with B = 2"),
        (torch.ones(2, 4), torch.zeros(2, 3), r"must have the mask's shape, \[2, 4\]"),
        (torch.ones(2, 4), torch.full((2, 4), math.nan), "kl is not finite at 8 tokens"),
    ],
)
def test_reinforce_plus_plus_refuses_what_does_not_fit(mask, kl, why):
    with pytest.raises(ValueError, match=why):
        reinforce_plus_plus_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), mask, kl=kl)


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"overlong_buffer_length": 0}, "overlong_buffer_length=0"),
        ({"overlong_buffer_length": 26}, "overlong_buffer_length=26"),
        ({"overlong_buffer_penalty": -1.0}, "overlong_buffer_penalty=-1.0"),
        ({"overlong_buffer_penalty": math.nan}, "overlong_buffer_penalty=nan"),
    ],
)
def test_shaping_out_of_range_is_refused_by_its_key(changed, key):
    with pytest.raises(UserError, match=rf"grpo\.reward_shaping\.{key}"):
        overlong_penalty(torch.tensor([3]), **(LENGTHS | changed))


@pytest.mark.parametrize("coefficient", [-0.1, 1.1, math.nan])
def test_a_stop_properly_coefficient_out_of_range_is_refused_by_its_key(coefficient):
    with pytest.raises(UserError, match=r"grpo\.reward_shaping\.stop_properly_penalty_coef"):
        stop_properly_penalty(torch.ones(2), torch.tensor([True, False]), coefficient)


@pytest.mark.parametrize("truncated", [torch.tensor([True]), torch.tensor([1, 0])])
def test_truncated_of_the_wrong_kind_is_refused(truncated):
    with pytest.raises(ValueError, match=r"must be bool \[B\]"):
        stop_properly_penalty(torch.ones(2), truncated, 0.5)


def test_a_batch_without_a_token_has_no_advantage():
    found = reinforce_plus_plus_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.zeros(2, 4))
    assert torch.equal(found, torch.zeros(2, 4))


def test_groups_are_counted_by_what_they_teach():
    """Groups of 0, 0 and 1, 1 and 0.1, 0.1 and 0, 1; in any order. Ten rewards of 0.1 have a deviation in float32."""
    rewards = torch.tensor([0.0, 1.0, 0.1, 0.0, 0.0, 1.0, 0.1, 1.0])
    groups = torch.tensor([3, 1, 7, 0, 3, 1, 7, 0])
    assert group_metrics(rewards, groups) == {
        "frac_reward_zero_std": 0.75,
        "baseline_reward/pct_0": 25,
        "baseline_reward/pct_1": 25,
        "baseline_reward/pct_mixed": 50,
    }
    assert group_metrics(torch.full((10,), 0.1), torch.zeros(10, dtype=torch.int64))["frac_reward_zero_std"] == 1
