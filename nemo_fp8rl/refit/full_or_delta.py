"""Whole versions, or only what changed: which of the two a refit takes under `refit.mode: auto`."""

from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["full", "delta", "auto"]
RETRY_AFTER = 50
"""Refits of one kind in a row after which the other is tried again: how much a step changes goes with the learning
rate, and what each of them takes with what else the machine does."""


@dataclass
class ModeChoice:
    """auto tries both and takes the one that took less time over this link with these weights.

    A delta needs the bytes of the last version, which `keep` asks the trainer to hold on to.
    """

    mode: Mode
    seconds: dict[str, float] = field(default_factory=dict)
    last: Literal["full", "delta"] = "full"
    in_a_row: int = 0

    @property
    def wants_delta(self) -> bool:
        """Whether the next refit is a delta, if it can be."""
        if self.mode != "auto":
            return self.mode == "delta"
        if len(self.seconds) < 2:
            return "full" in self.seconds
        if self.in_a_row >= RETRY_AFTER:
            return self.last == "full"
        return self._delta_is_faster

    @property
    def wants_base(self) -> bool:
        """Whether the refit after the next one might be a delta."""
        if self.mode != "auto":
            return self.mode == "delta"
        return len(self.seconds) < 2 or self._delta_is_faster or self.in_a_row >= RETRY_AFTER - 1

    def record(self, delta: bool, seconds: float) -> None:
        kind: Literal["full", "delta"] = "delta" if delta else "full"
        self.seconds[kind] = seconds
        self.in_a_row = self.in_a_row + 1 if kind == self.last else 1
        self.last = kind

    @property
    def _delta_is_faster(self) -> bool:
        return self.seconds["delta"] < self.seconds["full"]
