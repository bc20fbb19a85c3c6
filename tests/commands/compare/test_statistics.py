"""Intervals against numbers that others publish, and what must not change them."""

import math
import random
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_fp8rl.commands.compare.statistics import T_975, interval, paired_interval

FINITE = st.floats(-1e3, 1e3, allow_nan=False).map(lambda value: round(value, 3))
SAMPLES = st.lists(FINITE, min_size=2, max_size=8)


def probability_below(t: float, freedom: int, pieces: int = 4_000) -> float:
    """Of Student's distribution, by Simpson's rule from 0 to t."""
    log_front = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)

    def density(x: float) -> float:
        return math.exp(log_front - (freedom + 1) / 2 * math.log1p(x * x / freedom))

    width = t / pieces
    inner = sum((4 if i % 2 else 2) * density(i * width) for i in range(1, pieces))
    return 0.5 + width / 3 * (density(0.0) + inner + density(t))


@pytest.mark.parametrize("freedom", range(1, 31))
def test_quantiles_are_those_of_students_distribution(freedom):
    t = T_975[freedom - 1]
    assert probability_below(t - 0.0006, freedom) < 0.975 < probability_below(t + 0.0006, freedom)


def test_the_interval_of_gossets_sleep_data():
    """Student 1908, additional hours of sleep, paired differences: t.test(paired=TRUE) in R gives 0.7001 to 2.4599."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = paired_interval(dict(enumerate(second)), dict(enumerate(first)))
    assert found.n == 10
    assert found.mean == pytest.approx(1.58)
    assert found.low == pytest.approx(0.7001142, abs=2e-4)  # the table's quantile has three decimals
    assert found.high == pytest.approx(2.4598858, abs=2e-4)
    assert found.contains_zero is False


def test_five_seeds_get_students_quantile_and_not_the_normal_one():
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.half == pytest.approx(2.776 * math.sqrt(2.5) / math.sqrt(5))
    assert found.half > 1.4 * NormalDist().inv_cdf(0.975) * math.sqrt(2.5) / math.sqrt(5)


def test_19_of_20_intervals_hold_the_mean():
    rng = random.Random(0)
    held = sum(interval([rng.gauss(0.0, 1.0) for _ in range(5)]).contains_zero for _ in range(4_000))
    assert held / 4_000 == pytest.approx(0.95, abs=0.011)  # three standard errors


def test_one_value_has_no_interval_and_none_has_no_mean():
    alone = interval([0.4])
    assert (alone.mean, alone.half, alone.low, alone.high, alone.contains_zero) == (0.4, None, None, None, None)
    assert interval([]) is None
    assert paired_interval({1: 0.5}, {2: 0.5}) is None


def test_only_seeds_that_both_have_are_compared():
    assert paired_interval({1: 1.0, 2: 3.0, 9: 100.0}, {2: 1.0, 1: 0.0, 5: -100.0}) == interval([1.0, 2.0])


def test_many_values_are_not_given_too_narrow_an_interval():
    values = [float(i % 7) for i in range(200)]
    exact = 1.972 * 2.0  # t for 199 degrees of freedom; the standard deviation is near 2
    assert interval(values).half * math.sqrt(200) > exact * 0.99


@given(SAMPLES, FINITE)
def test_a_shift_moves_the_mean_and_leaves_the_width(values, shift):
    before, after = interval(values), interval([value + shift for value in values])
    assert after.mean == pytest.approx(before.mean + shift, abs=1e-6)
    assert after.half == pytest.approx(before.half, abs=1e-6)


@given(SAMPLES, st.floats(0.01, 100.0))
def test_a_factor_scales_mean_and_width(values, factor):
    before, after = interval(values), interval([value * factor for value in values])
    assert after.mean == pytest.approx(before.mean * factor, abs=1e-6)
    assert after.half == pytest.approx(before.half * factor, abs=1e-6)


@given(SAMPLES, st.randoms())
def test_the_order_of_values_does_not_matter(values, rng):
    shuffled = list(values)
    rng.shuffle(shuffled)
    before, after = interval(values), interval(shuffled)
    assert after.mean == pytest.approx(before.mean, abs=1e-9)
    assert after.half == pytest.approx(before.half, abs=1e-9)


@given(st.lists(st.tuples(FINITE, FINITE), min_size=2, max_size=8), st.lists(FINITE, min_size=8, max_size=8))
def test_what_a_seed_does_to_both_cancels(pairs, of_seeds):
    """And exchanging the two turns the sign alone."""
    ones, others = ({i: pair[side] for i, pair in enumerate(pairs)} for side in (0, 1))
    before = paired_interval(ones, others)
    both = [{i: value + of_seeds[i] for i, value in values.items()} for values in (ones, others)]
    assert paired_interval(*both).mean == pytest.approx(before.mean, abs=1e-6)
    assert paired_interval(*both).half == pytest.approx(before.half, abs=1e-6)
    turned = paired_interval(others, ones)
    assert turned.mean == pytest.approx(-before.mean, abs=1e-9)
    assert turned.half == pytest.approx(before.half, abs=1e-9)
