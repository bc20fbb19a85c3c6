"""`nemo-fp8rl compare`: runs the missing runs of a comparison one after another, and shows the results so far.

    OUTPUT/results.json, results.md       results of all finished runs, rewritten after each run
    OUTPUT/models, OUTPUT/FLOW, ...       see `start_models` and `run_list`

Runs never overlap, because concurrent runs would distort the measured seconds.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nemo_fp8rl.commands.compare.comparison import Comparison, load_comparison
from nemo_fp8rl.commands.compare.machine_support import Reasons, find_unsupported, sentences
from nemo_fp8rl.commands.compare.results import measure, record
from nemo_fp8rl.commands.compare.run_choice import Choice, describe_plan, describe_time
from nemo_fp8rl.commands.compare.run_list import PlannedRun, plan
from nemo_fp8rl.commands.compare.start_models import make_models
from nemo_fp8rl.commands.compare.subprocess_run import run as run_process
from nemo_fp8rl.commands.compare.tables import as_markdown, as_rich, sections
from nemo_fp8rl.common.atomic_files import is_locked, lock_folder, write_atomically
from nemo_fp8rl.common.display import Screen, bar
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.run.signals import stop_on_signals
from nemo_fp8rl.run.stop_flag import StopFlag

SPEED_OVER_SECONDS = 3600
WIDTH_OF_FILES = 200
"""Columns if the output is not a terminal; the widest table fits."""


def compare(
    path: Path,
    overrides: Sequence[str],
    output: Path,
    choice: Choice = Choice(),  # noqa: B008  # frozen
    mode: Literal["run", "plan", "table"] = "run",
) -> bool:
    """Run a comparison and show its tables. Return False if it was interrupted; a second call continues it.

    overrides:  key=value for every run
    choice:     the runs to take; the tables are of all finished runs
    mode:       "plan": list the runs with an estimate of their time; "table": show the finished runs
    Raises:     UserError for a wrong comparison, for a run that fails, and if this machine supports none of the runs
    """
    comparison = load_comparison(path)
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is no folder; give another")
    runs = plan(comparison, overrides, output)
    chosen = choice.of(runs)
    console = Screen(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_FILES
    unsupported: Reasons = {}
    if mode == "plan":
        console.print("\n".join(describe_plan(comparison, runs, chosen)), markup=False, soft_wrap=True)
        return True
    if mode == "table":
        finished, unsupported = True, find_unsupported(_unfinished(runs))
    else:
        finished = _run_all(comparison, overrides, runs, chosen, unsupported, path, output, console)
    results = record(comparison, overrides, runs, unsupported)
    if not results["runs"]:
        console.print(f"no run in {output} has finished", markup=False, soft_wrap=True)
        return finished
    if not (mode == "table" and is_locked(output)):  # a comparison that runs in this folder writes the files
        _write(results, path, overrides, output)
    _show(results, output, console)
    return finished


def _run_all(
    comparison: Comparison,
    overrides: Sequence[str],
    runs: Sequence[PlannedRun],
    chosen: Sequence[PlannedRun],
    unsupported: Reasons,
    path: Path,
    output: Path,
    console: Console,
) -> bool:
    """Run the unfinished of the chosen runs. unsupported: receives the flows that this machine does not support."""
    todo = _unfinished(chosen)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    say(f"{len(chosen) - len(todo)} of {len(chosen)} runs have finished, {len(todo)} to go, in {output}")
    if todo:
        say(describe_time(comparison, runs, todo))
    progress = Progress(
        TextColumn("{task.description}"),
        bar(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=SPEED_OVER_SECONDS,
        disable=not console.is_terminal,
    )
    with _exclusive(output) as guard, stop_on_signals(StopFlag()) as stop, progress:
        if not todo:
            return True
        if not make_models(comparison, output, stop, say, [guard]):
            say("stopped before the first run; the same command goes on")
            return False
        unsupported |= find_unsupported(todo)
        for sentence in sentences(unsupported):
            say(sentence)
        todo = [run for run in todo if (run.flow, run.length) not in unsupported]
        finished = len(chosen) - len(_unfinished(chosen))
        count = finished + len(todo)
        if not count:
            raise UserError(f"{path}: this machine supports none of its flows: {next(iter(unsupported.values()))}")
        task = progress.add_task("steps", total=sum(run.steps - run.completed_steps() for run in todo))
        before = 0
        for i, run in enumerate(todo, finished + 1):
            begin, already = time.monotonic(), run.completed_steps()
            progress.update(task, description=f"run {i} of {count}: {run.name}")

            def show_progress(run: PlannedRun = run, offset: int = before - already) -> None:
                progress.update(task, completed=max(0, run.completed_steps() + offset))

            words = ["train", "--config", run.recipe, "--restartable", *run.words]
            if stop.is_set or not run_process(words, run.folder / "train.log", stop, show_progress, [guard]):
                say(
                    f"stopped in {run.name} after step {run.completed_steps()} of {run.steps}; the same command goes on"
                )
                return False
            before += run.steps - already
            progress.update(task, completed=before)
            took = timedelta(seconds=round(time.monotonic() - begin))
            _write(record(comparison, overrides, runs, unsupported), path, overrides, output)
            left = describe_time(comparison, runs, rest) if (rest := todo[i - finished :]) else ""
            say(f"{i}/{count}  {run.name}  {_figures(measure(run.rows()))}  {took}  {left}".rstrip())
    return True


def _unfinished(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    return [run for run in runs if not run.is_finished]


@contextmanager
def _exclusive(output: Path) -> Iterator[int]:
    """Lock the output folder. Commands inherit the lock, so that it lasts until they end, even if compare is killed."""
    refusal = (
        f"another compare works in {output}, or a command that a killed compare started; wait for it or give "
        "another --output"
    )
    with ExitStack() as opened:
        try:
            output.mkdir(parents=True, exist_ok=True)
            guard = opened.enter_context(lock_folder(output, refusal))
        except OSError as error:
            raise UserError(f"--output {output} cannot be written: {error}") from None
        yield guard


def _figures(numbers: dict[str, float]) -> str:
    accuracy = f"accuracy {numbers['accuracy_end']:.3f}  " if "accuracy_end" in numbers else ""
    mismatch = f"mismatch {numbers['token_mult_prob_error']:.6f}" if "token_mult_prob_error" in numbers else ""
    return accuracy + mismatch


def _write(results: dict[str, Any], path: Path, overrides: Sequence[str], output: Path) -> None:
    command = " ".join(["nemo-fp8rl compare", str(path), *overrides])
    write_atomically(output / "results.json", json.dumps(results, indent=1) + "\n")
    page = as_markdown(results, command)
    write_atomically(output / "results.md", page.encode(errors="backslashreplace").decode())


def _show(results: dict[str, Any], output: Path, console: Console) -> None:
    for section in sections(results):
        console.print(as_rich(section))
        for sentence in section.sentences:
            console.print(f"- {sentence}", markup=False)
        console.print()
    for sentence in results["left_out"]:
        console.print(sentence, markup=False, soft_wrap=True)
    console.print(
        f"{len(results['runs'])} of {results['planned']} runs; wrote {output}/results.json and results.md",
        markup=False,
        soft_wrap=True,
    )
