"""Counts the threads that read an engine's answers: a refit, and sleep, wait until the other threads have finished."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, get_ident
from typing import TypeVar

T = TypeVar("T")


class AnswerReaders:
    """Knows which thread reads how many answers. A thread may read several at once, and never waits for itself."""

    def __init__(self) -> None:
        self._counts, self._changed = Counter[int](), Condition()

    @contextmanager
    def count_reader(
        self, begin: Callable[[], T], may_begin: Callable[[], bool] = lambda: True, patience: float = 0.0
    ) -> Iterator[T]:
        """Count this thread as a reader within the block. The block gets the result of `begin`.

        begin:      is called under the lock, so that a thread which waits sees this reader or comes before `begin`
        may_begin:  what this thread waits for first, at most `patience` seconds; `look_again` tells of a change
        """
        thread = get_ident()
        with self._changed:
            self._changed.wait_for(may_begin, patience)
            value = begin()
            self._counts[thread] += 1
        try:
            yield value
        finally:
            with self._changed:
                self._counts[thread] -= 1
                self._changed.notify_all()

    def look_again(self) -> None:
        """Have the threads that wait to begin look again whether they may."""
        with self._changed:
            self._changed.notify_all()

    def is_this_thread_reading(self) -> bool:
        with self._changed:
            return self._counts[get_ident()] > 0

    def wait_for_others(self) -> None:
        """Wait until no other thread reads an answer."""
        this_thread = get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not any(n for thread, n in self._counts.items() if thread != this_thread))
