"""A thread pool for compiled work that keeps its threads: starting one can take longer than the work on a matrix."""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


def run_in_threads(work: Callable[[int, int], T], count: int, threads: int) -> list[T]:
    """Return the results of `work(first, end)` on neighbouring shares of 0 ... count, in their order.

    The calling thread takes the first share.

    work:    compiled code, which does not hold Python's lock; it must not call this function
    threads: number of shares, at most `count`
    """
    if not count:
        return []
    threads = max(1, min(threads, count))
    borders = [count * i // threads for i in range(threads + 1)]
    first_share, *shares = pairwise(borders)
    if not shares:
        return [work(*first_share)]
    pool = _pool()
    try:
        futures = [pool.submit(work, *share) for share in shares]
    except RuntimeError:  # no thread could be started; a share in the queue must not run after this call
        _pool.cache_clear()
        pool.shutdown(cancel_futures=True)
        raise
    try:
        results = [work(*first_share)]
    finally:
        wait(futures)
    return results + [future.result() for future in futures]


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "shares")


os.register_at_fork(after_in_child=_pool.cache_clear)  # the threads of the pool stay with the parent
