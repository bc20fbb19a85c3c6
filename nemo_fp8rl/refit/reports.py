"""Reports on a refit: bytes and seconds of a trainer's rank, of an engine, and of the whole refit."""

import time
from dataclasses import dataclass, field
from types import TracebackType

from nemo_fp8rl.refit.manifest import TensorPart

LinkId = tuple[int, int]
"""(engine, rank in the engine)"""
STAGES = ("export", "quantize", "encode", "send")
"""A trainer rank's work: take parts of parameters; make bytes and scales; make digests and deltas and store bytes; wait
for buckets and copy."""


class StageTimer:
    """Adds the time of its block to the seconds of a stage. It is a class because a refit enters it for every piece."""

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
    """The report of one trainer rank on a version that it sent over all its links.

    nbytes:                 bytes on the wire
    direct_nbytes:          the part of them that this rank wrote into engines' memory
    has_mapped:             this rank mapped such memory, which takes time once
    bf16_nbytes:            bytes of the same tensors in bfloat16
    quantized_nbytes:       bytes on the wire of FP8 tensors
    quantized_bf16_nbytes:  bytes of FP8 tensors in bfloat16
    base_nbytes:            bytes stored for the next delta
    seconds:                by stage (`STAGES`)
    failed:                 links that broke, each with the reason
    """

    nbytes: int = 0
    direct_nbytes: int = 0
    has_mapped: bool = False
    bf16_nbytes: int = 0
    quantized_nbytes: int = 0
    quantized_bf16_nbytes: int = 0
    base_nbytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    failed: dict[LinkId, str] = field(default_factory=dict)

    def time_stage(self, stage: str) -> StageTimer:
        return StageTimer(self.seconds, stage)

    def count(self, part: TensorPart, nbytes: int, is_direct: bool = False) -> None:
        self.nbytes += nbytes
        self.direct_nbytes += nbytes if is_direct else 0
        self.bf16_nbytes += part.bf16_bytes
        if part.format is not None:
            self.quantized_nbytes += nbytes
            self.quantized_bf16_nbytes += part.bf16_bytes


@dataclass(frozen=True)
class LoadReport:
    """An engine has the version in its memory.

    direct_names:    names of the tensors that can be written in place, and so can take deltas
    seconds:         time of the load
    verify_seconds:  the part of `seconds` that digests took
    """

    version: int
    direct_names: frozenset[str]
    seconds: float
    verify_seconds: float


@dataclass(frozen=True)
class RefitReport:
    """A refit that all engines committed.

    nbytes:            bytes on the wire to one engine
    direct:            share of the bytes that trainer ranks wrote into engines' memory, without a bucket
    delta:             True for a delta, False for a whole version
    wire_over_bf16:    bytes of FP8 tensors on the wire over their bytes in bfloat16
    base_nbytes:       bytes that a rank stores for the next delta, of the rank with most
    bucket_nbytes:     bytes of the buckets of all links of a process, of the process with most
    between_machines:  share of a whole version that leaves a machine
    retries:           engines that had to be sent the version again
    seconds:           wall time
    stages:            seconds by stage; stages overlap
    """

    version: int
    nbytes: int
    direct: float
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
            "refit/direct": self.direct,
            "refit/wire_over_bf16": self.wire_over_bf16,
            "refit/kept_bytes": self.base_nbytes,
            "refit/bucket_bytes": self.bucket_nbytes,
            "refit/between_machines": self.between_machines,
            "refit/retries": self.retries,
            "timing/refit": self.seconds,
        } | {f"timing/refit_{stage}": seconds for stage, seconds in self.stages.items()}
