"""Seconds by phase of a step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """A clock whose `with clock("train"): ...` adds the seconds of the block to timing/train."""

    def __init__(self, on_phase: Callable[[str], None]) -> None:
        """on_phase: called with the phase and its progress, such as "generate 12/64"."""
        self.on_phase = on_phase
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, total: int = 0) -> Iterator[Callable[[int], None]]:
        """Time the block. It yields a function that shows how many of `total` items are complete."""
        self.on_phase(name)
        begin = time.perf_counter()
        yield lambda count: self.on_phase(f"{name} {count}/{total}")
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def metrics(self) -> dict[str, float]:
        return {f"timing/{name}": value for name, value in self.seconds.items()}
