"""Moves versions of the weights from the trainer to every engine: link, send and load at once, verify, commit.

A version is *sent* when the trainer's ranks begin. An engine has *loaded* it when every byte is in the engine's memory
and verified, and the prefix cache is empty. A version is *committed* when every engine has loaded it. An engine
generates only from a committed version. From the first byte of the next version until its commit, the engine is
*fenced*: it refuses to generate. With updates in flight (`Config.updates_in_flight`) it is *paused* instead: answers in
progress, and new ones, wait for the commit and go on from the new weights. A refit that fails leaves them waiting, for
the next one or for the end of the run.

What fails, and what then happens:

    an engine dies or does not answer             it is started again and gets the whole version
    a link to an engine breaks                    the link is made again, and the engine gets the whole version
    a message is lost, damaged or repeated        the same
    any of these happens twice in one refit       RefitError; engines stay fenced, the version is not committed
    a weight is not finite                        RefitError that names it; engines stay fenced, not committed
    the trainer wants to take a step              the step waits until the weights are sent
    the trainer dies or does not answer           its links break; engines that had begun to load stay fenced
    any failure before engines begin to load      engines go on from the last version, as they do between refits
    an engine is found dead between two refits    `recover`: it is started again and gets the committed version from
                                                  the trainer, or, where its weights have moved on, from an engine
                                                  that can give it; else it stays fenced until the next refit
    an engine that gives a version dies           another one gives it to an engine that catches up; in a refit, the
                                                  trainer sends it to the engines that lack it
    an engine dies, and enough others remain      its place is empty (`WeightSink.replace`), the others go on

Engines join and leave between refits (`admit`, `release`); one that joins is brought to the version as in `recover`.
What engines give to each other, and when, is in `driver.peers`.

The engine pool only reports a dead engine (`WeightSink.report_deaths_to`); this bridge alone recovers it.
The locks of the driver and their order are in `refit.interface`.
"""

import logging
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from nemo_fp8rl.refit.driver.engine_links import EngineLinks
from nemo_fp8rl.refit.driver.full_or_delta import Mode, ModeChoice
from nemo_fp8rl.refit.driver.peers import Verify
from nemo_fp8rl.refit.interface import Transport, WeightSink, WeightSource
from nemo_fp8rl.refit.manifest import RefitError
from nemo_fp8rl.refit.reports import LoadReport, RefitReport, SendReport

logger = logging.getLogger(__name__)


class RefitBridge:
    """Sends each version of the trainer's weights to every engine, and commits a version once all engines verified it.

    mode:           whole versions, deltas, or the faster of both
    verify:         digest: of every piece, as it lies in an engine's memory; full: the same, and then the version is
                    sent once more and compared byte by byte
    bucket_bytes:   bytes of all buckets of a process's links, each twice
    first_version:  the number of the first version

    version:        the last version that every engine committed; first_version - 1 before the first commit
    links:          the links of the engines
    """

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
        self.transport, self.verify = transport, verify
        self.version = first_version - 1
        self.sent_updates = -1
        self.links = EngineLinks(source, sink, transport, bucket_bytes)
        self._refitting = threading.Lock()
        self._recovering = threading.Lock()
        sink.report_deaths_to(self.recover)

    @property
    def description(self) -> str:
        return f"{self.choice.mode} through {self._transport_name()}, verify {self.verify}"

    def _transport_name(self) -> str:
        direct = ", direct" if self.choice.mode != "delta" else ""  # a delta needs the bytes that it changes
        if self.transport != "nearest":
            return self.transport + (direct if self.transport not in ("collective", "nixl") else "")
        domains = self.sink.domains(self.sink.present_engines())
        machines = len({*self.source.sources().domains}.union(*domains.values()))
        if machines == 1:
            return f"mapped memory{direct}"
        return f"mapped memory within a machine{direct}, gloo between the {machines}"

    def refit(self) -> RefitReport:
        """Bring every engine to the trainer's present weights. Raises RefitError unless all engines committed."""
        with self._exclusive(), self._recovering, self.source.hold_weights(), self._unfenced_if_untouched():
            version, start = self.version + 1, time.perf_counter()
            engines = self.sink.present_engines()
            if not engines:
                raise RefitError(f"refit {version}: there is no engine")
            self.sent_updates = -1
            stored = self.sink.fence(engines)
            fence_seconds = time.perf_counter() - start  # other threads' answers, for which the fence waits
            # no link has to be made, no memory is mapped, and no engine uses vLLM's loaders for all tensors
            is_routine = not self.links.stale and all(self.links.direct_names.get(engine) for engine in engines)
            self.links.link(engines)
            engines = self.links.present(engines)
            stored_versions = {stored[engine] for engine in engines}
            delta = self.choice.wants_delta and stored_versions == {self.source.base_version()} != {-1}
            has_frozen = self.links.engines_with_frozen.issuperset(engines) and -1 not in stored_versions
            how = {"delta": delta, "keep": self.choice.wants_base, "with_frozen": not has_frozen}
            reports, stages, retries = self._push_and_verify(version, engines, **how)
            retries += self._commit(version, engines)
            self.version, self.sent_updates = version, self.source.updates()
            seconds = time.perf_counter() - start
            if is_routine and not retries and not any(report.has_mapped for report in reports):
                self.choice.record(delta, seconds - fence_seconds)
            bf16 = sum(report.quantized_bf16_nbytes for report in reports)
            return RefitReport(
                version=version,
                nbytes=(nbytes := sum(report.nbytes for report in reports)) // len(engines),
                direct=sum(report.direct_nbytes for report in reports) / max(1, nbytes),
                delta=delta,
                wire_over_bf16=sum(report.quantized_nbytes for report in reports) / bf16 if bf16 else 1.0,
                base_nbytes=max(report.base_nbytes for report in reports),
                bucket_nbytes=self.links.bucket_nbytes(),
                between_machines=sum(self.links.wire_shares[engine] for engine in engines) / len(engines),
                retries=retries,
                seconds=seconds,
                stages=stages,
            )

    def recover(self, engine: int, death: Exception, life: int, wait: bool) -> bool:
        """Start an engine again that was found dead between refits, and bring it to the committed version.

        Where no version is committed yet, or the trainer's weights have moved on from it, the engine stays fenced
        until a refit. Nothing happens where the engine has been started again since that life.

        life:  the life in which the engine died, as the sink counts them
        wait:  wait for the end of a refit in progress, which replaces dead engines itself; else return False
        """
        if not self._recovering.acquire(blocking=wait):
            return False
        try:
            self.source.make_room()
            if self.sink.replace(engine, death, life):
                self.links.forget(engine)
                try:
                    self._catch_up(engine)
                finally:
                    self.sink.readmit(engine)
            return True
        finally:
            self._recovering.release()

    def admit(self, engine: int) -> None:
        """Take an engine that was started beside the others, without weights, into refits.

        It gets the committed version now, or at the next refit, and prompts from then on. Where this fails, release it.
        """
        with self._recovering:
            self.sink.enter(engine)
            self._catch_up(engine)
            with self.source.hold_weights():  # so that no refit makes all others wait for the links of this one
                self.links.connect(engine)

    def release(self, engine: int) -> None:
        """Take an engine out of refits and close its links."""
        with self._recovering:
            self.sink.leave(engine)
            self.links.forget(engine)

    def _catch_up(self, engine: int) -> None:
        if not self.links.present([engine]):
            return
        if self.source.updates() == self.sent_updates:  # else a step may be under way, which this would wait for
            with self.source.hold_weights():
                if self.source.updates() == self.sent_updates:
                    self.links.disconnect(engine)
                    self.links.connect(engine)
                    self._push_and_verify(self.version, [engine])
                    self._commit(self.version, [engine])
                    return
        if self.sent_updates >= 0:  # since then every engine has generated from the version
            self.links.find_domains(engine)
            peers, replace = self.links.peers, self.links.replace
            peers.catch_up(engine, self.version, self.links.domains, verify=self.verify, replace=replace)

    def _push_and_verify(
        self, version: int, engines: Collection[int], *, keep: bool = False, **how: bool
    ) -> tuple[list[SendReport], dict[str, float], int]:
        """Send and load; with `verify: full` compare as well, also what was sent a second time.

        Return the reports of the trainer's ranks, seconds by stage, and the number of retries.
        """
        reports, stages, retried = self._push(version, engines, keep=keep, **how)
        if self.verify == "full":
            start = time.perf_counter()
            again = how | {"delta": False, "compare": True}
            wrong = self._push(version, engines, keep=keep, **again)[2]
            if wrong and self._push(version, wrong, keep=keep, compare=True)[2]:
                raise RefitError(f"refit {version}: engines {wrong} do not hold what was sent to them, twice")
            stages["compare"] = time.perf_counter() - start
            retried += wrong
        return reports, stages, len(retried)

    def _push(
        self, version: int, engines: Collection[int], **how: bool
    ) -> tuple[list[SendReport], dict[str, float], list[int]]:
        """Send and load, a second time where that failed.

        Return the reports of the ranks that sent, seconds by stage, and the engines that had to be retried.
        """
        if not (engines := self.links.present(engines)):  # of one that died as it took its version
            return [], {}, []
        full_only = self.links.names_without_delta(engines) if how.get("delta") else frozenset[str]()
        peers = self.links.peers
        followers = [engine for engine in engines if engine in peers.links]
        reports, outcomes = self._attempt(version, [i for i in engines if i not in followers], full_only, **how)
        stages = {stage: max(report.seconds[stage] for report in reports) for stage in reports[0].seconds}
        retried = self._retry(version, outcomes, [])
        loaded = self.links.record(outcomes)
        if followers := self.links.present(followers):
            start = time.perf_counter()
            for engine in followers:  # again, where a leader was started again
                self.links.connect(engine, peers.leaders[engine])
            passed, outcomes = peers.pass_on(version, followers, digests=self.verify != "off", **how)
            stages["pass_on"] = time.perf_counter() - start
            retried += self._retry(version, outcomes, retried)
            loaded |= self.links.record(outcomes)
            reports = [*reports, *passed]
        engines = self.links.present(engines)
        behind = [engine for engine in engines if engine not in loaded or loaded[engine].version != version]
        if behind:
            raise RefitError(f"refit {version}: engines {behind} did not load it")
        stages["load"] = max((report.seconds for report in loaded.values()), default=0.0)
        stages["verify"] = max((report.verify_seconds for report in loaded.values()), default=0.0)
        return reports, stages, retried

    def _retry(self, version: int, outcomes: dict[int, LoadReport | Exception], earlier: Collection[int]) -> list[int]:
        """Have the trainer send the whole version to engines that failed; return them, and change their outcomes.

        earlier: engines that have failed before in this push
        """
        failed = {engine: outcome for engine, outcome in outcomes.items() if isinstance(outcome, Exception)}
        for engine, failure in failed.items():
            if engine in earlier:
                raise RefitError(f"refit {version}: engine {engine} failed twice: {failure}")
            self.links.disconnect(engine, is_alive=not self.sink.is_death(failure))
            if self.sink.is_death(failure):
                self.links.replace(engine, failure)
        for engine in failed:
            self.links.connect(engine)
        again = self.links.present(failed)
        if again:
            _, second_outcomes = self._attempt(version, again)
            for engine, outcome in second_outcomes.items():
                if isinstance(outcome, Exception):
                    raise RefitError(f"refit {version}: engine {engine} failed twice: {outcome}") from failed[engine]
            outcomes |= second_outcomes
        return again

    def _attempt(
        self,
        version: int,
        engines: Collection[int],
        full_only: frozenset[str] = frozenset(),
        *,
        delta: bool = False,
        keep: bool = False,
        compare: bool = False,
        with_frozen: bool = True,
    ) -> tuple[list[SendReport], dict[int, LoadReport | Exception]]:
        """Have the trainer send a version to these engines, which are linked to it.

        full_only: names of the tensors of which no delta may be sent
        """
        digests, finishing = self.verify != "off", False
        try:
            options = {"delta": delta, "keep": keep, "digests": digests, "with_frozen": with_frozen}
            options["direct"] = not delta and not compare  # a source compares with nothing, it would overwrite
            self.source.start_push(version, engines, full_only, **options)
            outcomes = dict(self.sink.load(version, engines, digests, compare, with_frozen))
            for engine, outcome in outcomes.items():
                if isinstance(outcome, Exception):  # or the trainer would wait for an engine that hangs
                    self.links.disconnect(engine, is_alive=not self.sink.is_death(outcome))
            finishing = True
            reports = self.source.finish_push()
            broken = {engine: why for report in reports for (engine, _), why in report.failed.items()}
            for engine, why in broken.items():  # one of an engine's links stands for all
                logger.warning("refit %d: a link to engine %d broke: %s", version, engine, why)
            return reports, outcomes
        except BaseException:
            for engine in engines:  # their links may hold messages of this version
                with suppress(Exception):  # where the trainer is dead, each engine closes its own end all the same
                    self.links.disconnect(engine)
            if not finishing:
                with suppress(Exception):  # some ranks may have begun to send; their links are closed now
                    self.source.finish_push()
            raise

    def _commit(self, version: int, engines: Collection[int]) -> int:
        """Commit. An engine that died since it loaded the version gets it again; return how many did.

        Afterwards all of the engines generate, or none.
        """
        if not (engines := self.links.present(engines)):
            return 0
        with self._all_or_none(engines):
            try:
                self.sink.commit(version, engines)
                return 0
            except Exception as failure:
                if not self.sink.is_death(failure):
                    raise
                death = failure
            lost = [engine for engine, stored in self.sink.fence(engines).items() if stored != version]
            for engine in lost:
                self.links.disconnect(engine)
                self.links.replace(engine, death)
                self.links.connect(engine)
            self._push_and_verify(version, lost)
            engines = self.links.present(engines)
            self.sink.commit(version, engines)  # again: an engine that has the version may not have got the first call
            return len(lost)

    @contextmanager
    def _all_or_none(self, engines: Collection[int]) -> Iterator[None]:
        """Fence all engines where the block fails, so that those which have committed do not generate alone."""
        try:
            yield
        except BaseException:
            with suppress(Exception):  # a fence that fails as well would hide the cause
                self.sink.fence(engines)
            raise

    @contextmanager
    def _unfenced_if_untouched(self) -> Iterator[None]:
        """Let engines generate from the last version again where the block fails and has not begun to change them."""
        try:
            yield
        except Exception:
            with suppress(Exception):
                stored = self.sink.fence(self.sink.present_engines())
                self.sink.commit(self.version, [e for e, version in stored.items() if version == self.version >= 0])
            raise

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._refitting.acquire(blocking=False):
            raise RefitError("a refit is under way already")
        try:
            yield
        finally:
            self._refitting.release()
