"""From values to places on an axis, and the ticks along it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

MOST_DECADES = 6
"""Decades of a logarithmic axis, at most: two sides that agree but for one token's last bit have a KL of 1e-18."""


@dataclass(frozen=True)
class Scale:
    """low, high: of the axis, places of its ends. log: places follow log10(value - offset)."""

    low: float
    high: float
    log: bool = False
    offset: float = 0.0

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end; what a logarithm cannot show lies at the low end."""
        if self.log:
            above = value - self.offset
            value = math.log10(above) if above > 0 else self.low
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def ticks(self) -> list[tuple[float, str]]:
        """(place, label)."""
        if not self.log:
            return [(self.place(mark), label) for mark, label in distinct(linear_ticks(self.low, self.high))]
        first, last = math.ceil(self.low), math.floor(self.high)
        every = max(1, -(-(last - first + 1) // 6))
        marks = [self.offset + 10.0**power for power in range(first, last + 1, every)]
        return [(self.place(mark), label) for mark, label in distinct([self.offset, *marks])[1:]]


def linear(values: Iterable[float], from_zero: bool = False) -> Scale:
    values = list(values)
    low, high = min(values), max(values)
    low = min(low, 0.0) if from_zero else low
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 0.5
    return Scale(low if from_zero and low == 0 else low - margin, high + margin)


def logarithmic(values: Iterable[float], offset: float = 0.0) -> Scale | None:
    """Whole decades around the values above `offset`, the highest MOST_DECADES; None where there are none."""
    above = [value - offset for value in values if value > offset]
    if not above:
        return None
    low, high = math.floor(math.log10(min(above))), math.ceil(math.log10(max(above)))
    return Scale(max(low, high - MOST_DECADES), max(high, low + 1), log=True, offset=offset)


def linear_ticks(low: float, high: float) -> list[float]:
    """About five multiples of 1, 2 or 5 times a power of ten within the limits."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(step for m in (1, 2, 5, 10) if (step := m * power) >= 0.9 * raw)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def distinct(values: list[float]) -> list[tuple[float, str]]:
    """Each with a label, of as many digits as it takes to tell them apart."""
    for digits in range(5, 16):
        labels = [number(value, digits) for value in values]
        if len(set(labels)) == len(labels):
            break
    return [*zip(values, labels, strict=True)]


def number(value: float, digits: int = 5) -> str:
    """Short: 0.00012, 3.1e-07, 12,500, 3.2M."""
    if value == 0:
        return "0"
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    if abs(value) >= 1e4:
        return f"{value:,.0f}"
    return f"{value:.{digits - 4}e}" if abs(value) < 1e-4 else f"{value:.{digits}g}"
