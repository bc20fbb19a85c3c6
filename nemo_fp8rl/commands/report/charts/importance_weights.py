"""The histogram of importance weights: log weights on an axis that is logarithmic on both sides of 0."""

import math
from collections import Counter
from collections.abc import Sequence

from nemo_fp8rl.algorithms.importance_bins import BINS_A_DECADE, SMALLEST
from nemo_fp8rl.commands.report.charts.drawing import (
    COLOURS,
    Chart,
    Shape,
    drop_overlaps,
    keep_inside,
    make_axis,
    make_hover_data,
)
from nemo_fp8rl.commands.report.charts.scale import Scale, fit_log_scale, format_number
from nemo_fp8rl.commands.report.run_data import Run

NAME = "importance weights"
Span = tuple[float, float]
"""Positions of the edges of a bin on the axis, see `_distance_from_centre`."""


def make_weight_histogram(runs: Sequence[Run]) -> Chart | str | None:
    """Return the share of each run's tokens in every bin, over all steps.

    A sentence if all are in the bin in the middle, None if no run recorded weights.
    """
    counts = {i: count for i, run in enumerate(runs) if (count := _count_tokens(run))}
    if not counts:
        return None
    middle = 1 / BINS_A_DECADE
    if {span for count in counts.values() for span in count} == {(-middle, middle)}:
        tokens = sum(sum(count.values()) for count in counts.values())
        return f"{NAME}: all {tokens:,} tokens have a weight within {10.0**SMALLEST:g} of 1"
    edges = [abs(edge) for count in counts.values() for span in count for edge in span]
    x_scale = Scale(-max(edges), max(edges))
    shares = {i: {span: n / sum(count.values()) for span, n in sorted(count.items())} for i, count in counts.items()}
    y_scale = fit_log_scale(share for count in shares.values() for share in count.values())
    assert y_scale is not None, "a share is above 0"
    axis = make_axis(y_scale, "share of all tokens")
    frame = axis.frame
    shapes, series = [], []
    labels: dict[float, str] = {}
    for place, (i, bins) in enumerate(shares.items()):  # the bars of a bin stand side by side
        bars = "".join(
            f"M{frame.x(x_scale.position_of(low + (high - low) * place / len(shares))):.1f} {frame.bottom}"
            f"V{frame.y(y_scale.position_of(share)):.1f}"
            f"H{frame.x(x_scale.position_of(low + (high - low) * (place + 1) / len(shares))):.1f}V{frame.bottom}Z"
            for (low, high), share in bins.items()
        )
        shapes.append(Shape("bars", bars, i % COLOURS, i))
        middles = [((low + high) / 2, share) for (low, high), share in bins.items()]
        series.append((runs[i].name, i % COLOURS, i, middles))
        labels |= {x: f"weight about {format_number(_weight_at(x))}" for x, _ in middles}
    powers = range(SMALLEST + 1, 2)
    marks = [(sign * _distance_from_centre(10.0**power), sign * 10.0**power) for power in powers for sign in (-1, 1)]
    ticks = [(0.0, "about 1"), *((x, f"{math.exp(mark):.4g}") for x, mark in marks if abs(x) <= max(edges))]
    return Chart(
        NAME,
        "exp(trainer's minus engine's log-prob) of a token; logarithmic; the bar in the middle: within "
        f"{10.0**SMALLEST:g} of 1",
        frame,
        "weight",
        axis.unit,
        drop_overlaps(keep_inside([(frame.x(x_scale.position_of(x)), label) for x, label in sorted(ticks)])),
        axis.labels,
        axis.shapes + shapes,
        axis.grid,
        hover=make_hover_data(x_scale, frame, series, labels),
    )


def _count_tokens(run: Run) -> Counter[Span]:
    counts: Counter[Span] = Counter()
    for bins in run.log_weights.values():
        for low, high, tokens in bins:
            counts[_find_span(low, high)] += tokens
    return counts


def _find_span(low: float | None, high: float | None) -> Span:
    """Return the positions of the edges of a bin; an open bin (None) is drawn as wide as the others."""
    width = 1 / BINS_A_DECADE
    start = -math.inf if low is None else math.copysign(_distance_from_centre(low), low)
    end = start + width if high is None else math.copysign(_distance_from_centre(high), high)
    return (end - width if low is None else start), end


def _distance_from_centre(log_weight: float) -> float:
    """Return the decades from the centre of the axis to a log weight; the bin at the centre has double width."""
    return max(math.log10(abs(log_weight)) - SMALLEST, 0.0) + 1 / BINS_A_DECADE


def _weight_at(position: float) -> float:
    """Return the weight at a position of the axis, the inverse of `_distance_from_centre`."""
    decades = abs(position) - 1 / BINS_A_DECADE
    return math.exp(math.copysign(10 ** (decades + SMALLEST), position)) if decades > 0 else 1.0
