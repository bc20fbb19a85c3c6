"""Tests of axes and of the thinning of lines."""

import pytest

from nemo_fp8rl.commands.report.scale import Scale, choose_linear_ticks, fit_linear_scale, fit_log_scale, format_number
from nemo_fp8rl.commands.report.thinning import compute_running_mean, keep_extremes, split_evenly


def test_ticks_are_round_and_within():
    assert choose_linear_ticks(0.02, 0.98) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert choose_linear_ticks(-3, 103) == [0, 20, 40, 60, 80, 100]
    assert choose_linear_ticks(1e-9, 4e-9) == pytest.approx([1e-9, 2e-9, 3e-9, 4e-9])


def test_ticks_that_are_close_have_digits_enough():
    assert [label for _, label in Scale(0.9999984, 1.0).make_ticks()] == ["0.9999985", "0.999999", "0.9999995", "1"]
    assert [label for _, label in Scale(2.64e-5, 2.68e-5).make_ticks()] == [
        *("2.64e-05", "2.65e-05", "2.66e-05", "2.67e-05", "2.68e-05")
    ]


def test_a_constant_has_an_axis_around_it():
    assert fit_linear_scale([5.0]).low < 5.0 < fit_linear_scale([5.0]).high
    assert fit_linear_scale([0.0, 0.0], from_zero=True).low == 0


def test_a_logarithmic_axis_shows_the_distance_to_its_offset():
    scale = fit_log_scale([1.00002, 1.03], offset=1)
    assert [label for _, label in scale.make_ticks()] == ["1.00001", "1.0001", "1.001", "1.01", "1.1"]
    assert [position for position, _ in scale.make_ticks()] == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert scale.position_of(1.0) == 0  # agreement, at the bottom
    assert fit_log_scale([0.0]) is None


def test_a_logarithmic_axis_ends_after_six_decades():
    scale = fit_log_scale([1e-18, 0.5])
    assert (scale.low, scale.high) == (-6, 0)
    assert scale.position_of(1e-18) == 0


def test_places_stay_on_the_axis():
    assert Scale(0, 1).position_of(7) == 1
    assert Scale(0, 1).position_of(-7) == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (3.1e-7, "3.1e-07"), (12500, "12,500"), (3.2e6, "3.2M"), (1.5e9, "1.5G")],
)
def test_numbers_are_short(value, text):
    assert format_number(value) == text


def test_thinning_keeps_every_spike():
    points = [(float(i), 0.0) for i in range(5000)]
    points[1234], points[4321] = (1234.0, 9.0), (4321.0, -9.0)
    extremes = keep_extremes(points, 1000)
    assert len(extremes) <= 1000
    assert {points[1234], points[4321]} <= set(extremes)
    assert extremes == sorted(extremes)
    assert keep_extremes(points[:1000], 1000) == points[:1000]


def test_the_running_mean_begins_when_it_has_enough():
    assert compute_running_mean([(1, 2.0), (2, 4.0), (3, 9.0)], 2) == [(2, 3.0), (3, 6.5)]


def test_stretches_hold_everything_once():
    assert [list(part) for part in split_evenly(range(7), 3)] == [[0, 1], [2, 3, 4], [5, 6]]
    assert [list(part) for part in split_evenly(range(2), 5)] == [[0], [1]]
