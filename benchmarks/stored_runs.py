"""Runs of a benchmark, each stored in a file of its own, so that an interrupted benchmark continues with the next."""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn


def run_all(
    folder: Path, run: Callable[..., dict[str, Any]], cases: Mapping[tuple[Any, ...], tuple[Any, ...]], jobs: int
) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return the result of each case. A result that is stored, of the same arguments, is not computed again.

    folder:  a file for each case, named by its key
    run:     computes the result of a case; a function of a module
    cases:   arguments of `run` by key
    jobs:    processes at a time
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {key: folder / f"{'_'.join(map(str, key)).replace(', ', '_').replace(' ', '_')}.json" for key in cases}
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool, Progress(*columns) as progress:
        task = progress.add_task("runs", total=len(cases))
        waits: dict[Future[None], tuple[Any, ...]] = {}
        for key, arguments in cases.items():
            if _stored(files[key], arguments) is None:
                waits[pool.submit(_store, files[key], partial(run, *arguments), repr(arguments))] = key
            else:
                progress.advance(task)
        for done in as_completed(waits):
            done.result()
            progress.advance(task, 1)
    return {key: json.loads(file.read_text())["result"] for key, file in files.items()}


def _stored(file: Path, arguments: tuple[Any, ...]) -> dict[str, Any] | None:
    if not file.exists():
        return None
    record = json.loads(file.read_text())
    return record["result"] if record["arguments"] == repr(arguments) else None


def _store(file: Path, compute: Callable[[], dict[str, Any]], arguments: str) -> None:
    record = {"arguments": arguments, "result": compute()}
    partial_file = file.with_suffix(".partial")
    partial_file.write_text(json.dumps(record) + "\n")
    partial_file.replace(file)
