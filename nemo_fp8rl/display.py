"""What a person sees while it works: a progress bar on a terminal, plain lines elsewhere."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """Open with `with`; one `step` call a step."""

    def __init__(self, title: str, total: int, done: int = 0) -> None:
        self.console = Console(highlight=False)
        self.total = total
        self.progress = Progress(
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.task = self.progress.add_task(title, total=total, completed=done, shown="")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.progress.stop()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def step(self, step: int, shown: dict[str, str]) -> None:
        """`shown`: a few named figures of this step, already formatted."""
        text = "  ".join(f"{name} {value}" for name, value in shown.items())
        self.progress.update(self.task, completed=step, shown=text)
        if not self.console.is_terminal:
            self.say(f"step {step}/{self.total}  {text}")
