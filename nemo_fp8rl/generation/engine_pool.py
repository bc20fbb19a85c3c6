"""The driver's side of generation: vLLM engines that share the prompts, in this process or as Ray actors."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from threading import Lock, RLock
from typing import Any

from nemo_fp8rl.batch import Completion
from nemo_fp8rl.common.errors import UserError, one_line
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.generation.engine import VllmEngine
from nemo_fp8rl.generation.interface import SECONDS_A_TOKEN, Sampling
from nemo_fp8rl.refit.bridge import Addresses, Revive
from nemo_fp8rl.refit.manifest import RefitError, TensorPart
from nemo_fp8rl.refit.reports import LoadReport
from nemo_fp8rl.refit.route_plan import Links
from nemo_fp8rl.refit.transport.link import RECEIVER_SHARE
from nemo_fp8rl.workers import WorkerDied, Workers, shutdown_on_error, start_workers

CALLS_AT_ONCE = 128
"""Calls, each for many prompts, that an engine with a core in a process of its own (`async_engine`) answers at once."""
SOON = 0.2
"""Seconds in which an engine says whether it generates, or is done without; between looks at those that start."""
COPIED = ("cfg", "token", "engines", "engine_restarts", "prompts_retried")
"""Attributes that a copy takes over; the others are each process' own."""


class EnginePool:
    """`generation.base.Generation` over cluster.generation_engines engines.

    An engine that dies is started again and caught up by the refit bridge (`on_death`); prompts that it had not
    answered go to all engines anew. A prompt's seed makes its samples independent of which engine answers, and of when.
    token: what the links of a refit are opened with. beside: the ranks whose GPUs they share.

    Several threads may ask at once where engines have `async_engine`: what each asks joins what is being answered.

    A copy, pickled to another process, generates with the same engines. Replacing one that is dead, and ending one that
    hangs, is left to the original: a copy asks the others meanwhile, and raises WorkerDied where there is none. Asked
    before the first refit, it waits for that (NeMo RL v0.7.0 begins to collect before it). The original's `metrics`
    count what copies retried, but for what a dead engine was asked since they were last read.
    """

    on_death: Revive | None = None
    is_copy = is_closed = False

    def __init__(self, cfg: Config, token: str = "", beside: Workers | None = None) -> None:
        self.cfg, self.token = cfg, token
        self.timeout = cfg.cluster.engine_timeout_seconds
        self.patience = self.timeout + SECONDS_A_TOKEN * cfg.policy.generation.max_new_tokens
        self.engine_restarts = self.prompts_retried = 0
        self._begin_process()
        vllm_cfg, count = cfg.policy.generation.vllm_cfg, cfg.cluster.generation_engines
        calls = CALLS_AT_ONCE if vllm_cfg.async_engine else 1
        self.engines = start_workers(
            VllmEngine, "generation", count, cfg, vllm_cfg.tensor_parallel_size, beside, max_concurrency=calls
        )
        with shutdown_on_error(self.engines):
            self._call_all("setup", cfg)

    @property
    def takes_turns(self) -> bool:
        policy = self.cfg.policy
        return policy.generation.colocated.enabled and policy.megatron_cfg.offload_between_phases

    def _begin_process(self) -> None:
        count = self.cfg.cluster.generation_engines
        self.asked, self.lives = [0] * count, [0] * count  # prompts under way, and restarts, of each engine
        self.fenced = [0] * count  # restarts of the engine that a refit knows
        self.counting, self.reviving = Lock(), RLock()
        self.gone = set[int]()  # engines that are being replaced; those that a copy does without
        self.copies_retried = dict[tuple[int, int], int]()  # prompts, by engine and its restarts
        self.first_version, self.first_version_until, self.has_seen_version = Lock(), math.inf, False  # a copy's wait

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name in COPIED}
        return state | {"is_copy": True, "timeout": None, "patience": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_process()

    def generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        seeds: Sequence[int],
        sampling: Sampling,
        answered: Callable[[int], None] = lambda _: None,
    ) -> list[list[Completion]]:
        answers = {}
        for position, completions in self.stream(prompts, seeds, sampling):
            answers[position] = completions
            answered(len(answers))
        return [answers[i] for i in range(len(prompts))]

    def stream(
        self, prompts: Sequence[tuple[int, ...]], seeds: Sequence[int], sampling: Sampling
    ) -> Iterator[tuple[int, list[Completion]]]:
        """(position in `prompts`, its completions) as they end."""
        if self.is_copy and not self.has_seen_version:
            self._wait_for_a_version()
        waiting, again = list(range(len(prompts))), False
        timeout = None if self.timeout is None else self.timeout + SECONDS_A_TOKEN * sampling.max_new_tokens
        while waiting:
            if self.is_copy:
                self._take_replacements()
            lives = list(self.lives)
            shares = self._shares(waiting)
            arguments = {
                engine: ([prompts[i] for i in share], [seeds[i] for i in share], sampling, again)
                for engine, share in shares.items()
            }
            answered, deaths = set[int](), dict[int, WorkerDied]()
            left = {engine: len(share) for engine, share in shares.items()}
            try:
                for engine, item in self._answers(arguments, timeout, lives):
                    if isinstance(item, WorkerDied):
                        if not self._revive(engine, item, lives[engine], wait=False):
                            deaths[engine] = item
                    else:
                        position, completions = item
                        answered.add(shares[engine][position])
                        left[engine] -= 1
                        self._count(engine, -1)
                        yield shares[engine][position], completions
            finally:
                for engine, unanswered in left.items():
                    self._count(engine, -unanswered)
            for engine, death in deaths.items():  # now that the refit under way waits for no answer of this thread
                self._revive(engine, death, lives[engine])
            waiting = [i for i in waiting if i not in answered]
            if self.is_copy:
                again = True  # counted by the engines, where the original sees it
            else:
                self.prompts_retried += len(waiting)

    def _answers(
        self, arguments: Mapping[int, tuple[Any, ...]], timeout: float | None, lives: list[int]
    ) -> Iterator[tuple[int, Any]]:
        """What `VllmEngine.stream` yields, until one refuses that another thread has begun to replace meanwhile."""
        try:
            yield from self.engines.stream("stream", arguments, timeout)
        except RefitError:
            if lives == self.lives:
                raise

    def engine_count(self) -> int:
        return self.engines.count

    def stored_parts(self, engine: int) -> list[Sequence[TensorPart]]:
        parts: list[Sequence[TensorPart]] = self._call_one(engine, "stored_parts")
        return parts

    def domains(self, engines: Collection[int]) -> dict[int, list[str]]:
        answers = self.engines.outcomes("domains", dict.fromkeys(engines, ()), self.timeout)
        return {engine: answer for engine, answer in answers.items() if not isinstance(answer, WorkerDied)}

    def connect(self, engine: int, links: Links, addresses: Addresses) -> None:
        self._call_one(engine, "connect", links, addresses, self.token, RECEIVER_SHARE * self.timeout)

    def disconnect(self, engine: int) -> None:
        with suppress(WorkerDied):
            self._call_one(engine, "disconnect")

    def fence(self, engines: Collection[int]) -> dict[int, int]:
        with self.reviving:
            self.fenced = list(self.lives)
        outcomes = self.engines.outcomes("fence", dict.fromkeys(engines, ()), self.patience)
        return {engine: -1 if isinstance(held, WorkerDied) else held for engine, held in outcomes.items()}

    def load(
        self, version: int, engines: Collection[int], verify: bool, compare: bool
    ) -> Mapping[int, LoadReport | Exception]:
        return self.engines.outcomes("load", dict.fromkeys(engines, (version, verify, compare)), self.timeout)

    def commit(self, version: int, engines: Collection[int]) -> None:
        for outcome in self.engines.outcomes("commit", dict.fromkeys(engines, (version,)), self.timeout).values():
            if isinstance(outcome, Exception):
                raise outcome

    def is_death(self, outcome: Exception) -> bool:
        return isinstance(outcome, WorkerDied)

    def replace(self, engine: int, death: Exception) -> None:
        """A new engine in the place of one that a refit found dead, unless another thread was there first.

        Raises UserError after cluster.max_engine_restarts of them.
        """
        if self.is_copy:
            raise death
        with self.reviving:
            if self.fenced[engine] == self.lives[engine]:
                self._replace(engine, death)
                self.gone.discard(engine)
            self.fenced[engine] = self.lives[engine]

    def _replace(self, engine: int, death: Exception) -> None:
        limit = self.cfg.cluster.max_engine_restarts
        if self.engine_restarts == limit:
            raise UserError(
                f"engine {engine} died ({death}) after {limit} restarts of engines in this run "
                "(cluster.max_engine_restarts); look into its log, then continue with --resume"
            ) from death
        self.engine_restarts += 1
        self.lives[engine] += 1
        sleep_level = self.cfg.policy.generation.vllm_cfg.sleep_level
        try:
            self.engines.restart(engine)
            self._call_one(engine, "setup", self.cfg)
            if sleep_level:  # its cache wakes with its first answer, as the others': the trainer needs room to send
                self._call_one(engine, "finish_generation", sleep_level)
                self._call_one(engine, "prepare_for_generation")
        except WorkerDied as again:
            self._replace(engine, again)

    def finish_generation(self) -> None:
        engines: Collection[int] = range(self.engines.count)
        if level := self.cfg.policy.generation.vllm_cfg.sleep_level:
            while engines := self._revived(engines, "finish_generation", level):
                pass

    def prepare_for_generation(self) -> None:
        if self.cfg.policy.generation.vllm_cfg.sleep_level:
            self._revived(range(self.engines.count), "prepare_for_generation")

    def check_health(self) -> None:
        """Start engines again that are found dead."""
        self._revived(range(self.engines.count), "check_health")

    def kernels(self) -> list[str]:
        return sorted(set().union(*self._call_all("kernels")))

    def instructions(self) -> set[str]:
        return set(self._call_all("instructions"))

    def metrics(self) -> dict[str, float]:
        for engine, life in enumerate(self.lives):
            counted = self.engines.ask(engine, "count_retried_prompts", SOON) or 0
            self.copies_retried[engine, life] = max(counted, self.copies_retried.get((engine, life), 0))
        return {
            "generation/engine_restarts": self.engine_restarts,
            "generation/prompts_retried": self.prompts_retried + sum(self.copies_retried.values()),
        }

    def shutdown(self) -> None:
        self.is_closed = True  # threads that still wait for answers start no engine again
        self.engines.shutdown()

    def _shares(self, positions: Sequence[int]) -> dict[int, Sequence[int]]:
        """Contiguous parts of the positions by engine, so that all have as many prompts under way as they go; engines
        without a part are left out.
        """
        sizes, alive = [0] * self.engines.count, self._alive()
        with self.counting:
            for _ in positions:
                engine = min(alive, key=self.asked.__getitem__)
                sizes[engine] += 1
                self.asked[engine] += 1
        borders = pairwise(accumulate(sizes, initial=0))
        return {engine: positions[a:b] for engine, (a, b) in enumerate(borders) if b > a}

    def _count(self, engine: int, prompts: int) -> None:
        with self.counting:
            self.asked[engine] += prompts

    def _alive(self) -> list[int]:
        """Engines that can be asked. Raises WorkerDied in a copy that has none; the original waits for one."""
        while not (alive := [engine for engine in range(self.engines.count) if engine not in self.gone]):
            if self.is_copy:
                raise WorkerDied("no engine is there: the run replaces them at its next refit")
            time.sleep(SOON)  # another thread replaces them
        return alive

    def _take_replacements(self) -> None:
        """Take the engines that the original has started in the place of others, once they generate."""
        for engine in tuple(self.gone):
            self.engines.renew(engine)
            version = self.engines.ask(engine, "generating_version", SOON)
            if version is not None and version >= 0:
                self.gone.discard(engine)

    def _wait_for_a_version(self) -> None:
        """Wait, in a copy, until an engine generates; others that have no weights yet are asked once they do.

        Raises WorkerDied where none does after cluster.engine_timeout_seconds.
        """
        patience = self.cfg.cluster.engine_timeout_seconds
        with self.first_version:  # the first thread looks, the others wait for it
            self.first_version_until = min(self.first_version_until, time.monotonic() + patience)
            while not self.has_seen_version:
                versions = [
                    self.engines.ask(engine, "generating_version", SOON) for engine in range(self.engines.count)
                ]
                if any(version is not None and version >= 0 for version in versions):
                    self.gone.update(engine for engine, held in enumerate(versions) if held is None or held < 0)
                    self.has_seen_version = True
                elif time.monotonic() > self.first_version_until:
                    raise WorkerDied(
                        f"no engine had weights {patience:g} seconds after the first prompt was asked: mend what the "
                        "run's own output says of its first refit, then start it again"
                    )
                else:
                    for engine, held in enumerate(versions):
                        if held is None:
                            self.engines.renew(engine)
                    time.sleep(SOON)

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        """What every engine answers before the first refit, till when none is replaced."""
        try:
            return self.engines.call(method, [arguments] * self.engines.count, self.timeout)
        except WorkerDied as death:
            raise UserError(
                f"an engine died before the first refit ({death}); what it wrote says why (of a Ray actor: in its "
                "worker's log); one that is only slow needs a larger cluster.engine_timeout_seconds"
            ) from death

    def _revived(self, engines: Collection[int], method: str, *arguments: Any) -> list[int]:
        """Call the method on these engines; those that are dead, and are started again instead."""
        lives = list(self.lives)
        outcomes = self.engines.outcomes(method, dict.fromkeys(engines, arguments), self.patience)
        for engine, outcome in outcomes.items():
            if isinstance(outcome, WorkerDied):
                self._revive(engine, outcome, lives[engine])
        return [e for e, outcome in outcomes.items() if isinstance(outcome, WorkerDied) and e not in self.gone]

    def _revive(self, engine: int, death: WorkerDied, life: int, wait: bool = True) -> bool:
        """Replace the engine and catch it up; nothing where another thread has done so since the life that it died in.
        Answers False where a refit is under way, which does it, unless it is to wait for that.

        Where trainer and engines take turns in a GPU's memory it is left to the next refit as long as others answer:
        these fill the memory that the trainer's weights would need to be sent from. Its process is ended: it may have
        said itself that it failed, and would keep memory that the trainer needs, and take that refit.

        Raises UserError where the new one does not take the weights.
        """
        if self.is_closed:
            raise death
        if (self.is_copy or self.takes_turns) and self._left_to_the_next_refit(engine, life):
            return True
        is_ours = False

        def start() -> bool:
            nonlocal is_ours
            with self.reviving:
                if is_ours := self.lives[engine] == life:
                    self.gone.add(engine)
                    self._replace(engine, death)
                    self.fenced[engine] = self.lives[engine]  # or catching it up would not replace it once more
                return is_ours

        try:
            if self.on_death is not None:
                return self.on_death(engine, start, wait)
            start()
            return True
        except (RefitError, WorkerDied) as error:
            raise UserError(
                f"engine {engine} died ({death}) and was started again, without the weights: {one_line(error)}; mend "
                "that, then continue with --resume"
            ) from error
        finally:
            if is_ours:
                self.gone.discard(engine)

    def _left_to_the_next_refit(self, engine: int, life: int) -> bool:
        with self.reviving, self.counting:  # of two threads that lose the last two engines one replaces its own
            if not self.is_copy and not {*range(self.engines.count)} - self.gone - {engine}:
                return False
            if self.lives[engine] == life:
                self.gone.add(engine)
                if not self.is_copy:
                    self.engines.end(engine)
            return True

    def _call_one(self, engine: int, method: str, *arguments: Any) -> Any:
        """What one engine answers; raises what it raised, WorkerDied when it is gone."""
        outcome = self.engines.outcomes(method, {engine: arguments}, self.timeout)[engine]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome
