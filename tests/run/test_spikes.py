"""Spikes of a metric: what is one, how long it lasts, and what is none."""

import math
import random

import pytest

from nemo_fp8rl.run.spikes import LONGEST, WARM_UP, Spikes, count_spikes, spikes_of_run


def noise(count: int, mean: float = 2.0, sigma: float = 0.1, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(mean, sigma) for _ in range(count)]


@pytest.mark.parametrize("mean", [2.0, 0.0, -3.0])
def test_noise_has_no_spike(mean):
    assert count_spikes(noise(2000, mean)) == Spikes(0, 0, 2000 - WARM_UP)


def test_a_spike_is_counted_once_with_its_steps():
    values = noise(100)
    values[40:43] = [4.0, 9.0, 3.5]
    values[70] = 3.5
    assert count_spikes(values) == Spikes(2, 3, 100 - WARM_UP)


def test_a_spike_leaves_the_limit_of_the_next_one():
    """With the first one in mean and variance, a second one of a hundredth of it could not be seen."""
    values = noise(60)
    values[30], values[33] = 200.0, 4.0
    assert count_spikes(values).count == 2


@pytest.mark.parametrize("rise", [5.0, 7.0])
def test_the_limit_is_six_sigma_above_the_mean(rise):
    values = [1.0, 3.0] * 15  # mean 2 and sigma 1, but for the weight of the last values
    assert count_spikes([*values, 2.0 + rise, *values]).count == (rise > 6)


def test_a_fall_is_no_spike():
    values = noise(60)
    values[30:33] = [-50.0, -1000.0, 0.0]
    assert count_spikes(values).count == 0


def test_a_value_that_is_not_finite_is_a_spike():
    values = noise(60)
    values[3], values[30], values[40:42] = math.nan, math.nan, [math.inf, -math.inf]
    assert count_spikes(values) == Spikes(2, 2, 60 - WARM_UP - 1)


def test_a_new_level_is_one_spike():
    values = [*noise(60), *noise(500, mean=6.0)]
    found = count_spikes(values)
    assert (found.count, found.longest) == (1, LONGEST)


def test_a_spike_at_the_end_has_the_steps_so_far():
    assert count_spikes([*noise(30), 9.0, 9.0]) == Spikes(1, 2, 22)


def test_equal_values_make_no_small_rise_a_spike():
    assert count_spikes([*[2.0] * 30, 2.01, *[2.0] * 5]).count == 0
    assert count_spikes([*[2.0] * 30, 2.02, *[2.0] * 5]).count == 1


def test_a_run_is_judged_by_its_steps_with_a_gradient():
    """Every second step has no gradient, and its loss of 0 would hide the spike of 1 among values around 0.1."""
    losses = noise(40, mean=0.1, sigma=0.01)
    losses[30] = 0.35
    rows = [{"step": 0, "train/loss": 50.0, "train/grad_norm": 1.0}]
    for step, loss in enumerate(losses):
        rows.append({"step": 2 * step + 1, "train/loss": loss, "train/grad_norm": 0.5})
        rows.append({"step": 2 * step + 2, "train/loss": 0.0, "train/grad_norm": 0.0})
    assert count_spikes([row["train/loss"] for row in rows[1:]]).count == 0
    assert spikes_of_run(rows, "train/loss") == Spikes(1, 1, 40 - WARM_UP)
    assert spikes_of_run(rows, "train/grad_norm") == Spikes(0, 0, 40 - WARM_UP)
    assert spikes_of_run(rows[: 2 * WARM_UP], "train/loss") is None
    assert spikes_of_run(rows, "train/kl") is None
