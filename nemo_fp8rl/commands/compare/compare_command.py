"""`nemo-fp8rl compare`: runs what is missing, one after the other, and shows what is known.

    OUTPUT/results.json, results.md       of all finished runs, rewritten after each
    OUTPUT/models, OUTPUT/FLOW, ...       see `models` and `plan`

Left out: several runs at once, which would spoil the seconds.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nemo_fp8rl.commands.compare.comparison import Comparison, load_comparison
from nemo_fp8rl.commands.compare.machine_support import Reasons, sentences, why_not_here
from nemo_fp8rl.commands.compare.results import measure, record
from nemo_fp8rl.commands.compare.run_list import Planned, plan
from nemo_fp8rl.commands.compare.start_models import make_models
from nemo_fp8rl.commands.compare.subprocess_run import run as run_process
from nemo_fp8rl.commands.compare.tables import as_markdown, as_rich, sections
from nemo_fp8rl.common.atomic_files import is_locked, locked, write_atomically
from nemo_fp8rl.common.display import Screen
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.run.signals import GracefulStop

SPEED_OVER_SECONDS = 3600
WIDTH_OF_FILES = 200
"""Columns where the output is no terminal: the widest table fits."""


def compare(path: Path, overrides: Sequence[str], output: Path, table_only: bool = False) -> bool:
    """Returns False when it was interrupted; called again, it goes on. table_only: run nothing.

    Raises UserError for a comparison that is wrong, when a run fails, and where this machine can have none of the runs.
    """
    comparison = load_comparison(path)
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is no folder; give another")
    runs = plan(comparison, overrides, output)
    console = Screen(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH_OF_FILES
    left_out: Reasons = {}
    if table_only:
        finished, left_out = True, why_not_here(_unfinished(runs))
    else:
        finished = _run_all(comparison, overrides, runs, left_out, path, output, console)
    results = record(comparison, overrides, runs, left_out)
    if not results["runs"]:
        console.print(f"no run in {output} has finished", markup=False, soft_wrap=True)
        return finished
    if not (table_only and is_locked(output)):  # else the comparison that runs there writes it
        _write(results, path, overrides, output)
    _show(results, output, console)
    return finished


def _run_all(
    comparison: Comparison,
    overrides: Sequence[str],
    runs: Sequence[Planned],
    left_out: Reasons,
    path: Path,
    output: Path,
    console: Console,
) -> bool:
    """left_out: filled with what this machine cannot have."""
    left = _unfinished(runs)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    say(f"{len(runs) - len(left)} of {len(runs)} runs have finished, {len(left)} to go, in {output}")
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=SPEED_OVER_SECONDS,
        disable=not console.is_terminal,
    )
    with _exclusive(output) as guard, GracefulStop() as stop, progress:
        if not left:
            return True
        if not make_models(comparison, output, stop, say, [guard]):
            say("stopped before the first run; the same command goes on")
            return False
        left_out |= why_not_here(left)
        for sentence in sentences(left_out):
            say(sentence)
        left = [run for run in left if (run.flow, run.length) not in left_out]
        done = len(runs) - len(_unfinished(runs))
        count = done + len(left)
        if not count:
            raise UserError(f"{path}: this machine can have none of its flows: {next(iter(left_out.values()))}")
        task = progress.add_task("steps", total=sum(run.steps - run.done() for run in left))
        before = 0
        for i, run in enumerate(left, done + 1):
            begin, already = time.monotonic(), run.done()
            progress.update(task, description=f"run {i} of {count}: {run.name}")

            def look(run: Planned = run, offset: int = before - already) -> None:
                progress.update(task, completed=max(0, run.done() + offset))

            words = ["train", "--config", run.recipe, "--restartable", *run.words]
            if stop.requested or not run_process(words, run.folder / "train.log", stop, look, [guard]):
                say(f"stopped in {run.name} after step {run.done()} of {run.steps}; the same command goes on")
                return False
            before += run.steps - already
            progress.update(task, completed=before)
            took = timedelta(seconds=round(time.monotonic() - begin))
            _write(record(comparison, overrides, runs, left_out), path, overrides, output)
            say(f"{i}/{count}  {run.name}  {_figures(measure(run.rows()))}  {took}")
    return True


def _unfinished(runs: Sequence[Planned]) -> list[Planned]:
    return [run for run in runs if not run.finished]


@contextmanager
def _exclusive(output: Path) -> Iterator[int]:
    """The folder's lock, which the commands that we run inherit: it lasts as long as they do, if we are killed, too."""
    taken = (
        f"another compare works in {output}, or what one that was killed had started; wait for it or give another "
        "--output"
    )
    with ExitStack() as opened:
        try:
            output.mkdir(parents=True, exist_ok=True)
            guard = opened.enter_context(locked(output, taken))
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
