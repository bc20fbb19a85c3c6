"""Ctrl-C, SIGTERM, the SIGUSR1 of batch systems, and a pod that is to end, end a run at the next step border, with a
checkpoint; a second signal ends it at once.
"""

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import FrameType, TracebackType
from typing import Self

from nemo_fp8rl.run.pod_stop import StopRequest

STDERR = 2


class GracefulStop:
    """Open with `with`; `requested` turns true at the first signal, or when a pod asks. A second signal interrupts.

    of_pods: whether this process is a driver that pods may ask. then: called at that moment, in whatever thread.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    NOTICE = b"stopping after this step; once more stops at once\n"

    def __init__(self, of_pods: bool = False, then: Callable[[], None] = lambda: None) -> None:
        self.requested = self._signalled = False
        self._then = then
        self._pods = StopRequest.of_environment(self._request) if of_pods else None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        if self._pods is not None:
            self._open.enter_context(self._pods)
        for number in self.SIGNALS:
            self._open.callback(signal.signal, number, signal.signal(number, self._on_signal))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._open.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signalled:
            raise KeyboardInterrupt
        self._signalled = True
        self._request()
        with suppress(OSError):
            os.write(STDERR, self.NOTICE)  # not print: the signal may have come in the midst of one

    def _request(self) -> None:
        if not self.requested:
            self.requested = True
            self._then()
