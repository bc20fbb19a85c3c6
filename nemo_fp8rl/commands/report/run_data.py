"""A run directory's files as one `Run`. Any of them may be missing, or end in the midst of a line: a kill does that."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from nemo_fp8rl.algorithms.importance_bins import Bin, is_bin
from nemo_fp8rl.algorithms.metric_names import is_measured
from nemo_fp8rl.common.atomic_files import is_locked
from nemo_fp8rl.common.errors import UserError, single_line
from nemo_fp8rl.config.yaml_tree import file_errors, flatten
from nemo_fp8rl.run.step_log import Row, Sample, read

FILES = {
    "config.yaml": "the recipe",
    "environment.json": "versions and choices",
    "metrics.jsonl": "metrics",
    "histograms.jsonl": "importance weights",
    "samples.jsonl": "answers",
}
MOST = 2**53
"""Steps or tokens: a float holds as many exactly."""
HIGHEST_LOGPROB = 0.1
"""Rounding brings a log-prob above 0, but not above this."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class Run:
    """config, environment: flat, {"a.b": value}. metrics: rows of numbers by step, the last one of each step.
    log_weights, samples: by step. missing: sentences about files that are not there, and values that are no numbers.
    """

    name: str
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: list[dict[str, float]]
    log_weights: dict[int, list[Bin]]
    samples: dict[int, list[Sample]]
    missing: list[str]
    state: str

    def series(self, metric: str) -> list[tuple[float, float]]:
        """(step, value) wherever the metric was logged."""
        return [(row["step"], row[metric]) for row in self.metrics if metric in row]

    def names(self, prefix: str) -> list[str]:
        """The metrics that begin so, without the prefix, in the order of their first appearance."""
        return list(
            dict.fromkeys(key.removeprefix(prefix) for r in self.metrics for key in r if key.startswith(prefix))
        )


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Raises UserError for a folder that is no run, one given twice, and a file that cannot be read."""
    whole = [_resolved(folder) for folder in folders]
    for i, folder in enumerate(whole):
        if folder in whole[:i]:
            raise UserError(f"{folders[i]} is given twice; give each run once")
    return [_read(folder, name) for folder, name in zip(folders, _names(whole), strict=True)]


def _resolved(folder: Path) -> Path:
    try:
        return folder.resolve()
    except RuntimeError:  # until Python 3.12
        raise UserError(f"{folder} is a link that leads to itself; give a run directory") from None


def _read(folder: Path, name: str) -> Run:
    if not folder.is_dir():
        raise UserError(f"{folder} is {'no folder' if folder.exists() else 'not there'}; give a run directory")
    there = [file for file in FILES if (folder / file).exists()]
    if not {"config.yaml", "metrics.jsonl"} & set(there):
        raise UserError(f"{folder} holds no run: neither config.yaml nor metrics.jsonl is in it; give logger.log_dir")
    config = _parsed(folder / "config.yaml", yaml.safe_load)
    rows = _rows(folder / "metrics.jsonl")
    metrics = _numbers(rows)
    missing = [f"{name} has no {file} ({what})" for file, what in FILES.items() if file not in there]
    if left_out := sum(map(len, rows)) - sum(map(len, metrics)):
        missing.append(f"{name}: values in metrics.jsonl that are no finite numbers are left out, {left_out} of them")
    return Run(
        name=name,
        config=config,
        environment=_parsed(folder / "environment.json", json.loads),
        metrics=metrics,
        log_weights=_typed(folder / "histograms.jsonl", _bins),
        samples=_typed(folder / "samples.jsonl", lambda row: [_sample(given) for given in row["samples"]]),
        missing=missing,
        state=_state(folder, metrics, config.get("grpo.max_num_steps")),
    )


def _parsed(path: Path, parse: Any) -> dict[str, Any]:
    """Flat; {} where there is no file."""
    if not path.exists():
        return {}
    try:
        tree = parse(path.read_text(encoding="utf-8"))
        leaves = flatten(tree) if isinstance(tree, dict) else None
        str(leaves)  # what is nested too deeply ends here, and not in the page
    except file_errors() as error:
        raise UserError(f"{path} cannot be read: {single_line(error)}") from None
    if leaves is None:
        raise UserError(f"{path} holds no keys with values; is it a run's?")
    return leaves


def _rows(path: Path) -> list[Row]:
    """The file's rows by step; of a step that was logged twice the later one."""
    rows = read(path)
    if wrong := [str(row["step"]) for row in rows if not _is_count(row["step"])]:
        raise UserError(f"{path} has a line of step {wrong[0][:20]}; is it a run's?")
    by_step = {row["step"]: row for row in rows}
    return [by_step[step] for step in sorted(by_step)]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


def _typed(path: Path, convert: Callable[[Row], Value]) -> dict[int, Value]:
    try:
        return {row["step"]: convert(row) for row in _rows(path)}
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not as this version writes it ({error}); leave it out of the folder") from None


def _numbers(rows: list[Row]) -> list[dict[str, float]]:
    return [{key: value for key, value in row.items() if is_measured(value)} for row in rows]


def _bins(row: Row) -> list[Bin]:
    """The bins that hold a token."""
    bins: list[Bin] = []
    for given in map(tuple, row["log_weights"]):
        if not is_bin(given):
            raise ValueError("a bin is not [from, to, tokens]")
        bins += [given] if given[2] else []
    return bins


def _sample(given: Any) -> Sample:
    """A log-prob that cannot be one is null, a reward NaN."""
    sample = Sample(**given)
    if not all(isinstance(text, str) for text in (sample.chosen, sample.prompt, *sample.tokens)):
        raise TypeError("chosen, prompt and tokens are not all text")
    if not _is_count(sample.num_tokens):
        raise TypeError("num_tokens is no count")
    return replace(
        sample,
        reward=sample.reward if is_measured(sample.reward) else math.nan,
        prev_logprobs=[_logprob(value) for value in sample.prev_logprobs],
        generation_logprobs=[_logprob(value) for value in sample.generation_logprobs],
    )


def _logprob(value: Any) -> float | None:
    return value if is_measured(value) and value <= HIGHEST_LOGPROB else None


def _state(folder: Path, metrics: list[dict[str, float]], last: Any) -> str:
    step = int(metrics[-1]["step"]) if metrics else 0
    of = f" of {last}" if isinstance(last, int) else ""
    if isinstance(last, int) and step >= last:
        return f"finished, {step} steps"
    if is_locked(folder):
        return f"running, after step {step}{of}"
    return f"stopped after step {step}{of}" if step else f"stopped before its first step{of}"


def _names(folders: Sequence[Path]) -> list[str]:
    """The ends of the paths, as long as it takes to tell them apart."""
    for length in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return names
