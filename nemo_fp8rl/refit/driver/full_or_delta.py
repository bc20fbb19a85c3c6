"""Chooses between whole versions and deltas for the next refit, as `refit.mode` says."""

from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["full", "delta", "auto"]
RETRY_AFTER = 50
"""Number of refits of one kind in a row after which the other kind is tried again. The number of bytes that a step
changes depends on the learning rate, and the time of both kinds on the other load of the machine."""


@dataclass
class ModeChoice:
    """Under auto both kinds are tried, and the one is used that took less time over these links with these weights.

    A delta needs the bytes of the previous version; the trainer stores them where `wants_base` says so. The time of the
    first delta is not recorded, because both sides compile kernels and allocate memory in it. That of a run's first
    whole version is not either, because it goes through vLLM's loaders (`RefitBridge`).

    mode:      full, delta or auto
    seconds:   by kind, of the last refit of that kind
    last:      the kind of the last refit
    in_a_row:  number of refits of that kind in a row
    had_delta: a delta was sent before
    """

    mode: Mode
    seconds: dict[str, float] = field(default_factory=dict)
    last: Literal["full", "delta"] = "full"
    in_a_row: int = 0
    had_delta: bool = False

    @property
    def wants_delta(self) -> bool:
        """True where the next refit should be a delta, if possible."""
        if self.mode != "auto":
            return self.mode == "delta"
        if len(self.seconds) < 2:
            return "full" in self.seconds
        if self.in_a_row >= RETRY_AFTER:
            return self.last == "full"
        return self._is_delta_faster

    @property
    def wants_base(self) -> bool:
        """True where the refit after the next one may be a delta: the trainer must store this version's bytes."""
        if self.mode != "auto":
            return self.mode == "delta"
        return len(self.seconds) < 2 or self._is_delta_faster or self.in_a_row >= RETRY_AFTER - 1

    def record(self, delta: bool, seconds: float) -> None:
        """Record the time of a refit."""
        kind: Literal["full", "delta"] = "delta" if delta else "full"
        if not delta or self.had_delta:
            self.seconds[kind] = seconds
        self.had_delta |= delta
        self.in_a_row = self.in_a_row + 1 if kind == self.last else 1
        self.last = kind

    @property
    def _is_delta_faster(self) -> bool:
        return self.seconds["delta"] < self.seconds["full"]
