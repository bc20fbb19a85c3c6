"""Ctrl-C, SIGTERM and the SIGUSR1 of batch systems set the stop flag; a second signal interrupts the run at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

from nemo_fp8rl.run.stop_flag import StopFlag

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
NOTICE = b"stopping after this step; once more stops at once\n"
STDERR = 2


@contextmanager
def stop_on_signals(stop: StopFlag) -> Iterator[StopFlag]:
    """Set the flag at the first signal within the block; raise KeyboardInterrupt at the second."""
    has_signal = False

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal has_signal
        if has_signal:
            raise KeyboardInterrupt
        has_signal = True
        stop.set()
        with suppress(OSError):
            os.write(STDERR, NOTICE)  # not print: the signal may interrupt a print

    with ExitStack() as handlers:
        for number in SIGNALS:
            handlers.callback(signal.signal, number, signal.signal(number, handle))
        yield stop
