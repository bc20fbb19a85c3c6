"""One refit: routes, links, send and load at once, verify, commit the version.

A version is *sent* when the trainer's ranks begin, *loaded* in an engine when every byte of it is in its memory, has
been verified and the prefix cache is gone, and *committed* when every engine has loaded it. An engine generates only
from a version that was committed, and from the first byte of the next one on it is fenced: it refuses, until a commit.

    an engine dies, or does not answer    it is started again and gets the whole version
    its link breaks                       it is linked again; the same
    a message lost, damaged, repeated     the same
    twice in one refit                    RefitError; the engines stay fenced, the version is not committed
    a weight that is not finite           RefitError that names it; the same
    the trainer is to take a step         it waits until the weights are sent
    the trainer dies, or does not answer  its links break, the engines stay fenced
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Literal, Protocol

from nemo_fp8rl.refit.full_or_delta import Mode, ModeChoice
from nemo_fp8rl.refit.manifest import RefitError, Sources, TensorPart, cross_domain_share
from nemo_fp8rl.refit.reports import LoadReport, RefitReport, SendReport
from nemo_fp8rl.refit.route_plan import Links, bucket_memory, plan
from nemo_fp8rl.refit.transport.link import TransportChoice

logger = logging.getLogger(__name__)

Transport = Literal["in_process"] | TransportChoice
Verify = Literal["off", "digest", "full"]
Addresses = list[list[Any]]
"""[source][sink]: where a sink finds the source's end of a link; None where there is no link."""
Revive = Callable[[int, Callable[[], bool], bool], bool]
"""`RefitBridge.revive`."""


class WeightSource(Protocol):
    """The trainer's side."""

    def sources(self) -> Sources:
        """What its ranks hold; the same in every call."""
        ...

    def hold_weights(self) -> AbstractContextManager[Any]:
        """A block in which weights stay as, and where, they are: another thread that would change that waits."""
        ...

    def updates(self) -> int:
        """A number that changes with the weights."""
        ...

    def base_version(self) -> int:
        """The version of the bytes that every rank kept for a delta, or -1."""
        ...

    def make_room(self) -> None:
        """Give back what a push takes again, for an engine that is started beside the trainer."""
        ...

    def offer(self, engine: int, links: Links) -> Addresses:
        """Get ready for these links to an engine, and return their addresses."""
        ...

    def withdraw(self, engine: int) -> None: ...

    def start_push(self, version: int, engines: Collection[int], whole: frozenset[str], **how: bool) -> None:
        """Begin to send; `how` are the keywords of `WeightSender.send`."""
        ...

    def finish_push(self) -> list[SendReport]:
        """The reports, one a rank. Raises RefitError on weights that must not be sent."""
        ...


class WeightSink(Protocol):
    """The engines' side. on_death: for an engine that is found dead between refits."""

    on_death: Revive | None

    def engine_count(self) -> int: ...

    def stored_parts(self, engine: int) -> list[Sequence[TensorPart]]:
        """What each rank of an engine stores."""
        ...

    def domains(self, engines: Collection[int]) -> dict[int, list[str]]:
        """The domain of each rank of these engines: see `Sources`. Without those that are dead."""
        ...

    def connect(self, engine: int, links: Links, addresses: Addresses) -> None:
        """Have an engine's ranks take these links."""
        ...

    def disconnect(self, engine: int) -> None: ...

    def fence(self, engines: Collection[int]) -> dict[int, int]:
        """Have them refuse to generate until a commit; the version in each one's memory, -1 where there is none."""
        ...

    def load(
        self, version: int, engines: Collection[int], verify: bool, compare: bool
    ) -> Mapping[int, LoadReport | Exception]:
        """Load what is sent; what became of it in each engine. compare: hold it against the memory, write nothing."""
        ...

    def replace(self, engine: int, death: Exception) -> None:
        """Start an engine that died again, without weights. Raises when that has happened too often."""
        ...

    def is_death(self, outcome: Exception) -> bool: ...

    def commit(self, version: int, engines: Collection[int]) -> None: ...


class RefitBridge:
    """Counts versions and moves them. `version` is the last one that every engine committed; -1 before the first."""

    def __init__(
        self,
        source: WeightSource,
        sink: WeightSink,
        *,
        mode: Mode = "auto",
        transport: Transport = "in_process",
        verify: Verify = "digest",
        bucket_bytes: int = 1 << 28,
        first_version: int = 0,
    ) -> None:
        self.source, self.sink, self.choice = source, sink, ModeChoice(mode)
        self.transport, self.verify, self.bucket_bytes = transport, verify, bucket_bytes
        self.version = first_version - 1
        self.sent_updates = -1
        self.connected: dict[int, frozenset[str]] = {}
        self.domains: dict[int, list[str]] = {}
        self.leaving: dict[int, float] = {}
        """What share of an engine's bytes leaves the machine they come from."""
        self.links: dict[int, Links] = {}
        self._refitting = threading.Lock()  # a second refit is refused
        self._links = threading.Lock()  # of a refit or a revival: the other waits, or is told so
        sink.on_death = self.revive

    @property
    def description(self) -> str:
        return f"{self.choice.mode} through {self._transport_name()}, verify {self.verify}"

    def _transport_name(self) -> str:
        if self.transport != "nearest":
            return self.transport
        self.domains |= self.sink.domains(range(self.sink.engine_count()))
        machines = len({*self.source.sources().domains}.union(*self.domains.values()))
        return "mapped memory" if machines == 1 else f"mapped memory within a machine, gloo between the {machines}"

    def refit(self) -> RefitReport:
        """Bring every engine to the trainer's present weights. Raises RefitError unless all of them committed."""
        with self._exclusive(), self._links, self.source.hold_weights():
            version, start = self.version + 1, time.perf_counter()
            engines = range(self.sink.engine_count())
            self.sent_updates = -1
            held = set(self.sink.fence(engines).values())
            waited = time.perf_counter() - start  # for what other threads had asked
            as_ever = all(self.connected.get(engine) for engine in engines)  # no link to make, no loaders for all of it
            for engine in engines:
                self._connect(engine)
            delta = self.choice.wants_delta and held == {self.source.base_version()} != {-1}
            reports, stages, retries = self._push_and_verify(version, engines, delta=delta, keep=self.choice.wants_base)
            retries += self._commit(version, engines)
            self.version, self.sent_updates = version, self.source.updates()
            seconds = time.perf_counter() - start
            if as_ever and not retries:
                self.choice.record(delta, seconds - waited)
            bf16 = sum(report.quantized_bf16_nbytes for report in reports)
            return RefitReport(
                version=version,
                nbytes=sum(report.nbytes for report in reports) // len(engines),
                delta=delta,
                wire_over_bf16=sum(report.quantized_nbytes for report in reports) / bf16 if bf16 else 1.0,
                base_nbytes=max(report.base_nbytes for report in reports),
                bucket_nbytes=bucket_memory([links.capacities for links in self.links.values()]),
                between_machines=sum(self.leaving.values()) / len(engines),
                retries=retries,
                seconds=seconds,
                stages=stages,
            )

    def revive(self, engine: int, start: Callable[[], bool], wait: bool) -> bool:
        """Start an engine again that was found dead, and bring it to the committed version. Where there is none yet, or
        the trainer's weights have moved on from it, the engine stays fenced until a refit.

        start: False where somebody has done so before. Answers False, and does nothing, while a refit is under way,
        which replaces dead engines itself; with `wait` it waits for the refit's end.
        """
        if not self._links.acquire(blocking=wait):
            return False
        try:
            self.source.make_room()
            if start():
                self._disconnect(engine)
                with self.source.hold_weights():
                    if self.version >= 0 and self.source.updates() == self.sent_updates:
                        self._connect(engine)
                        self._push_and_verify(self.version, [engine])
                        self._commit(self.version, [engine])
            return True
        finally:
            self._links.release()

    def _connect(self, engine: int) -> None:
        """Link an engine; one that is found dead is started again."""
        while engine not in self.connected:
            sources = self.source.sources()
            try:
                with self._asking_engine():
                    stored = self.sink.stored_parts(engine)
                domains = self._all_domains(engine)
                if not domains[engine]:
                    continue
                links = plan(sources, stored, self.bucket_bytes, engine, domains)
                self.leaving[engine] = cross_domain_share(links.routes, sources.domains, domains[engine])
                self.links[engine] = links
                addresses = self.source.offer(engine, links)
                self.connected[engine] = frozenset()
                with self._asking_engine():
                    self.sink.connect(engine, links, addresses)
            except _EngineDied as died:
                self._disconnect(engine)
                self._replace(engine, died.death)
            except BaseException:
                self._disconnect(engine)
                raise

    def _replace(self, engine: int, death: Exception) -> None:
        self.source.make_room()
        self.sink.replace(engine, death)

    def _all_domains(self, engine: int) -> list[list[str]]:
        """The domains of all engines. Others, which may be busy, are asked only where they have not answered yet."""
        engines = range(self.sink.engine_count())
        self.domains.pop(engine, None)
        self.domains |= self.sink.domains([one for one in engines if one not in self.domains])
        return [self.domains.get(one, []) for one in engines]

    @contextmanager
    def _asking_engine(self) -> Iterator[None]:
        """Tell the engine's death from that of a trainer's rank, which `WeightSink.is_death` may not."""
        try:
            yield
        except Exception as error:
            raise (_EngineDied(error) if self.sink.is_death(error) else error) from None

    def _disconnect(self, engine: int, answers: bool = True) -> None:
        """answers: whether the engine is there to be told."""
        if self.connected.pop(engine, None) is not None:
            try:
                self.source.withdraw(engine)
            finally:
                if answers:
                    self.sink.disconnect(engine)

    def _push_and_verify(
        self, version: int, engines: Collection[int], *, delta: bool = False, keep: bool = False
    ) -> tuple[list[SendReport], dict[str, float], int]:
        """Send and load, and with `verify: full` compare, whatever was sent again, too: what the trainer's ranks say,
        seconds by stage, engines retried.
        """
        reports, stages, again = self._push(version, engines, delta=delta, keep=keep)
        if self.verify == "full":
            began = time.perf_counter()
            wrong = self._push(version, engines, keep=keep, compare=True)[2]
            if wrong and self._push(version, wrong, keep=keep, compare=True)[2]:
                raise RefitError(f"refit {version}: engines {wrong} do not hold what was sent to them, twice")
            stages["compare"] = time.perf_counter() - began
            again += wrong
        return reports, stages, len(again)

    def _push(
        self, version: int, engines: Collection[int], *, delta: bool = False, keep: bool = False, compare: bool = False
    ) -> tuple[list[SendReport], dict[str, float], list[int]]:
        """Send and load, once more where it failed: what the trainer's ranks say, seconds by stage, engines retried."""
        reports, outcomes = self._attempt(version, engines, delta=delta, keep=keep, compare=compare)
        failed = {engine: outcome for engine, outcome in outcomes.items() if isinstance(outcome, Exception)}
        for engine, failure in failed.items():
            if self.sink.is_death(failure):
                self._replace(engine, failure)
        if failed:
            for engine in failed:
                self._connect(engine)
            _, again = self._attempt(version, failed.keys())
            for engine, outcome in again.items():
                if isinstance(outcome, Exception):
                    raise RefitError(f"refit {version}: engine {engine} failed twice: {outcome}") from failed[engine]
            outcomes = {**outcomes, **again}
        loaded = {engine: outcome for engine, outcome in outcomes.items() if isinstance(outcome, LoadReport)}
        self.connected |= {engine: one.direct for engine, one in loaded.items()}
        behind = [engine for engine in engines if engine not in loaded or loaded[engine].version != version]
        if behind or not loaded:
            raise RefitError(f"refit {version}: engines {behind} did not load it")
        stages = {stage: max(report.seconds[stage] for report in reports) for stage in reports[0].seconds}
        stages["load"] = max(one.seconds for one in loaded.values())
        stages["verify"] = max(one.verify_seconds for one in loaded.values())
        return reports, stages, list(failed)

    def _attempt(
        self, version: int, engines: Collection[int], *, delta: bool = False, keep: bool = False, compare: bool = False
    ) -> tuple[list[SendReport], Mapping[int, LoadReport | Exception]]:
        whole = self._whole(engines) if delta else frozenset()
        digests, finishing = self.verify != "off", False
        try:
            self.source.start_push(version, engines, whole, delta=delta, keep=keep, digests=digests)
            outcomes = self.sink.load(version, engines, digests, compare)
            for engine, outcome in outcomes.items():
                if isinstance(outcome, Exception):  # or the trainer would wait for one that hangs
                    self._disconnect(engine, answers=not self.sink.is_death(outcome))
            finishing = True
            reports = self.source.finish_push()
            broken = {engine: why for report in reports for (engine, _), why in report.failed.items()}
            for engine, why in broken.items():  # one of an engine's links stands for all
                logger.warning("refit %d: a link to engine %d broke: %s", version, engine, why)
            return reports, outcomes
        except BaseException:
            for engine in engines:  # their links may hold messages of this version
                self._disconnect(engine)
            if not finishing:
                with suppress(Exception):  # of ranks that have begun, whose links are closed now
                    self.source.finish_push()
            raise

    def _commit(self, version: int, engines: Collection[int]) -> int:
        """Engines that died since they loaded the version get it again; how many. All or none of them generate."""
        with self._all_or_none(engines):
            try:
                self.sink.commit(version, engines)
                return 0
            except Exception as failure:
                if not self.sink.is_death(failure):
                    raise
                death = failure
            lost = [engine for engine, held in self.sink.fence(engines).items() if held != version]
            for engine in lost:
                self._disconnect(engine)
                self._replace(engine, death)
                self._connect(engine)
            if lost:
                self._push_and_verify(version, lost)
            self.sink.commit(version, engines)  # again: one that holds the version may not have heard of it
            return len(lost)

    @contextmanager
    def _all_or_none(self, engines: Collection[int]) -> Iterator[None]:
        """Whatever ends the block, engines that have committed in it do not go on alone."""
        try:
            yield
        except BaseException:
            with suppress(Exception):  # that they cannot be told either is not what went wrong
                self.sink.fence(engines)
            raise

    def _whole(self, engines: Collection[int]) -> frozenset[str]:
        """Names of the tensors of which some engine takes no delta."""
        taken = frozenset.intersection(*(self.connected[engine] for engine in engines))
        return self.source.sources().names - taken

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._refitting.acquire(blocking=False):
            raise RefitError("a refit is under way already")
        try:
            yield
        finally:
            self._refitting.release()


class _EngineDied(Exception):
    def __init__(self, death: Exception) -> None:
        super().__init__(str(death))
        self.death = death
