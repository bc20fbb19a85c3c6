"""Axes: the position of a value on an axis, and the ticks along the axis."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

MAX_DECADES = 6
"""A logarithmic axis has at most so many decades: the KL is 1e-18 if the sides differ in the last bit of one token."""


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`. If `log`, positions follow log10(value - offset), as do `low` and `high`."""

    low: float
    high: float
    log: bool = False
    offset: float = 0.0

    def position_of(self, value: float) -> float:
        """Return the position of a value, 0 at the low end to 1 at the high end; 0 if its logarithm is undefined."""
        if self.log:
            above = value - self.offset
            value = math.log10(above) if above > 0 else self.low
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def make_ticks(self) -> list[tuple[float, str]]:
        """Return (position, label) of each tick."""
        if not self.log:
            return [
                (self.position_of(mark), label)
                for mark, label in label_distinctly(choose_linear_ticks(self.low, self.high))
            ]
        first, last = math.ceil(self.low), math.floor(self.high)
        every = max(1, -(-(last - first + 1) // 6))
        marks = [self.offset + 10.0**power for power in range(first, last + 1, every)]
        return [(self.position_of(mark), label) for mark, label in label_distinctly([self.offset, *marks])[1:]]


def fit_linear_scale(values: Iterable[float], from_zero: bool = False) -> Scale:
    """Return an axis around the values with a margin of 5 %; with `from_zero` it includes 0."""
    values = list(values)
    low, high = min(values), max(values)
    low = min(low, 0.0) if from_zero else low
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 0.5
    return Scale(low if from_zero and low == 0 else low - margin, high + margin)


def fit_log_scale(values: Iterable[float], offset: float = 0.0) -> Scale | None:
    """Return an axis of the highest MAX_DECADES whole decades of the values above `offset`; None if none is above."""
    above = [value - offset for value in values if value > offset]
    if not above:
        return None
    low, high = math.floor(math.log10(min(above))), math.ceil(math.log10(max(above)))
    return Scale(max(low, high - MAX_DECADES), max(high, low + 1), log=True, offset=offset)


def choose_linear_ticks(low: float, high: float) -> list[float]:
    """Return about five values within the limits: multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(step for m in (1, 2, 5, 10) if (step := m * power) >= 0.9 * raw)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def label_distinctly(values: list[float]) -> list[tuple[float, str]]:
    """Return (value, label) with as many digits as the labels need to differ."""
    for digits in range(5, 16):
        labels = [format_number(value, digits) for value in values]
        if len(set(labels)) == len(labels):
            break
    return [*zip(values, labels, strict=True)]


def format_number(value: float, digits: int = 5) -> str:
    """Return a short text, such as 0.00012, 3.1e-07, 12,500 or 3.2M."""
    if value == 0:
        return "0"
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    if abs(value) >= 1e4:
        return f"{value:,.0f}"
    return f"{value:.{digits - 4}e}" if abs(value) < 1e-4 else f"{value:.{digits}g}"
