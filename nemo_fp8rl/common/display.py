"""Progress for a person: a bar and a line of figures on a terminal, plain lines elsewhere."""

import os
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

SILENCE = 60.0
"""Without a terminal, a line names the current phase after so many seconds without another line."""
SPEED_OVER_SECONDS = 3600
"""The remaining time follows the speed of the last hour. Over rich's default of 30 seconds there is no speed where a
step takes longer than that.
"""


class Screen(Console):
    """A console whose reader may go away, as with `| head`: the run goes on without it."""

    def on_broken_pipe(self) -> None:
        """Go on without output; rich would end the process here."""
        self.quiet = True
        discard_output(sys.stdout)

    def print(self, *objects: Any, **options: Any) -> None:
        with suppress(OSError):  # the disk is full or the terminal is gone
            super().print(*objects, **options)


def discard_output(stream: TextIO) -> None:
    """Drop what is written to the stream from now on, and what is in its buffer."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)


def bar() -> BarColumn:
    """Return a bar without red, which elsewhere means a fault."""
    return BarColumn(complete_style="cyan", finished_style="green", pulse_style="cyan")


class Display:
    """The progress of a run, a context manager: `show_phase` at any time, `show_step` once at the end of each step.

    Without a terminal, a thread prints the current phase and how long the step has taken, every minute in which nothing
    else was printed: the log of a job that hangs then shows where.
    """

    def __init__(self, title: str, total: int, completed: int = 0) -> None:
        self.console = Screen(highlight=False)
        self.total = total
        self.progress = Progress(
            TextColumn(title),
            bar(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[phase]}", style="dim"),
            speed_estimate_period=SPEED_OVER_SECONDS,
        )
        self.task = self.progress.add_task(title, total=total, completed=completed, phase="start")
        self.figures = Text()
        self.live = Live(Group(self.progress, self.figures), console=self.console)
        self.step_start = self.last_line = self.progress.get_time()
        self.closed = threading.Event()
        self.reminder = threading.Thread(target=self._remind, name="display", daemon=True)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        else:
            self.reminder.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with suppress(OSError):
            self.live.stop()
        self.closed.set()
        if self.reminder.is_alive():
            self.reminder.join()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)
        self.last_line = self.progress.get_time()

    def warn(self, text: str) -> None:
        """Say what must not be missed: in the log, and on stderr where that is another file or terminal."""
        self.say(text)
        if not (self.console.is_terminal and sys.stderr.isatty()):
            with suppress(OSError):
                print(f"nemo-fp8rl: {text}", file=sys.stderr, flush=True)

    def show_phase(self, phase: str) -> None:
        """Show the phase of the current step."""
        self.progress.update(self.task, phase=phase)

    def show_step(self, step: int, figures: dict[str, str]) -> None:
        """Show that a step is complete; figures: a few values by name, formatted."""
        self.progress.update(self.task, completed=step, phase="")
        self.step_start = self.progress.get_time()
        text = "  ".join(f"{name} {value}" for name, value in figures.items())
        self.figures.plain = text
        if not self.console.is_terminal:
            seconds = self.progress.tasks[0].time_remaining
            eta = "" if seconds is None else f"  eta {timedelta(seconds=int(seconds))}"
            self.say(f"step {step}/{self.total}  {text}{eta}")

    def _remind(self) -> None:
        while not self.closed.wait(self.last_line + SILENCE - self.progress.get_time()):
            now, (task,) = self.progress.get_time(), self.progress.tasks
            if now - self.last_line >= SILENCE:
                step = min(task.completed + 1, self.total)
                duration = timedelta(seconds=int(now - self.step_start))
                self.say(
                    "  ".join(filter(None, (f"step {step:.0f}/{self.total}", task.fields["phase"], str(duration))))
                )
