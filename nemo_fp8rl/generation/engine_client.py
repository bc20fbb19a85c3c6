"""Clients of a run's engines: `EngineClient`, the base of `EnginePool`, and `RemoteEnginePool` for other processes.

Prompts are divided among the engines so that all have about the same number in flight. Prompts which an engine had not
answered when it died go to all engines again; a prompt's seed makes its samples independent of which engine answers it,
and of when. The subclasses say what happens to an engine that is found dead.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from threading import Lock
from typing import Any

from nemo_fp8rl.batch import Completion
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.generation.interface import SECONDS_A_TOKEN, Sampling
from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.workers import WorkerDied, Workers

CALLS_AT_ONCE = 128
"""Calls, each for many prompts, that an engine with a core in a process of its own (`async_engine`) answers at once."""
CALLS_OF_A_REFIT = 4
"""Prompts that are asked during a refit wait for a pause, a load, a second load after a fault, and a commit."""
HEALTH_CHECK_SECONDS = 0.2
"""Timeout of a health check: an engine that misses it is done without. Also the pause between two looks at engines."""


class EngineClient(ABC):
    """Divides prompts among engines and returns their completions; the prompts of a dead engine are asked again.

    Several threads may call it at once if engines have `async_engine`.

    timeout:    seconds without any answer after which engines count as dead, beyond those for long answers; None: never
    in_flight:  prompts in flight at each engine
    lives:      how often each engine was started again
    missing:    places whose engines get no prompts at present, or that are empty
    """

    timeout: float | None
    retries_are_counted_by_engines: bool

    def __init__(self, cfg: Config, engines: Workers) -> None:
        self.cfg, self.engines = cfg, engines
        self.in_flight, self.lives = [0] * engines.count, [0] * engines.count
        self.missing = set[int]()
        self.counting = Lock()

    def generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        seeds: Sequence[int],
        sampling: Sampling,
        answered: Callable[[int], None] = lambda _: None,
    ) -> list[list[Completion]]:
        """Return the completions of each prompt, in order.

        answered:  is called after each prompt with the number of prompts answered so far
        """
        answers = {}
        for position, completions in self.stream(prompts, seeds, sampling):
            answers[position] = completions
            answered(len(answers))
        return [answers[i] for i in range(len(prompts))]

    def stream(
        self, prompts: Sequence[tuple[int, ...]], seeds: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Yield (position in `prompts`, completions of that prompt) as soon as each is complete."""
        self._wait_until_ready()
        waiting, is_retry = list(range(len(prompts))), False
        timeout = self._answer_timeout(sampling)
        while waiting:
            self._look_for_replacements()
            lives = list(self.lives)
            shares = self._divide(waiting)
            is_counted = is_retry and self.retries_are_counted_by_engines
            arguments = {
                engine: ([prompts[i] for i in share], [seeds[i] for i in share], sampling, is_counted)
                for engine, share in shares.items()
            }
            answered, deaths = set[int](), dict[int, WorkerDied]()
            unanswered = {engine: len(share) for engine, share in shares.items()}
            try:
                for engine, item in self._answers(arguments, timeout, lives):
                    if isinstance(item, WorkerDied):
                        if not self._report_death(engine, item, lives[engine], wait=False):
                            deaths[engine] = item
                    else:
                        position, completions = item
                        answered.add(shares[engine][position])
                        unanswered[engine] -= 1
                        self._add_in_flight(engine, -1)
                        yield shares[engine][position], completions
            finally:
                for engine, count in unanswered.items():
                    self._add_in_flight(engine, -count)
            for engine, death in deaths.items():  # now that the refit in progress waits for no answer of this thread
                self._report_death(engine, death, lives[engine])
            waiting, is_retry = [i for i in waiting if i not in answered], True
            self._count_retries(len(waiting))

    def _answer_timeout(self, sampling: Sampling) -> float | None:
        if self.timeout is None:
            return None
        in_refit = CALLS_OF_A_REFIT * self.timeout if self.cfg.grpo.async_grpo.enabled else 0.0
        return self.timeout + in_refit + SECONDS_A_TOKEN * sampling.max_new_tokens

    @abstractmethod
    def _report_death(self, engine: int, death: WorkerDied, life: int, wait: bool = True) -> bool:
        """Do what there is to do about an engine that was found dead in its `life`.

        Return False where that has to wait for the end of a refit; with `wait`, wait for it.
        """

    @abstractmethod
    def _wait_for_an_engine(self) -> None:
        """Wait until an engine is no longer missing, when all are."""

    def _wait_until_ready(self) -> None:
        """Wait, before the first prompts, until engines have weights, where these may still have to come."""
        return

    def _look_for_replacements(self) -> None:
        """Take engines that were started again elsewhere."""
        return

    def _count_retries(self, prompts: int) -> None:
        """Count prompts that are about to be asked again."""
        return

    def _answers(
        self, arguments: Mapping[int, tuple[Any, ...]], timeout: float | None, lives: list[int]
    ) -> Iterator[tuple[int, Any]]:
        """Yield what `VllmEngine.stream` yields, until an engine that was started again meanwhile refuses."""
        try:
            yield from self.engines.stream("stream", arguments, timeout)
        except RefitError:
            if lives == self.lives:
                raise

    def _divide(self, positions: Sequence[int]) -> dict[int, Sequence[int]]:
        """Return contiguous parts of the positions by engine, so that all have about as many prompts in flight.

        An engine without a part is left out.
        """
        sizes, is_divided = [0] * self.engines.count, False
        while not is_divided:
            with self.counting:
                if serving := [engine for engine in range(self.engines.count) if engine not in self.missing]:
                    for _ in positions:
                        engine = min(serving, key=self.in_flight.__getitem__)
                        sizes[engine] += 1
                        self.in_flight[engine] += 1
                    is_divided = True
            if not is_divided:
                self._wait_for_an_engine()
        borders = pairwise(accumulate(sizes, initial=0))
        return {engine: positions[a:b] for engine, (a, b) in enumerate(borders) if b > a}

    def _add_in_flight(self, engine: int, prompts: int) -> None:
        with self.counting:
            self.in_flight[engine] += prompts


class RemoteEnginePool(EngineClient):
    """A pickled `EnginePool`: the run's engines as another process uses them, such as NeMo RL's trajectory collector.

    It generates with the same engines, and never starts or ends one: that is left to the pool in the driver's process.
    It asks the other engines meanwhile, and raises WorkerDied where there is none. The first prompts wait for the run's
    first refit (NeMo RL v0.7.0 begins to collect before it).

    The pool's `metrics` count what is retried here; they miss what an engine that died had been asked again since they
    were last read.
    """

    timeout = None  # the pool ends an engine that hangs
    retries_are_counted_by_engines = True

    def __init__(self, cfg: Config, engines: Workers) -> None:
        super().__init__(cfg, engines)
        self.first_version, self.first_version_deadline, self.has_seen_version = Lock(), math.inf, False

    def __reduce__(self) -> Any:
        return RemoteEnginePool, (self.cfg, self.engines)

    def _report_death(self, engine: int, death: WorkerDied, life: int, wait: bool = True) -> bool:
        self.missing.add(engine)  # until the pool has started it again
        return True

    def _wait_for_an_engine(self) -> None:
        raise WorkerDied("no engine is there: the run replaces them at its next refit")

    def _look_for_replacements(self) -> None:
        """Take the engines that the pool has started in the place of dead ones, once they generate."""
        for engine in tuple(self.missing):
            self.engines.renew(engine)
            if _is_version(self._generating_version(engine)):
                self.missing.discard(engine)

    def _wait_until_ready(self) -> None:
        """Wait until an engine generates; engines that have no weights yet are asked once they do.

        Raises WorkerDied where none generates after cluster.engine_timeout_seconds.
        """
        if self.has_seen_version:
            return
        patience = self.cfg.cluster.engine_timeout_seconds
        with self.first_version:  # the first thread looks, the others wait for it
            self.first_version_deadline = min(self.first_version_deadline, time.monotonic() + patience)
            while not self.has_seen_version:
                versions = [self._generating_version(engine) for engine in range(self.engines.count)]
                if any(map(_is_version, versions)):
                    self.missing.update(i for i, version in enumerate(versions) if not _is_version(version))
                    self.has_seen_version = True
                elif time.monotonic() > self.first_version_deadline:
                    raise WorkerDied(
                        f"no engine had weights {patience:g} seconds after the first prompt was asked: mend what the "
                        "run's own output says of its first refit, then start it again"
                    )
                else:
                    for engine, version in enumerate(versions):
                        if version is None:
                            self.engines.renew(engine)
                    time.sleep(HEALTH_CHECK_SECONDS)

    def _generating_version(self, engine: int) -> int | None:
        """Return the version that the engine generates from, -1 while it does not, None where it does not answer."""
        version: int | None = self.engines.ask(engine, "generating_version", HEALTH_CHECK_SECONDS)
        return version


def _is_version(version: int | None) -> bool:
    return version is not None and version >= 0
