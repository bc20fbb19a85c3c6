"""Group-relative advantages against exact rational arithmetic, one sample at a time.

The grid of rewards keeps deviations above 0.01, so float32 leaves relative errors of some 1e-6; 1e-5 is asked for.
"""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8rl.algorithms.advantages import group_advantages

SWITCHES = pytest.mark.parametrize(("normalize", "leave_one_out"), [(a, b) for a in (0, 1) for b in (0, 1)])
REWARDS = [0.0, 0.1, 0.25, 0.5, 0.7, 1.0]


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


@pytest.mark.parametrize(("rewards", "groups"), [((3,), (2,)), ((2, 2), (2, 2)), ((), ())])
def test_shapes_that_do_not_match_are_refused(rewards, groups):
    with pytest.raises(ValueError, match=r"\[B\]"):
        group_advantages(torch.zeros(rewards), torch.zeros(groups, dtype=torch.int64))
