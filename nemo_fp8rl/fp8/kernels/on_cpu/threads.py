"""Compiled work shared out among threads that stay: to start one can take longer than the work of a whole matrix."""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


def run_in_threads(work: Callable[[int, int], T], count: int, threads: int) -> list[T]:
    """Results of `work(first, end)` on neighbouring shares of 0 ... count, in their order; the first share is the
    caller's own. Compiled work, which holds no lock of Python's, and shares nothing out itself.
    """
    if not count:
        return []
    threads = max(1, min(threads, count))
    ends = [count * i // threads for i in range(threads + 1)]
    own, *shares = pairwise(ends)
    if not shares:
        return [work(*own)]
    pool = _pool()
    try:
        others = [pool.submit(work, *share) for share in shares]
    except RuntimeError:  # no thread could be started: a share that waits for one must not run after this call
        _pool.cache_clear()
        pool.shutdown(cancel_futures=True)
        raise
    try:
        results = [work(*own)]
    finally:
        wait(others)
    return results + [other.result() for other in others]


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "shares")


os.register_at_fork(after_in_child=_pool.cache_clear)  # whose threads stay with the parent
