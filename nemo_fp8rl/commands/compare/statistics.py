"""Mean and 95 % interval of a few runs.

    mean +- t(n - 1) s / sqrt(n)

t is Student's 97.5 % quantile, s the standard deviation with n - 1. Two flows are compared by the differences of runs
of the same seed, in which the common effect of a seed cancels. Each interval holds by itself, without a correction for
their number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t, 97.5 %, for 1 to 30 degrees of freedom: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2."""


@dataclass(frozen=True)
class Interval:
    """The 95 % confidence interval of the mean of n values.

    half: half of the width, None for n = 1
    """

    mean: float
    half: float | None
    n: int

    @property
    def low(self) -> float | None:
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        return None if self.half is None else self.mean + self.half

    @property
    def contains_zero(self) -> bool | None:
        """True if 0 lies in the interval; None without an interval."""
        return None if self.half is None else abs(self.mean) <= self.half


def interval(values: Sequence[float]) -> Interval | None:
    """Return the interval of the mean, None without values. Above 31 values it is slightly too wide (31's quantile)."""
    n = len(values)
    if n < 2:
        return Interval(values[0], None, 1) if values else None
    half = T_975[min(n - 2, len(T_975) - 1)] * stdev(values) / n**0.5
    return Interval(fmean(values), half, n)


def paired_interval(values: Mapping[int, float], reference: Mapping[int, float]) -> Interval | None:
    """Return the interval of value - reference over the common seeds, None without a common seed."""
    return interval([values[seed] - reference[seed] for seed in sorted(values.keys() & reference.keys())])
