"""Whole versions, or only what changed: which of the two a refit takes under `refit.mode: auto`."""

from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["full", "delta", "auto"]
RETRY_AFTER = 50
"""Whole versions after which a delta is tried again: how much a step changes goes with the learning rate."""


@dataclass
class ModeChoice:
    """auto tries both and takes the one that took less time over this link with these weights.

    A delta needs the bytes of the last version, which `keep` asks the trainer to hold on to.
    """

    mode: Mode
    seconds: dict[str, float] = field(default_factory=dict)
    since_trial: int = 0

    @property
    def delta(self) -> bool:
        """Whether the next refit is a delta, if it can be."""
        if self.mode != "auto":
            return self.mode == "delta"
        if len(self.seconds) < 2 or self.since_trial >= RETRY_AFTER:
            return "full" in self.seconds
        return self.seconds["delta"] < self.seconds["full"]

    @property
    def keep(self) -> bool:
        """Whether the refit after the next one might be a delta."""
        if self.mode != "auto":
            return self.mode == "delta"
        return self.delta or len(self.seconds) < 2 or self.since_trial >= RETRY_AFTER - 1

    def took(self, delta: bool, seconds: float) -> None:
        self.seconds["delta" if delta else "full"] = seconds
        self.since_trial = 0 if delta else self.since_trial + 1
