"""Where the loop gets the rollout of a step: collected in turn with training, or ahead of it.

    in turn   engines answer the prompts of step n, the trainer takes step n, the refit follows
    ahead     while the trainer takes step n, engines answer prompts of the steps n+1 to n+max_age

The weights of step n, before its update, are version n-1. A rollout ahead begins when the trainer comes to at most
`max_age` steps before it, so none of its tokens is of a version more than `max_age` older than the trainer's. Prompts
and seeds of a step are the same in both ways, and after a resume. Answers are not: the versions that sample them depend
on the clock.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from nemo_fp8rl.common.stopwatch import Stopwatch
from nemo_fp8rl.rollout.collect import PromptsOfRound, Rollout

Collect = Callable[[Stopwatch, int, PromptsOfRound], Rollout]
"""`collect_rollout` of (clock, step, prompts of the step's rounds)."""


class RolloutSource(Protocol):
    """Gives the rollouts of steps in order."""

    def begin(self, step: int) -> None:
        """Take notice that this step is the trainer's next, and that engines have its weights."""
        ...

    def take(self, step: int, clock: Stopwatch) -> Rollout:
        """Return the rollout of a step. Raises what its collection raised."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return metrics of the time since the last call."""
        ...


class RolloutsInTurn(RolloutSource):
    """Collects the rollout of a step when the trainer asks for it."""

    def __init__(self, collect: Collect, prompts_of_step: Callable[[int], PromptsOfRound]) -> None:
        self.collect, self.prompts_of_step = collect, prompts_of_step

    def begin(self, step: int) -> None:
        return

    def take(self, step: int, clock: Stopwatch) -> Rollout:
        return self.collect(clock, step, self.prompts_of_step(step))

    def metrics(self) -> dict[str, float]:
        return {}


class RolloutsAhead(RolloutSource):
    """Collects the rollouts of later steps, each in a thread of its own, while the trainer works.

    The threads end with their rollouts; where the run ends before, they fail with the engines that the run shuts down.
    """

    def __init__(
        self,
        collect: Collect,
        prompts_of_step: Callable[[int], PromptsOfRound],
        max_age: int,
        last_step: int,
        on_phase: Callable[[str], None],
    ) -> None:
        """max_age:    steps by which a rollout may begin before its step
        last_step:  no rollout is collected for later steps
        on_phase:   called with the phase of the rollout for which the trainer waits
        """
        self.collect, self.prompts_of_step, self.on_phase = collect, prompts_of_step, on_phase
        self.max_age, self.last_step = max_age, last_step
        self.rollouts: dict[int, Future[Rollout]] = {}
        self.step_of_wait, self.num_complete = 0, 0
        self.busy = _BusyTime()

    def begin(self, step: int) -> None:
        for later in range(step, min(step + self.max_age, self.last_step) + 1):
            if later not in self.rollouts:
                self.rollouts[later] = Future()
                arguments = later, self.prompts_of_step(later), self.rollouts[later]
                threading.Thread(target=self._collect, args=arguments, name=f"rollout {later}", daemon=True).start()

    def take(self, step: int, clock: Stopwatch) -> Rollout:
        """Return the rollout of a step; the clock counts the wait for it as its phase "generate"."""
        self.num_complete = sum(rollout.done() for rollout in self.rollouts.values())
        self.step_of_wait = step
        with clock("generate"):
            rollout = self.rollouts[step].result()
        del self.rollouts[step]
        return rollout

    def metrics(self) -> dict[str, float]:
        """Return the number of complete rollouts when the trainer last asked for one, and the engines' idle share."""
        return {
            "generation/rollouts_ready": self.num_complete,
            "generation/idle_share": self.busy.take_idle_share(),
        }

    def _collect(self, step: int, prompts: PromptsOfRound, rollout: "Future[Rollout]") -> None:
        def show(phase: str) -> None:
            if self.step_of_wait == step:
                self.on_phase(phase)

        self.busy.add(1)
        try:
            rollout.set_result(self.collect(Stopwatch(show), step, prompts))
        except BaseException as error:  # `take` raises it
            rollout.set_exception(error)
        finally:
            self.busy.add(-1)


class _BusyTime:
    """Counts the seconds in which at least one rollout is being collected."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.active, self.busy = 0, 0.0
        self.begin = self.changed = time.perf_counter()

    def add(self, rollouts: int) -> None:
        with self.lock:
            self._count()
            self.active += rollouts

    def take_idle_share(self) -> float:
        """Return the share of the time since the last call in which no rollout was being collected."""
        with self.lock:
            self._count()
            seconds, busy = self.changed - self.begin, self.busy
            self.begin, self.busy = self.changed, 0.0
        return 1.0 - busy / seconds if seconds else 0.0

    def _count(self) -> None:
        now = time.perf_counter()
        self.busy += now - self.changed if self.active else 0.0
        self.changed = now
