"""Axes: the position of a value on an axis, and the ticks along the axis.

A logarithmic axis measures the distance from a value, its offset, and cannot show that value itself: exact agreement
has no logarithm. Such values have a labelled place of their own below the decades, and so have values below the lowest
decade that is drawn.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

MAX_DECADES = 6
"""A logarithmic axis has at most so many decades: the KL is 1e-18 if the sides differ in the last bit of one token."""
PLACE = 0.16
"""Height of a place below the decades, as a share of the axis."""
LARGER_UNITS = {"bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))}

Range = tuple[float | None, float | None]
"""The least and the greatest value that a quantity can have."""


@dataclass(frozen=True)
class Tick:
    """A mark of an axis; is_place: it names a place below the decades."""

    position: float
    label: str
    is_place: bool = False


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`.

    log:        positions follow log10(value - offset), as do `low` and `high`
    exact:      the label of the place of values that have no logarithm; "" without such values
    has_lower:  there is a place for values between `offset` and the lowest decade
    """

    low: float
    high: float
    log: bool = False
    offset: float = 0.0
    exact: str = ""
    has_lower: bool = False

    @property
    def first_decade(self) -> float:
        """The position at which the decades begin."""
        return PLACE * (bool(self.exact) + self.has_lower)

    def position_of(self, value: float) -> float:
        """Return the position of a value, 0 at the low end to 1 at the high end."""
        if not self.log:
            return self._share(value)
        above = value - self.offset
        if above <= 0:
            return PLACE / 2 if self.exact else 0.0
        power = math.log10(above)
        if power < self.low and self.has_lower:
            return self.first_decade - PLACE / 2
        return self.first_decade + (1 - self.first_decade) * self._share(power)

    def make_ticks(self, divisor: float = 1.0) -> list[Tick]:
        """Return the ticks; a linear axis is labelled in units of `divisor`."""
        if not self.log:
            marks = choose_linear_ticks(self.low / divisor, self.high / divisor)
            return [Tick(self._share(mark * divisor), label) for mark, label in label_distinctly(marks)]
        first, last = math.ceil(self.low), math.floor(self.high)
        every = max(1, -(-(last - first + 1) // 6))
        factors = (1, 2, 5) if last - first < 2 else (1,)
        pairs = [
            (m, p) for p in range(first, last + 1, every) for m in factors if math.log10(m) + p <= self.high + 1e-9
        ]
        places = [Tick(PLACE / 2, self.exact, True)] if self.exact else []
        places += [Tick(self.first_decade - PLACE / 2, "lower", True)] if self.has_lower else []
        return places + [Tick(self.position_of(self.offset + m * 10.0**p), self._label_of(m, p)) for m, p in pairs]

    def _share(self, value: float) -> float:
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def _label_of(self, factor: int, power: int) -> str:
        """Return the label of a mark above the offset: 0.001, 1.001, or 1+1e-9 where the digits would not fit."""
        value = self.offset + factor * 10.0**power
        if not self.offset or power >= 0:
            return format_number(value)
        return f"{value:.{-power}f}" if power > -7 else f"{self.offset:g}+{factor}e{power}"


def fit_linear_scale(values: Iterable[float], from_zero: bool = False, possible: Range = (None, None)) -> Scale:
    """Return an axis around the values with a margin of 5 %.

    from_zero:  it includes 0
    possible:   the axis does not leave this range, unless a value does
    """
    values = list(values)
    low, high = min(values), max(values)
    low = min(low, 0.0) if from_zero else low
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 0.5
    least, greatest = possible
    begin = low if from_zero and low == 0 else low - margin
    end = high + margin
    if least is not None and low >= least:
        begin = max(begin, least)
    if greatest is not None and high <= greatest:
        end = min(end, greatest)
    return Scale(begin, end)


def fit_log_scale(values: Iterable[float], offset: float = 0.0) -> Scale | None:
    """Return an axis of the highest MAX_DECADES whole decades of the values above `offset`; None if none is above."""
    values = list(values)
    above = [value - offset for value in values if value > offset]
    if not above:
        return None
    low, high = math.floor(math.log10(min(above))), math.ceil(math.log10(max(above)))
    exact = f"exactly {offset:g}" if offset in values else ""
    if min(values) < offset:
        exact = f"{offset:g} or less"
    first = max(low, high - MAX_DECADES)
    return Scale(first, max(high, first + 1), log=True, offset=offset, exact=exact, has_lower=low < first)


def choose_linear_ticks(low: float, high: float) -> list[float]:
    """Return about five values within the limits: multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(step for m in (1, 2, 5, 10) if (step := m * power) >= 0.9 * raw)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def choose_unit(unit: str, highest: float) -> tuple[float, str]:
    """Return (divisor, unit) for an axis up to `highest`: (1e6, "MB") for 2.5e6 bytes."""
    return next(((size, larger) for size, larger in LARGER_UNITS.get(unit, ()) if highest >= size), (1.0, unit))


def label_distinctly(values: list[float]) -> list[tuple[float, str]]:
    """Return (value, label) with as many digits as the labels need to differ."""
    for digits in range(5, 16):
        labels = [format_number(value, digits) for value in values]
        if len(set(labels)) == len(labels):
            break
    return [*zip(values, labels, strict=True)]


def format_number(value: float, digits: int = 5) -> str:
    """Return a short text, such as 0.00012, 3.1e-7, 12,500 or 3.2M."""
    if value == 0:
        return "0"
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    if abs(value) >= 1e4:
        return f"{value:,.0f}"
    if not abs(value) < 1e-4:  # also of NaN
        return f"{value:.{digits}g}"
    mantissa, _, power = f"{value:.{digits - 4}e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
