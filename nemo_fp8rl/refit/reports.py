"""What the sides say of a refit: bytes and seconds of a trainer's rank, of an engine, of the whole."""

import time
from dataclasses import dataclass, field
from types import TracebackType

from nemo_fp8rl.refit.manifest import TensorPart

LinkId = tuple[int, int]
"""Engine, and rank in it."""
STAGES = ("export", "quantize", "encode", "send")
"""A trainer rank's work: parts of its parameters; bytes and scales; digests, deltas, kept bytes; waiting and copies."""


class StageTimer:
    """Adds what its block takes to the seconds of a stage. A class, for a refit enters some of them for every piece."""

    __slots__ = ("seconds", "stage", "start")

    def __init__(self, seconds: dict[str, float], stage: str) -> None:
        self.seconds, self.stage = seconds, stage

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds[self.stage] += time.perf_counter() - self.start


@dataclass
class SendReport:
    """What one rank sent of a version, over all its links. bf16_nbytes: the same tensors in bf16. quantized_*: of those
    that are FP8. base_nbytes: kept for the next delta. seconds: by stage. failed: links that broke, and why.
    """

    nbytes: int = 0
    bf16_nbytes: int = 0
    quantized_nbytes: int = 0
    quantized_bf16_nbytes: int = 0
    base_nbytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    failed: dict[LinkId, str] = field(default_factory=dict)

    def time_stage(self, stage: str) -> StageTimer:
        return StageTimer(self.seconds, stage)

    def count(self, part: TensorPart, nbytes: int) -> None:
        bf16 = part.data_bytes * 2 if part.is_fp8 else part.data_bytes
        self.nbytes += nbytes
        self.bf16_nbytes += bf16
        if part.is_fp8:
            self.quantized_nbytes += nbytes
            self.quantized_bf16_nbytes += bf16


@dataclass(frozen=True)
class LoadReport:
    """An engine's answer: the version is in its memory. direct: names of the tensors that can be written in place, and
    so take deltas. seconds: it took, of which `verify_seconds` for digests.
    """

    version: int
    direct_names: frozenset[str]
    seconds: float
    verify_seconds: float


@dataclass(frozen=True)
class RefitReport:
    """nbytes: on the wire to one engine. wire_over_bf16: those of the quantized tensors over what they are in bf16.
    base_nbytes: kept by a rank for the next delta, at most. bucket_nbytes: of the links of a process, at most.
    between_machines: share of a whole version that leaves one. seconds: of wall time; stages overlap.
    """

    version: int
    nbytes: int
    delta: bool
    wire_over_bf16: float
    base_nbytes: int
    bucket_nbytes: int
    between_machines: float
    retries: int
    seconds: float
    stages: dict[str, float]

    def metrics(self) -> dict[str, float]:
        return {
            "refit/bytes": self.nbytes,
            "refit/version": self.version,
            "refit/delta": float(self.delta),
            "refit/wire_over_bf16": self.wire_over_bf16,
            "refit/kept_bytes": self.base_nbytes,
            "refit/bucket_bytes": self.bucket_nbytes,
            "refit/between_machines": self.between_machines,
            "refit/retries": self.retries,
            "timing/refit": self.seconds,
        } | {f"timing/refit_{stage}": seconds for stage, seconds in self.stages.items()}
