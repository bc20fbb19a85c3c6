"""math-verify in a process of its own, which can be ended when an answer would keep it busy for ever.

Its own time limits are alarms: they need a main thread, which a caller's thread may not be, and cannot interrupt the
arithmetic of a huge integer. So they run in the child's main thread, and the child itself is killed when they fail.
"""

import atexit
import logging
import multiprocessing
import signal
import threading
from multiprocessing.pool import Pool

SECONDS = 5
"""Time for reading an answer, and again for comparing it; the child is ended after three times as long."""

logger = logging.getLogger(__name__)
_lock = threading.Lock()
_pool: Pool | None = None


def agree(gold: str, completion: str) -> bool:
    """Whether the two texts hold the same value; False when that takes too long. Starts the child when first called."""
    global _pool  # noqa: PLW0603 (one child a process, shared by every verifier in it)
    with _lock:
        if _pool is None:
            _pool = multiprocessing.get_context("spawn").Pool(1, initializer=_start)
            _pool.apply(_ready)  # sympy takes seconds to load: not on an answer's time
        try:
            return _pool.apply_async(_agree, (gold, completion)).get(timeout=3 * SECONDS)
        except multiprocessing.TimeoutError:
            logger.warning("math-verify did not decide within %d s, scored 0: %.80r", 3 * SECONDS, completion)
            _end()
            return False


def _end() -> None:
    """End the child; also at exit, where a pool that is left to the garbage collector complains."""
    global _pool  # noqa: PLW0603
    if _pool is not None:
        _pool.terminate()
        _pool.join()
        _pool = None


atexit.register(_end)


def _start() -> None:
    """In the child: leave Ctrl-C, which reaches the whole process group, to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import math_verify  # noqa: F401


def _ready() -> None:
    """Returns once `_start` has."""


def _agree(gold: str, completion: str) -> bool:
    from math_verify import parse, verify

    return verify(
        parse(gold, parsing_timeout=SECONDS), parse(completion, parsing_timeout=SECONDS), timeout_seconds=SECONDS
    )
