"""One refit: export and quantize, send, load, verify, commit the version.

The state machine is short. A version is *sent* when the source has built it, *loaded* when an engine has verified and
applied it and dropped its prefix cache, *committed* when every engine acknowledged that version. Generation between
sent and committed is a defect: the loop does not return to generation before `refit` returns, and an exception here
ends the run.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_fp8rl.refit.manifest import RefitError


@dataclass(frozen=True)
class Acknowledgement:
    """An engine's answer: it now generates with `version`, for which it received `nbytes` bytes."""

    version: int
    nbytes: int


class WeightSource(Protocol):
    """The trainer's side. A handle is opaque here: an Update in this process, a reference to its bytes otherwise."""

    def export_update(self, version: int) -> Sequence[Any]:
        """One handle for each rank that has a part of the weights."""
        ...


class WeightSink(Protocol):
    """The engines' side: every engine loads the update, or an exception tells why not."""

    def load_update(self, handles: Sequence[Any]) -> list[Acknowledgement]: ...


@dataclass(frozen=True)
class RefitReport:
    """bytes: on the wire to one engine. Seconds by stage."""

    version: int
    nbytes: int
    export_seconds: float
    load_seconds: float

    def metrics(self) -> dict[str, float]:
        return {
            "refit/bytes": self.nbytes,
            "refit/version": self.version,
            "timing/refit": self.export_seconds + self.load_seconds,
            "timing/refit_export": self.export_seconds,
            "timing/refit_load": self.load_seconds,
        }


class RefitBridge:
    """Counts versions and moves them. `version` is the last one that every engine committed; -1 before the first."""

    def __init__(self, source: WeightSource, sink: WeightSink, first_version: int = 0) -> None:
        self.source, self.sink = source, sink
        self.version = first_version - 1

    def refit(self) -> RefitReport:
        """Bring every engine to the trainer's present weights. Raises RefitError unless all of them committed."""
        version = self.version + 1
        start = time.perf_counter()
        handles = self.source.export_update(version)
        exported = time.perf_counter()
        acknowledgements = self.sink.load_update(handles)
        loaded = time.perf_counter()
        behind = [i for i, ack in enumerate(acknowledgements) if ack.version != version]
        if behind or not acknowledgements:
            raise RefitError(f"refit {version}: engines {behind} did not commit it")
        self.version = version
        return RefitReport(version, acknowledgements[0].nbytes, exported - start, loaded - exported)
