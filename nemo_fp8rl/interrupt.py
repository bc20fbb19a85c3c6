"""Ctrl-C, SIGTERM, and the SIGUSR1 of batch systems end a run at the next step border, with a checkpoint; a second one
ends it at once.
"""

import os
import signal
from types import FrameType, TracebackType
from typing import Any, Self

STDERR = 2


class GracefulStop:
    """Open with `with`; `requested` turns true at the first signal."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    NOTICE = b"stopping after this step; once more stops at once\n"

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in self.SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        os.write(STDERR, self.NOTICE)  # not print: the signal may have come in the midst of one
