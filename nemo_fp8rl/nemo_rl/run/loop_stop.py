"""The stop flag for NeMo RL's loops: they save the current step and end, though they read no flag.

The loops read their config anew at every step, so once the flag is set, their config says to save. The asynchronous
loop also reads there when to end; the synchronous one asks for its next prompts, and gets none. Either ends once a step
has been saved.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from nemo_fp8rl.nemo_rl.compat import end_asynchronous_loop, save_at_every_step
from nemo_fp8rl.run.pod_stop import stop_on_pod_request
from nemo_fp8rl.run.signals import stop_on_signals
from nemo_fp8rl.run.stop_flag import StopFlag

POLL = 0.05


class LoopEnd(Exception):
    """Ends the synchronous loop, which would begin another step."""


class LoopStop:
    """The stop flag of a loop of NeMo RL, and how the loop obeys it.

    flag:       set by signals and pods within `listen`
    cut_short:  True once the loop was ended before its last step
    """

    def __init__(self, master: Any, steps: Callable[[], int], finish: Callable[[], None], asynchronous: bool) -> None:
        """master:  NeMo RL's config of the loop
        steps:   returns the steps that the loop saved last (`compat.completed_steps` of its state)
        finish:  waits for checkpoints that are written in the background
        """
        self.master, self.steps, self.finish, self.asynchronous = master, steps, finish, asynchronous
        self.flag, self.cut_short = StopFlag(on_set=self._make_loop_save), False

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Obey signals and pods within the block, also after LoopEnd, until everything is written.

        What a loop that fails has saved is written, too: main's synchronous loop leaves that to its caller.
        """
        with stop_on_pod_request(self.flag), stop_on_signals(self.flag):
            try:
                with suppress(LoopEnd):
                    yield
            except Exception:
                with suppress(Exception):  # the user must see the loop's error
                    self.finish()
                raise
            if self.flag.is_set:
                self.finish()

    def has_saved_since(self, steps: int) -> bool:
        """Return True when the loop has saved more steps than these, or saves nothing at all."""
        return not self.master.checkpointing["enabled"] or self.steps() > steps

    def _make_loop_save(self) -> None:
        save_at_every_step(self.master)
        if self.asynchronous:
            threading.Thread(target=self._end_asynchronous, name="stop", daemon=True).start()

    def _end_asynchronous(self) -> None:
        before = self.steps()
        while not self.has_saved_since(before):
            time.sleep(POLL)
        self.cut_short = True
        end_asynchronous_loop(self.master, max(self.steps(), 1))


class StoppableDataloader:
    """A dataloader that raises LoopEnd where the loop would begin another step."""

    def __init__(self, dataloader: Any, stop: LoopStop) -> None:
        self._dataloader, self._stop = dataloader, stop

    def __iter__(self) -> Iterator[Any]:
        batches, before = iter(self._dataloader), self._stop.steps()
        while not (self._stop.flag.is_set and self._stop.has_saved_since(before)):
            before = self._stop.steps()  # the loop may ask more than once in a step
            try:
                yield next(batches)
            except StopIteration:
                return
        self._stop.cut_short = True
        raise LoopEnd

    def __len__(self) -> int:
        return len(self._dataloader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataloader, name)
