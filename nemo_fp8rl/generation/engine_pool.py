"""The driver's side of generation: vLLM engines that share the prompts, in this process or as Ray actors.

An engine has a place, of which some may be empty: engines join and leave (`generation.elastic_engines`). The pool
starts engines, divides prompts among them (`EngineClient`) and reports an engine that it finds dead. The refit bridge
alone recovers: it has the pool start the engine again, brings it the weights, and readmits it. A pool that is pickled
to another process becomes a `RemoteEnginePool`.
"""

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

from nemo_fp8rl.common.errors import UserError, single_line
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.generation import engine_client
from nemo_fp8rl.generation.engine import VllmEngine
from nemo_fp8rl.generation.engine_client import CALLS_AT_ONCE, EngineClient, RemoteEnginePool
from nemo_fp8rl.generation.interface import SECONDS_A_TOKEN, EngineDescription
from nemo_fp8rl.refit.interface import Addresses, Recover, Transport
from nemo_fp8rl.refit.manifest import RefitError, TensorPart
from nemo_fp8rl.refit.reports import LoadReport, SendReport
from nemo_fp8rl.refit.route_plan import Links
from nemo_fp8rl.refit.transport.link import RECEIVER_SHARE, SENDER_SHARE
from nemo_fp8rl.workers import WorkerDied, Workers, shutdown_on_error, start_workers

NOT_FENCED = -1
ReportLoss = Callable[[int, Exception, bool], None]
"""(engine, death, whether another one is to be started in its place)"""
BLOCK_COUNT_SECONDS = 5.0
"""Timeout of an engine that is asked for the blocks of its cache; the metrics then leave it out."""


class EnginePool(EngineClient):
    """`generation.interface.Generation` over cluster.generation_engines engines at first.

    token:   the secret with which the links of a refit are opened; a random one where None
    beside:  the ranks whose GPUs the engines share

    patience:      seconds to wait for an engine that must finish its answers first; after them it counts as dead
    fenced_lives:  the lives of the engines when the last refit fenced them; NOT_FENCED after a recovery since
    present:       engines that take part in refits; those of them that are `missing` have no prompts at present
    leaving:       engines that get no more prompts and leave after the answers in progress
    """

    retries_are_counted_by_engines = False

    def __init__(self, cfg: Config, token: str | None = None, beside: Workers | None = None) -> None:
        self.token = secrets.token_hex(32) if token is None else token
        self.timeout: float = cfg.cluster.engine_timeout_seconds
        self.patience = self.timeout + SECONDS_A_TOKEN * cfg.policy.generation.max_new_tokens
        self.engine_restarts = self.prompts_retried = 0
        self.is_closed = False
        self.replacing = Lock()
        self.recover: Recover = self._recover_without_weights
        self.remote_retries = dict[tuple[int, int], int]()  # prompts, by engine and life
        self._report_loss: ReportLoss = lambda engine, death, returns: None
        vllm_cfg, count = cfg.policy.generation.vllm_cfg, cfg.cluster.generation_engines
        self.present, self.leaving = set(range(count)), set[int]()
        engines = start_workers(
            VllmEngine,
            "generation",
            count,
            cfg,
            vllm_cfg.tensor_parallel_size,
            beside,
            max_concurrency=CALLS_AT_ONCE if vllm_cfg.async_engine else 1,
            places=cfg.cluster.most_engines,
        )
        super().__init__(cfg, engines)
        self.missing = set(range(count, engines.count))
        self.fenced_lives = [0] * engines.count
        with shutdown_on_error(engines):
            self._call_all("setup", cfg)

    def __reduce__(self) -> Any:
        return RemoteEnginePool, (self.cfg, self.engines)

    @property
    def takes_turns(self) -> bool:
        """True where trainer and engines have a GPU's memory in turns."""
        policy = self.cfg.policy
        return policy.generation.colocated.enabled and policy.megatron_cfg.offload_between_phases

    def finish_generation(self) -> None:
        engines = self.present_engines()
        if level := self.cfg.policy.generation.vllm_cfg.sleep_level:
            while engines := self._call_or_recover(engines, "finish_generation", level):
                pass

    def prepare_for_generation(self) -> None:
        if self.cfg.policy.generation.vllm_cfg.sleep_level:
            self._call_or_recover(self.present_engines(), "prepare_for_generation")

    def check_health(self) -> None:
        """Have engines that are found dead started again."""
        self._call_or_recover(self.present_engines(), "check_health")

    def describe(self) -> EngineDescription:
        return EngineDescription.union(self._call_all("describe"))

    def metrics(self) -> dict[str, float]:
        for engine in self.present_engines():
            life = self.lives[engine]
            counted = self.engines.ask(engine, "count_retried_prompts", engine_client.HEALTH_CHECK_SECONDS) or 0
            self.remote_retries[engine, life] = max(counted, self.remote_retries.get((engine, life), 0))
        return {
            "generation/engine_restarts": self.engine_restarts,
            "generation/prompts_retried": self.prompts_retried + sum(self.remote_retries.values()),
        }

    def take_cache_metrics(self) -> dict[str, float]:
        """Return the blocks of the windowed cache that requests took since the last call.

        Empty where no request ended since, or where the core of an engine is in a process without a worker.
        """
        counts = [self.engines.ask(i, "take_block_counts", BLOCK_COUNT_SECONDS) for i in self.present_engines()]
        known = [of_engine for of_engine in counts if of_engine is not None]
        dense = sum(of_engine[2] for of_engine in known)
        if not dense:
            return {}
        return {
            "generation/kv_blocks_peak": max(of_engine[0] for of_engine in known),
            "generation/kv_blocks_saved": 1 - sum(of_engine[1] for of_engine in known) / dense,
        }

    def shutdown(self) -> None:
        self.is_closed = True  # threads that still wait for answers start no engine again
        self.engines.shutdown()

    # refit.interface.WeightSink

    def report_deaths_to(self, recover: Recover) -> None:
        self.recover = recover

    def present_engines(self) -> list[int]:
        return sorted(self.present)

    def enter(self, engine: int) -> None:
        self.fenced_lives[engine] = self.lives[engine]  # if it dies as it takes the weights, that is no earlier death
        with self.counting:
            self.present.add(engine)

    def leave(self, engine: int) -> None:
        with self.replacing, self.counting:
            if engine in self.present:
                self.lives[engine] += 1  # what is still asked of it is asked again elsewhere, and nobody replaces it
            self._empty(engine)

    def stored_parts(self, engine: int) -> list[Sequence[TensorPart]]:
        parts: list[Sequence[TensorPart]] = self._call_engine(engine, "stored_parts")
        return parts

    def domains(self, engines: Collection[int]) -> dict[int, list[str]]:
        answers = self.engines.outcomes("domains", dict.fromkeys(engines, ()), self.timeout)
        return {engine: answer for engine, answer in answers.items() if not isinstance(answer, WorkerDied)}

    def connect(self, engine: int, links: Links, addresses: Addresses) -> None:
        self._call_engine(engine, "connect", links, addresses, self.token, RECEIVER_SHARE * self.timeout)

    def disconnect(self, engine: int) -> None:
        with suppress(WorkerDied):
            self._call_engine(engine, "disconnect")

    def fence(self, engines: Collection[int]) -> dict[int, int]:
        with self.replacing:
            self.fenced_lives = list(self.lives)
        outcomes = self.engines.outcomes("fence", dict.fromkeys(engines, ()), self.patience)
        return {engine: -1 if isinstance(version, WorkerDied) else version for engine, version in outcomes.items()}

    def load(
        self, version: int, engines: Collection[int], verify: bool, compare: bool, with_frozen: bool = True
    ) -> Mapping[int, LoadReport | Exception]:
        arguments = version, verify, compare, with_frozen
        return self.engines.outcomes("load", dict.fromkeys(engines, arguments), self.timeout)

    def commit(self, version: int, engines: Collection[int]) -> None:
        for outcome in self.engines.outcomes("commit", dict.fromkeys(engines, (version,)), self.timeout).values():
            if isinstance(outcome, Exception):
                raise outcome
        with self.counting:
            self.missing -= self.present.intersection(engines) - self.leaving

    def is_death(self, outcome: Exception) -> bool:
        return isinstance(outcome, WorkerDied)

    def offer(self, source: int, engine: int, links: Links, transport: Transport) -> Addresses:
        how = engine, links, transport, self.token, SENDER_SHARE * self.timeout
        addresses: Addresses = self._call_engine(source, "offer", *how, patience=self.patience)
        return addresses

    def withdraw(self, source: int, engine: int) -> None:
        with suppress(WorkerDied):
            self._call_engine(source, "withdraw", engine, patience=self.patience)

    def start_push(self, source: int, version: int, engines: Collection[int], **how: bool) -> None:
        self._call_engine(source, "start_push", version, list(engines), how, patience=self.patience)

    def finish_push(self, source: int) -> list[SendReport]:
        reports: list[SendReport] = self._call_engine(source, "finish_push", patience=self.patience)
        return reports

    def replace(self, engine: int, death: Exception, life: int | None = None) -> bool:
        """Start an engine again. Return False, and do nothing, where another thread has done so since that life.

        life:    the life in which the engine was reported dead, after which it is missing until `readmit`; None: the
                 life that the last refit fenced
        Raises:  UserError after cluster.max_engine_restarts
        """
        with self.replacing:
            is_due = self.lives[engine] == (self.fenced_lives[engine] if life is None else life)
            if is_due and self._may_lose(engine):
                self._lose(engine, death)
            elif is_due and life is None:
                self._start_again(engine, death)
                self.missing.discard(engine)
            elif is_due:
                self.missing.add(engine)
                try:
                    self._start_again(engine, death)
                except BaseException:
                    self.missing.discard(engine)
                    raise
            self.fenced_lives[engine] = self.lives[engine]  # if it dies as it takes the weights, it is replaced again
            return is_due

    def readmit(self, engine: int) -> None:
        self.fenced_lives[engine] = NOT_FENCED  # a death that a refit found before the recovery is made good
        if engine in self.present:
            self.missing.discard(engine)

    # engines that join and leave

    def report_losses_to(self, report: ReportLoss) -> None:
        """Call `report` for every engine that died and leaves its place empty."""
        self._report_loss = report

    def start(self, engine: int) -> None:
        """Start an engine in an empty place. It has neither weights nor prompts, and takes part in no refit."""
        self.engines.restart(engine)
        self._set_up(engine)

    def begin_to_leave(self, engine: int) -> bool:
        """Give an engine no more prompts. Return False where too few others have prompts."""
        with self.counting:
            if engine not in self.present or not self._leaves_enough(engine):
                return False
            self.leaving.add(engine)
            self.missing.add(engine)
            return True

    def wait_for_answers(self, engine: int) -> None:
        """Wait until an engine that is leaving has answered; end one that takes too long."""
        deadline = time.monotonic() + self.patience
        while self.in_flight[engine] and engine in self.leaving and not self.is_closed:
            if time.monotonic() > deadline:
                self.engines.end(engine)
            time.sleep(engine_client.HEALTH_CHECK_SECONDS)

    def retire(self, engine: int) -> None:
        """End the process of an engine that has left."""
        self.engines.retire(engine)

    def serving_engines(self) -> set[int]:
        """Return the engines that get prompts."""
        return self.present - self.missing

    def _leaves_enough(self, engine: int) -> bool:
        return len(self.serving_engines() - {engine}) >= self.cfg.cluster.least_engines

    def _may_lose(self, engine: int) -> bool:
        """True where the place of an engine that died may be empty for a while."""
        with self.counting:
            return self._leaves_enough(engine) or (engine in self.leaving and bool(self.serving_engines()))

    def _lose(self, engine: int, death: Exception) -> None:
        """Leave the place of a dead engine empty, and report whether another one is to be started in it."""
        was_leaving = engine in self.leaving
        returns = not was_leaving and self.engine_restarts < self.cfg.cluster.max_engine_restarts
        self.engine_restarts += returns
        self.lives[engine] += 1
        self.engines.end(engine)  # first: another one may start in its place as soon as that is empty
        with self.counting:
            self._empty(engine)
        if not was_leaving:
            self._report_loss(engine, death, returns)

    def _empty(self, engine: int) -> None:
        self.present.discard(engine)
        self.leaving.discard(engine)
        self.missing.add(engine)

    def _start_again(self, engine: int, death: Exception) -> None:
        limit = self.cfg.cluster.max_engine_restarts
        if self.engine_restarts == limit:
            raise UserError(
                f"engine {engine} died ({death}) after {limit} restarts of engines in this run "
                "(cluster.max_engine_restarts); look into its log, then continue with --resume"
            ) from death
        self.engine_restarts += 1
        self.lives[engine] += 1
        self.leaving.discard(engine)  # it is needed: no other one has prompts
        try:
            self.engines.restart(engine)
            self._set_up(engine)
        except WorkerDied as next_death:
            self._start_again(engine, next_death)

    def _set_up(self, engine: int) -> None:
        sleep_level = self.cfg.policy.generation.vllm_cfg.sleep_level
        self._call_engine(engine, "setup", self.cfg)
        if sleep_level:  # its cache wakes with its first answer, as the others': the trainer needs room to send
            self._call_engine(engine, "finish_generation", sleep_level)
            self._call_engine(engine, "prepare_for_generation")

    def _report_death(self, engine: int, death: WorkerDied, life: int, wait: bool = True) -> bool:
        """Have the bridge recover the engine; do nothing if another thread has recovered it since that life.

        If trainer and engines share a GPU's memory in turns and another engine still answers, end this engine's process
        and leave it to the next refit. The trainer has no memory now to send weights, and an engine that only reported
        a failure would keep memory that the trainer needs.

        Raises: UserError if the new engine does not take the weights
        """
        if self.is_closed:
            raise death
        if self.takes_turns and self._leave_to_next_refit(engine, life):
            return True
        try:
            return self.recover(engine, death, life, wait)
        except (RefitError, WorkerDied) as error:
            raise UserError(
                f"engine {engine} died ({death}) and was started again, without the weights: {single_line(error)}; "
                "mend that, then continue with --resume"
            ) from error

    def _leave_to_next_refit(self, engine: int, life: int) -> bool:
        with self.replacing, self.counting:  # of two threads that lose the last two engines one replaces its engine
            if not self.serving_engines() - {engine}:
                return False
            if self.lives[engine] == life:
                self.missing.add(engine)
                self.engines.end(engine)
            return True

    def _recover_without_weights(self, engine: int, death: Exception, life: int, wait: bool) -> bool:
        """Recover an engine before there is a bridge, and so before there are weights to bring."""
        if self.replace(engine, death, life):
            self.readmit(engine)
        return True

    def _wait_for_an_engine(self) -> None:
        time.sleep(engine_client.HEALTH_CHECK_SECONDS)  # another thread replaces them

    def _count_retries(self, prompts: int) -> None:
        self.prompts_retried += prompts

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Return what every engine answers before the first refit, until which none is replaced."""
        try:
            return self.engines.call(method, [arguments] * len(self.present), self.timeout)
        except WorkerDied as death:
            raise UserError(
                f"an engine died before the first refit ({death}); what it wrote says why (of a Ray actor: in its "
                "worker's log); one that is only slow needs a larger cluster.engine_timeout_seconds"
            ) from death

    def _call_or_recover(self, engines: Collection[int], method: str, *arguments: Any) -> list[int]:
        """Call the method on these engines; return those that were dead and have been started again instead."""
        lives = list(self.lives)
        outcomes = self.engines.outcomes(method, dict.fromkeys(engines, arguments), self.patience)
        deaths = {engine: outcome for engine, outcome in outcomes.items() if isinstance(outcome, WorkerDied)}
        for engine, death in deaths.items():
            self._report_death(engine, death, lives[engine])
        return [engine for engine in deaths if engine not in self.missing]

    def _call_engine(self, engine: int, method: str, *arguments: Any, patience: float | None = None) -> Any:
        """Return what one engine answers; raise what it raised, WorkerDied when it is gone.

        patience:  seconds to wait for an engine that may have to finish its answers first
        """
        outcome = self.engines.outcomes(method, {engine: arguments}, patience or self.timeout)[engine]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome
