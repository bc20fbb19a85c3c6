"""Threads of links. They have buffers, so a process ends them before it ends itself.

A tensor that is let go of while Python ends has torch ask for Python's lock, which ends that thread within C++, and
that aborts the process; so does any return from C++ to Python.
"""

import atexit
import threading
import time
from collections.abc import Callable, Sequence

from nemo_fp8rl.refit.transport.link import LinkError

EXIT = 2.0
"""Seconds: see `join`."""


def start(name: str, run: Callable[[], None], stop: Callable[[], None]) -> threading.Thread:
    """A thread that runs; `stop` makes it end soon, and is called at the latest when the process is about to end.

    Raises LinkError where that is so already.
    """

    def run_and_forget() -> None:
        try:
            run()
        finally:
            with _lock:
                del _running[thread]

    thread = threading.Thread(target=run_and_forget, name=name, daemon=True)
    with _lock:
        if _ending.is_set():
            raise LinkError("this process is about to end")
        thread.start()
        _running[thread] = stop
    return thread


def join(threads: Sequence[threading.Thread]) -> None:
    """Wait, for EXIT in all, for the end of threads that are about to end."""
    end = time.monotonic() + EXIT
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


_lock = threading.Lock()
_running: dict[threading.Thread, Callable[[], None]] = {}
_ending = threading.Event()


@atexit.register
def _end() -> None:
    with _lock:
        _ending.set()
        running = dict(_running)
    for stop in running.values():
        stop()
    join(list(running))
