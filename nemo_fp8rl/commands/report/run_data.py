"""The files of a run directory as one `Run`. After a kill a file may be missing, or end within a line."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from nemo_fp8rl.algorithms.importance_bins import Bin, is_bin
from nemo_fp8rl.algorithms.metric_names import is_measured
from nemo_fp8rl.common.atomic_files import is_locked
from nemo_fp8rl.common.errors import UserError, single_line
from nemo_fp8rl.config.yaml_tree import file_errors, flatten
from nemo_fp8rl.run.end_record import read_end
from nemo_fp8rl.run.step_log import Row, Sample, read

FILES = {
    "config.yaml": "the recipe",
    "environment.json": "versions and choices",
    "metrics.jsonl": "metrics",
    "histograms.jsonl": "importance weights",
    "samples.jsonl": "answers",
}
MAX_COUNT = 2**53
"""Limit of a number of steps or tokens: a float is exact up to it."""
MAX_LOGPROB = 0.1
"""Rounding may raise a log-prob above 0, but not above this value."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Run:
    """The data of one run.

    config, environment:   flat, {"a.b": value}
    metrics:               one row of numbers per step, sorted by step
    log_weights, samples:  by step
    missing_data:          sentences about absent files, and about values that are no numbers
    state:                 a sentence: finished, running or stopped, and at which step
    end_reason:            the error that ended the run; "" without one
    """

    name: str
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[dict[str, float]]
    log_weights: dict[int, list[Bin]]
    samples: dict[int, list[Sample]]
    missing_data: list[str]
    state: str
    end_reason: str = ""

    @property
    def has_steps(self) -> bool:
        """True if a step is complete."""
        return any(row["step"] > 0 for row in self.metrics)

    @property
    def is_supervised(self) -> bool:
        """True for a run of `sft`, which has no engines."""
        return self.environment.get("loop") == "sft"

    def points_of(self, metric: str) -> list[tuple[float, float]]:
        """Return (step, value) for every step that logged the metric."""
        return [(row["step"], row[metric]) for row in self.metrics if metric in row]

    def find_metrics(self, prefix: str) -> list[str]:
        """Return the names of the metrics with this prefix, without it, in the order of their first appearance."""
        return list(
            dict.fromkeys(key.removeprefix(prefix) for r in self.metrics for key in r if key.startswith(prefix))
        )


def is_run(folder: Path) -> bool:
    return any((folder / file).exists() for file in ("config.yaml", "metrics.jsonl"))


def read_run(folder: Path, name: str) -> Run:
    """Return the run in this directory. Raises UserError if a file cannot be read."""
    present = [file for file in FILES if (folder / file).exists()]
    config = _read_tree(folder / "config.yaml", yaml.safe_load)
    rows = _read_rows(folder / "metrics.jsonl")
    metrics = _drop_non_numbers(rows)
    missing_data = [f"{name} has no {file} ({content})" for file, content in FILES.items() if file not in present]
    if omitted := sum(map(len, rows)) - sum(map(len, metrics)):
        missing_data.append(
            f"{name}: values in metrics.jsonl that are no finite numbers are left out, {omitted} of them"
        )
    end_reason = read_end(folder)
    environment = _read_tree(folder / "environment.json", json.loads)
    last_step = config.get(f"{environment.get('loop', 'grpo')}.max_num_steps")
    return Run(
        name=name,
        config=config,
        environment=environment,
        metrics=metrics,
        log_weights=_read_by_step(folder / "histograms.jsonl", _parse_bins),
        samples=_read_by_step(
            folder / "samples.jsonl", lambda row: [_parse_sample(fields) for fields in row["samples"]]
        ),
        missing_data=missing_data,
        state=_describe_state(folder, metrics, last_step, bool(end_reason)),
        end_reason=end_reason,
    )


def _read_tree(path: Path, parse: Any) -> dict[str, Any]:
    """Return the tree in the file, flat; {} if there is no file."""
    if not path.exists():
        return {}
    try:
        tree = parse(path.read_text(encoding="utf-8"))
        leaves = flatten(tree) if isinstance(tree, dict) else None
        str(leaves)  # too deep a nesting raises an error now, and not while the page is made
    except file_errors() as error:
        raise UserError(f"{path} cannot be read: {single_line(error)}") from None
    if leaves is None:
        raise UserError(f"{path} holds no keys with values; is it a run's?")
    return leaves


def _read_rows(path: Path) -> list[Row]:
    """Return the rows of the file, sorted by step; of two rows for the same step the later one."""
    rows = read(path)
    if bad_steps := [str(row["step"]) for row in rows if not _is_count(row["step"])]:
        raise UserError(f"{path} has a line of step {bad_steps[0][:20]}; is it a run's?")
    by_step = {row["step"]: row for row in rows}
    return [by_step[step] for step in sorted(by_step)]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_COUNT


def _read_by_step(path: Path, convert: Callable[[Row], Value]) -> dict[int, Value]:
    try:
        return {row["step"]: convert(row) for row in _read_rows(path)}
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not as this version writes it ({error}); leave it out of the folder") from None


def _drop_non_numbers(rows: list[Row]) -> list[dict[str, float]]:
    return [{key: value for key, value in row.items() if is_measured(value)} for row in rows]


def _parse_bins(row: Row) -> list[Bin]:
    """Return the bins that hold at least one token."""
    bins: list[Bin] = []
    for edges_and_count in map(tuple, row["log_weights"]):
        if not is_bin(edges_and_count):
            raise ValueError("a bin is not [from, to, tokens]")
        bins += [edges_and_count] if edges_and_count[2] else []
    return bins


def _parse_sample(fields: Any) -> Sample:
    """Return the sample; an invalid log-prob becomes None, an invalid reward NaN."""
    sample = Sample(**fields)
    if not all(
        isinstance(text, str) for text in (sample.chosen, sample.prompt, sample.rendered_prompt, *sample.tokens)
    ):
        raise TypeError("chosen, prompt and tokens are not all text")
    if not _is_count(sample.num_tokens):
        raise TypeError("num_tokens is no count")
    return replace(
        sample,
        reward=sample.reward if is_measured(sample.reward) else math.nan,
        prev_logprobs=[_valid_logprob(value) for value in sample.prev_logprobs],
        generation_logprobs=[_valid_logprob(value) for value in sample.generation_logprobs],
    )


def _valid_logprob(value: Any) -> float | None:
    return value if is_measured(value) and value <= MAX_LOGPROB else None


def _describe_state(folder: Path, metrics: list[dict[str, float]], last_step: Any, ended: bool) -> str:
    is_running = not ended and is_locked(folder)
    return describe_progress(metrics, last_step, "running," if is_running else "stopped")


def describe_progress(metrics: list[dict[str, float]], last_step: Any, unfinished: str) -> str:
    """Return a sentence without its end: how far the run came; unfinished: what a run is that lacks steps."""
    step = int(metrics[-1]["step"]) if metrics else 0
    if isinstance(last_step, int) and step >= last_step:
        return f"finished, {step} steps"
    of_all = f" of {last_step}" if isinstance(last_step, int) else ""
    return f"{unfinished} after step {step}{of_all}" if step else f"{unfinished} before its first step{of_all}"
