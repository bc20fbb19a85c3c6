"""Tests of axes and of the thinning of lines."""

import pytest

from nemo_fp8rl.commands.report.charts.drawing import make_axis, separate
from nemo_fp8rl.commands.report.charts.scale import (
    Scale,
    choose_linear_ticks,
    fit_linear_scale,
    fit_log_scale,
    format_number,
)
from nemo_fp8rl.commands.report.charts.thinning import compute_running_mean, keep_extremes, split_evenly


def test_ticks_are_round_and_within():
    assert choose_linear_ticks(0.02, 0.98) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert choose_linear_ticks(-3, 103) == [0, 20, 40, 60, 80, 100]
    assert choose_linear_ticks(1e-9, 4e-9) == pytest.approx([1e-9, 2e-9, 3e-9, 4e-9])


def test_ticks_that_are_close_have_digits_enough():
    assert labels_of(Scale(0.9999984, 1.0)) == ["0.9999985", "0.999999", "0.9999995", "1"]
    assert labels_of(Scale(2.64e-5, 2.68e-5)) == ["2.64e-5", "2.65e-5", "2.66e-5", "2.67e-5", "2.68e-5"]


def labels_of(scale: Scale) -> list[str]:
    return [tick.label for tick in scale.make_ticks()]


def test_a_constant_has_an_axis_around_it():
    assert fit_linear_scale([5.0]).low < 5.0 < fit_linear_scale([5.0]).high
    assert fit_linear_scale([0.0, 0.0], from_zero=True).low == 0


@pytest.mark.parametrize(
    ("values", "possible", "limits"),
    [
        ([0.0, 0.0], (0, 1), (0, 0.5)),
        ([1.0, 1.0], (0, 1), (0.95, 1)),
        ([0.01, 0.99], (0, 1), (0, 1)),
        ([0.5, 1.2], (0, 1), (0.465, 1.235)),  # a reward of one's own
        ([-1.0, 1.0], (None, None), (-1.1, 1.1)),
    ],
)
def test_an_axis_does_not_show_what_cannot_be(values, possible, limits):
    scale = fit_linear_scale(values, possible=possible)
    assert (scale.low, scale.high) == pytest.approx(limits)


def test_a_logarithmic_axis_shows_the_distance_to_its_offset():
    scale = fit_log_scale([1.00002, 1.03], offset=1)
    assert labels_of(scale) == ["1.00001", "1.0001", "1.001", "1.01", "1.1"]
    assert [tick.position for tick in scale.make_ticks()] == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert fit_log_scale([0.0]) is None
    assert labels_of(fit_log_scale([1.02, 1.03], offset=1)) == ["1.01", "1.02", "1.05", "1.1"]


@pytest.mark.parametrize(
    ("values", "offset", "label"),
    [([1.0, 1.03], 1, "exactly 1"), ([0.0, 1e-4], 0, "exactly 0"), ([-1e-9, 1e-4], 0, "0 or less")],
)
def test_exact_values_have_a_labelled_place_apart_from_the_decades(values, offset, label):
    scale = fit_log_scale(values, offset)
    place, *decades = scale.make_ticks()
    assert place.label == label
    assert place.is_place
    assert scale.position_of(values[0]) == place.position
    assert decades[0].position - place.position > 0.05  # of the lowest gridline, 10 pixels
    assert len(make_axis(scale).grid) == len(decades)


def test_no_offset_value_no_place():
    assert not any(tick.is_place for tick in fit_log_scale([1.0001, 1.03], 1).make_ticks())


def test_a_logarithmic_axis_ends_after_six_decades():
    """Lower values have a place of their own, too, between the exact ones and the lowest decade."""
    scale = fit_log_scale([0.0, 1e-18, 1e-6, 0.5])
    assert (scale.low, scale.high) == (-6, 0)
    assert labels_of(scale)[:3] == ["exactly 0", "lower", "1e-6"]
    positions = [scale.position_of(value) for value in (0.0, 1e-18, 1e-6, 0.5)]
    assert positions == sorted(set(positions))


def test_equal_lines_lie_side_by_side():
    """Two lines that share two of three points, and a third on its own."""
    lines = [[(0, 10), (5, 10), (9, 30)], [(0, 10), (5, 10), (9, 40)], [(0, 90), (5, 90), (9, 90)]]
    moved, num_equal = separate(lines)
    assert num_equal == 2
    assert moved[0] == [(0, 8.5), (5, 8.5), (9, 30)]
    assert moved[1] == [(0, 11.5), (5, 11.5), (9, 40)]
    assert moved[2] == lines[2]
    assert len({line[0][1] for line in separate([[(0, 10)]] * 9)[0]}) == 9


def test_large_axes_have_one_unit():
    axis = make_axis(Scale(0, 2.5e6), "bytes")
    assert axis.unit == "MB"
    assert [tick.label for tick in axis.ticks] == ["0", "0.5", "1", "1.5", "2", "2.5"]
    assert make_axis(Scale(0, 800), "bytes").unit == "bytes"


def test_places_stay_on_the_axis():
    assert Scale(0, 1).position_of(7) == 1
    assert Scale(0, 1).position_of(-7) == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (3.1e-7, "3.1e-7"), (1e-5, "1e-5"), (12500, "12,500"), (3.2e6, "3.2M"), (1.5e9, "1.5G")],
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


def test_the_running_mean_of_exact_values_is_exact():
    values = [1.1, 1.3, 1.7] * 9 + [1.0] * 9
    assert compute_running_mean([*enumerate(values)], 3)[-1] == (35, 1.0)
    assert compute_running_mean([*enumerate(values[:27] + [0.1] * 9)], 3)[-1] == (35, 0.1)


def test_stretches_hold_everything_once():
    assert [list(part) for part in split_evenly(range(7), 3)] == [[0, 1], [2, 3, 4], [5, 6]]
    assert [list(part) for part in split_evenly(range(2), 5)] == [[0], [1]]
