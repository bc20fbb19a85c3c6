"""What a person sees while it works: a bar and a line of figures on a terminal, plain lines elsewhere."""

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
"""Seconds without a line after which one says what is going on, where there is no terminal."""
SPEED_OVER_SECONDS = 3600
"""The time left follows the speed of the last hour: over rich's 30 seconds there is none where a step takes longer."""


class Screen(Console):
    """One whose reader may go away, as of `| head`: the run goes on without it."""

    def on_broken_pipe(self) -> None:
        """rich would end the process here."""
        self.quiet = True
        to_nowhere(sys.stdout)

    def print(self, *objects: Any, **how: Any) -> None:
        with suppress(OSError):  # a disk that is full, a terminal that is gone
            super().print(*objects, **how)


def to_nowhere(stream: TextIO) -> None:
    """What is written to the stream from now on, and what it still holds, is dropped."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)


class Display:
    """Open with `with`; one `step` call a step, `doing` at any time before it.

    Without a terminal a thread says every minute, if nothing else was said, what is being done and for how long the
    step has gone on: of a job that hangs the log shows where.
    """

    def __init__(self, title: str, total: int, done: int = 0) -> None:
        self.console = Screen(highlight=False)
        self.total = total
        self.progress = Progress(
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[doing]}", style="dim"),
            speed_estimate_period=SPEED_OVER_SECONDS,
        )
        self.task = self.progress.add_task(title, total=total, completed=done, doing="start")
        self.figures = Text()
        self.live = Live(Group(self.progress, self.figures), console=self.console)
        self.began = self.last_line = self.progress.get_time()
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

    def doing(self, what: str) -> None:
        """What the step after the last is at."""
        self.progress.update(self.task, doing=what)

    def step(self, step: int, shown: dict[str, str]) -> None:
        """`shown`: a few named figures of this step, already formatted."""
        self.progress.update(self.task, completed=step, doing="")
        self.began = self.progress.get_time()
        text = "  ".join(f"{name} {value}" for name, value in shown.items())
        self.figures.plain = text
        if not self.console.is_terminal:
            left = self.progress.tasks[0].time_remaining
            eta = "" if left is None else f"  eta {timedelta(seconds=int(left))}"
            self.say(f"step {step}/{self.total}  {text}{eta}")

    def _remind(self) -> None:
        while not self.closed.wait(self.last_line + SILENCE - self.progress.get_time()):
            now, (task,) = self.progress.get_time(), self.progress.tasks
            if now - self.last_line >= SILENCE:
                step = min(task.completed + 1, self.total)
                took = timedelta(seconds=int(now - self.began))
                self.say("  ".join(filter(None, (f"step {step:.0f}/{self.total}", task.fields["doing"], str(took)))))
