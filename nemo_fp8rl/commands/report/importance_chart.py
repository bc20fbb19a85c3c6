"""The histogram of importance weights: log weights on an axis that is logarithmic on both sides of 0."""

import math
from collections import Counter
from collections.abc import Sequence

from nemo_fp8rl.algorithms.importance_bins import BINS_A_DECADE, SMALLEST
from nemo_fp8rl.commands.report.charts import (
    COLOURS,
    Chart,
    Shape,
    across,
    hover_data,
    svg_path,
    without_overlap,
    y_ticks,
)
from nemo_fp8rl.commands.report.run_data import Run
from nemo_fp8rl.commands.report.scale import Scale, logarithmic, number

Span = tuple[float, float]
"""Places of a bin's edges on the axis, see `_distance`."""


def weight_histogram(runs: Sequence[Run]) -> Chart | None:
    """Share of each run's tokens in every bin, over all its steps; None where none has recorded any."""
    counts = {i: count for i, run in enumerate(runs) if (count := _counts(run))}
    if not counts:
        return None
    ends = [abs(edge) for count in counts.values() for span in count for edge in span]
    x_scale = Scale(-max(ends), max(ends))
    shares = {i: {span: n / sum(count.values()) for span, n in sorted(count.items())} for i, count in counts.items()}
    y_scale = logarithmic(share for count in shares.values() for share in count.values())
    assert y_scale is not None, "a share is above 0"
    bottom = 10**y_scale.low
    shapes, series = [], []
    labels: dict[float, str] = {}
    for i, bins in shares.items():
        bars = "".join(
            svg_path([(low, bottom), (low, share), (high, share), (high, bottom)], x_scale, y_scale) + "Z"
            for (low, high), share in bins.items()
        )
        shapes.append(Shape("bars", bars, i % COLOURS, i))
        middles = [((low + high) / 2, share) for (low, high), share in bins.items()]
        series.append((runs[i].name, i % COLOURS, i, middles))
        labels |= {x: f"weight about {number(_weight(x))}" for x, _ in middles}
    powers = range(SMALLEST + 1, 2)
    marks = [(sign * _distance(10.0**power), sign * 10.0**power) for power in powers for sign in (-1, 1)]
    inside = [(0.0, "1"), *((x, f"{math.exp(mark):.4g}") for x, mark in marks if abs(x) <= max(ends))]
    return Chart(
        "Importance weights",
        "exp(trainer's minus engine's log-prob) of a token; share of all tokens, logarithmic",
        without_overlap([(across(x_scale.place(x)), label) for x, label in sorted(inside)]),
        y_ticks(y_scale),
        shapes,
        hover=hover_data(x_scale, series, labels),
    )


def _counts(run: Run) -> Counter[Span]:
    counts: Counter[Span] = Counter()
    for bins in run.log_weights.values():
        for low, high, tokens in bins:
            counts[_span(low, high)] += tokens
    return counts


def _span(low: float | None, high: float | None) -> Span:
    """Places of a bin's edges; a bin without end is as wide as the others."""
    width = 1 / BINS_A_DECADE
    left = -math.inf if low is None else math.copysign(_distance(low), low)
    right = left + width if high is None else math.copysign(_distance(high), high)
    return (right - width if low is None else left), right


def _distance(log_weight: float) -> float:
    """Decades from the middle of the axis to a log weight; the bin in the middle is twice as wide as the others."""
    return max(math.log10(abs(log_weight)) - SMALLEST, 0.0) + 1 / BINS_A_DECADE


def _weight(place: float) -> float:
    """The inverse of `_distance`: the weight at a place of the axis."""
    decades = abs(place) - 1 / BINS_A_DECADE
    return math.exp(math.copysign(10 ** (decades + SMALLEST), place)) if decades > 0 else 1.0
