"""Counts spikes of a metric over the steps of a run: values far above what came before. Needs no torch.

Spikes of the loss are what FP8 pre-training is reported to pay for its speed (arXiv 2411.08719); the rule is this
package's. A spike begins at a value above mean + 6 sigma and ends at the next value that is not. Mean and variance are
exponential averages, of all earlier values alike until there are 20; they need 10 values before they judge any. Values
of a spike do not enter them, so that the next spike is judged by the same rule, and a spike of 50 steps is a new level:
mean and variance then begin anew.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SIGMAS = 6
WEIGHT = 0.05
"""Least weight of a new value in mean and variance."""
WARM_UP = 10
"""Values before the first that is judged."""
LONGEST = 50
"""Steps after which a spike is a new level."""
LEAST_SIGMA = 1e-3
"""Sigma in units of the mean, at least: without it any rise after equal values would be a spike."""
METRICS = {"loss": "train/loss", "grad_norm": "train/grad_norm"}
"""Short names of the metrics whose spikes tables and reports count."""
DEFINITION = (
    f"A spike is a value more than {SIGMAS} sigma above the exponential mean of the values before it, up to the next "
    "value that is not. Where no run has one, n runs still allow 3/n a run (95 %)."
)
"""For readers of a count. Its second sentence is the rule of three: an interval of equal counts has no width."""


@dataclass(frozen=True)
class Spikes:
    """The spikes of one run.

    count:    their number
    longest:  steps of the longest one, 0 without one; LONGEST for a new level
    judged:   number of values that were judged
    """

    count: int
    longest: int
    judged: int


class _Average:
    """Exponential averages of values and of their squared distances from the mean (T. Finch, 2009)."""

    def __init__(self) -> None:
        self.count, self.mean, self.variance = 0, 0.0, 0.0

    @property
    def limit(self) -> float:
        """The value above which a spike begins."""
        return self.mean + SIGMAS * max(math.sqrt(self.variance), LEAST_SIGMA * abs(self.mean))

    def add(self, value: float) -> None:
        self.count += 1
        weight = max(WEIGHT, 1 / self.count)
        step = weight * (value - self.mean)
        self.variance = (1 - weight) * (self.variance + step * (value - self.mean))
        self.mean += step


def count_spikes(values: Iterable[float]) -> Spikes:
    """Return the spikes of a series of values, one a step; a value that is not finite lies above every limit."""
    average, count, longest, length, judged = _Average(), 0, 0, 0, 0
    for value in values:
        if average.count < WARM_UP:
            if math.isfinite(value):
                average.add(value)
            continue
        judged += 1
        if value <= average.limit and math.isfinite(value):
            average.add(value)
            length = 0
            continue
        length += 1
        count += length == 1
        longest = max(longest, length)
        if length == LONGEST:
            average, length = _Average(), 0
    return Spikes(count, longest, judged)


def spikes_of_run(rows: Iterable[Mapping[str, float]], metric: str) -> Spikes | None:
    """Return the spikes of a metric in the rows of metrics.jsonl; None where no value can be judged.

    A step without a gradient is left out: where all advantages are 0, the loss and the norm of the gradient are 0, too.
    """
    values = [row[metric] for row in rows if row["step"] > 0 and metric in row and row.get(METRICS["grad_norm"]) != 0]
    spikes = count_spikes(values)
    return spikes if spikes.judged else None
