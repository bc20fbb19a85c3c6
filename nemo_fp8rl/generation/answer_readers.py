"""Threads that read an engine's answers, which a refit and sleep wait for."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, get_ident
from typing import TypeVar

Begun = TypeVar("Begun")


class Readers:
    """One thread may read several answers; what it asks for meanwhile does not wait for its own."""

    def __init__(self) -> None:
        self._counts, self._changed = Counter[int](), Condition()

    @contextmanager
    def one(self, begin: Callable[[], Begun]) -> Iterator[Begun]:
        """This thread reads an answer. begin: called before anybody waits for it, one at a time."""
        thread = get_ident()
        with self._changed:
            begun = begin()
            self._counts[thread] += 1
        try:
            yield begun
        finally:
            with self._changed:
                self._counts[thread] -= 1
                self._changed.notify_all()

    def reads_itself(self) -> bool:
        """Whether this thread is within an answer that it has begun to read."""
        with self._changed:
            return self._counts[get_ident()] > 0

    def wait_for_others(self) -> None:
        own = get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not any(n for thread, n in self._counts.items() if thread != own))
