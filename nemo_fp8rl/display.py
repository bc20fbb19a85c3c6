"""What a person sees while it works: a bar and a line of figures on a terminal, plain lines elsewhere."""

from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

SILENCE = 60.0
"""Seconds without a line after which one says what a step has come to, where there is no terminal."""
SPEED_OVER_SECONDS = 3600
"""The time left follows the speed of the last hour: over rich's 30 seconds there is none where a step takes longer."""


class Display:
    """Open with `with`; one `step` call a step, `doing` at any time before it."""

    def __init__(self, title: str, total: int, done: int = 0) -> None:
        self.console = Console(highlight=False)
        self.total = total
        self.progress = Progress(
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[doing]}", style="dim"),
            speed_estimate_period=SPEED_OVER_SECONDS,
        )
        self.task = self.progress.add_task(title, total=total, completed=done, doing="")
        self.figures = Text()
        self.live = Live(Group(self.progress, self.figures), console=self.console)
        self.said = self.progress.get_time()

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.live.stop()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)
        self.said = self.progress.get_time()

    def doing(self, what: str) -> None:
        """What the step after the last is at. Without a terminal it is said if nothing was for a while."""
        self.progress.update(self.task, doing=what)
        if not self.console.is_terminal and self.progress.get_time() - self.said >= SILENCE:
            done = self.progress.tasks[0].completed
            self.say(f"step {min(done + 1, self.total):.0f}/{self.total}  {what}")

    def step(self, step: int, shown: dict[str, str]) -> None:
        """`shown`: a few named figures of this step, already formatted."""
        self.progress.update(self.task, completed=step, doing="")
        text = "  ".join(f"{name} {value}" for name, value in shown.items())
        self.figures.plain = text
        if not self.console.is_terminal:
            left = self.progress.tasks[0].time_remaining
            eta = "" if left is None else f"  eta {timedelta(seconds=int(left))}"
            self.say(f"step {step}/{self.total}  {text}{eta}")
