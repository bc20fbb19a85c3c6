"""Seconds by stage of a step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """`with clock("train"): ...` adds to timing/train, in seconds.

    doing: told what is being done, and how far it is: "generate 12/64".
    """

    def __init__(self, doing: Callable[[str], None]) -> None:
        self.doing = doing
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, total: int = 0) -> Iterator[Callable[[int], None]]:
        """What is yielded may be told how many of `total` are done."""
        self.doing(name)
        begin = time.perf_counter()
        yield lambda done: self.doing(f"{name} {done}/{total}")
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def metrics(self) -> dict[str, float]:
        return {f"timing/{name}": value for name, value in self.seconds.items()}
