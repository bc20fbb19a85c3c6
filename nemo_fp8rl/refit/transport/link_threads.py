"""The threads of links. They use tensors, so a process must end them before it ends itself.

A tensor that is freed while Python shuts down makes torch request Python's lock. That ends the thread within C++ code,
which aborts the process; every other return from C++ to Python does the same.
"""

import atexit
import threading
import time
from collections.abc import Callable, Sequence

from nemo_fp8rl.refit.transport.link import LinkError

EXIT_SECONDS = 2.0
"""Seconds that `join` waits."""


def start(name: str, run: Callable[[], None], stop: Callable[[], None]) -> threading.Thread:
    """Start a thread.

    run:    the thread's work
    stop:   makes `run` return soon; called at the latest when the process ends
    Raises: LinkError if the process is already ending
    """

    def run_and_remove() -> None:
        try:
            run()
        finally:
            with _lock:
                del _threads[thread]

    thread = threading.Thread(target=run_and_remove, name=name, daemon=True)
    with _lock:
        if _is_exiting.is_set():
            raise LinkError("this process is about to end")
        thread.start()
        _threads[thread] = stop
    return thread


def join(threads: Sequence[threading.Thread]) -> None:
    """Wait, EXIT_SECONDS altogether, for threads that are about to end."""
    deadline = time.monotonic() + EXIT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


_lock = threading.Lock()
_threads: dict[threading.Thread, Callable[[], None]] = {}
_is_exiting = threading.Event()


@atexit.register
def _stop_all() -> None:
    with _lock:
        _is_exiting.set()
        threads = dict(_threads)
    for stop in threads.values():
        stop()
    join(list(threads))
