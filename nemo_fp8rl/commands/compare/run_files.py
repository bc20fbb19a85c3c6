"""Reads the files of a run's directory. A damaged file raises UserError, which names the folder to remove."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from nemo_fp8rl.algorithms.metric_names import is_measured
from nemo_fp8rl.common.errors import UserError, single_line
from nemo_fp8rl.config.yaml_tree import file_errors, flatten
from nemo_fp8rl.run.step_log import Row, read

ENVIRONMENT_TYPES = {"machine": str, "python": str, "versions": dict, "choices": dict}
"""Keys of environment.json that a comparison shows, with their types."""


def read_metrics(folder: Path) -> list[Row]:
    """Return the rows of metrics.jsonl so far, [] without a file."""
    with _run_file(folder, "metrics.jsonl") as path:
        rows = read(path)
        for row in rows:
            if wrong := [name for name, value in row.items() if not is_measured(value)]:
                raise ValueError(f"{wrong[0]} of step {row['step']} is no finite number")
        return rows


def read_recipe(folder: Path) -> dict[str, Any] | None:
    """Return the run's recipe by dotted key, None without a file."""
    with _run_file(folder, "config.yaml") as path:
        return flatten(yaml.safe_load(path.read_text(encoding="utf-8"))) if path.exists() else None


def read_environment(folder: Path) -> dict[str, Any]:
    with _run_file(folder, "environment.json") as path:
        tree = json.loads(path.read_text())
        for key, kind in ENVIRONMENT_TYPES.items():
            if not (isinstance(tree, dict) and isinstance(tree.get(key), kind)):
                raise ValueError(f"it has no {key}")
        return dict(tree)


@contextmanager
def _run_file(folder: Path, name: str) -> Iterator[Path]:
    path = folder / name
    try:
        yield path
    except UserError as error:
        raise UserError(f"{error}; or remove {folder}, and compare runs it anew") from None
    except file_errors() as error:
        raise UserError(
            f"{path} is not as a run leaves it ({single_line(error)}); remove {folder}, and compare runs it anew"
        ) from None
