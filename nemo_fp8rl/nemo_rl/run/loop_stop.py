"""NeMo RL's loops, told to stop: they save the step under way and end, though they listen to nobody.

What they read anew at every step is their config, so from that moment on it says to save. The asynchronous loop reads
there, too, when to end; the other one asks for its next prompts, and gets none. Either ends once a step has been saved.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from nemo_fp8rl.nemo_rl.compat import end_asynchronous_loop, save_at_every_step
from nemo_fp8rl.run.signals import GracefulStop

POLL = 0.05


class Stopped(Exception):
    """The loop's next step would be one too many."""


class LoopStop:
    """master: NeMo RL's config of the loop. steps: of the last saved state, by `compat.completed_steps`. finish: waits
    for what is written in the background.
    """

    def __init__(self, master: Any, steps: Callable[[], int], finish: Callable[[], None], asynchronous: bool) -> None:
        self.master, self.steps, self.finish, self.asynchronous = master, steps, finish, asynchronous
        self.told = self.cut_short = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within, signals and pods are heard, also after a loop that raised Stopped, until all is written. What a loop
        that fails has saved is written, too: main's synchronous one leaves that to whoever calls it.
        """
        with GracefulStop(of_pods=True, then=self._tell):
            try:
                with suppress(Stopped):
                    yield
            except Exception:
                with suppress(Exception):  # the loop's error is what is to be seen
                    self.finish()
                raise
            if self.told:
                self.finish()

    def saved_since(self, steps: int) -> bool:
        """Whether a step was saved since there were so many, or nothing ever is."""
        return not self.master.checkpointing["enabled"] or self.steps() > steps

    def _tell(self) -> None:
        save_at_every_step(self.master)
        self.told = True
        if self.asynchronous:
            threading.Thread(target=self._end_asynchronous, name="stop", daemon=True).start()

    def _end_asynchronous(self) -> None:
        before = self.steps()
        while not self.saved_since(before):
            time.sleep(POLL)
        self.cut_short = True
        end_asynchronous_loop(self.master, max(self.steps(), 1))


class Prompts:
    """A dataloader that raises Stopped where the loop would begin another step."""

    def __init__(self, dataloader: Any, stop: LoopStop) -> None:
        self._dataloader, self._stop = dataloader, stop

    def __iter__(self) -> Iterator[Any]:
        batches, before = iter(self._dataloader), self._stop.steps()
        while not (self._stop.told and self._stop.saved_since(before)):
            before = self._stop.steps()  # it may ask more than once a step
            try:
                yield next(batches)
            except StopIteration:
                return
        self._stop.cut_short = True
        raise Stopped

    def __len__(self) -> int:
        return len(self._dataloader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataloader, name)
