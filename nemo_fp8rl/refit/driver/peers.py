"""Engines as sources of a version: for an engine that joins, and for the other engines of a machine.

An engine passes on the bytes in its memory, rank to rank, in the pieces in which they came, with the trainer's digests
of these pieces. It generates meanwhile, where it may: its weights are only read.

Where several engines share a machine without a trainer rank, one of them, the leader, gets each version from the
trainer and the others, its followers, from the leader: then every byte crosses the network once. The leader passes on
what it has loaded and verified, and a delta as it came, which costs the leader no work. A machine's first version
comes from the trainer alone, because only then it is known whether the engines can pass all of it on. An engine that
keeps a tensor in another form than it came is no source.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Literal

from nemo_fp8rl.refit.interface import Transport, WeightSink
from nemo_fp8rl.refit.manifest import RefitError, Route
from nemo_fp8rl.refit.reports import LoadReport, SendReport
from nemo_fp8rl.refit.route_plan import Links, link_capacity
from nemo_fp8rl.refit.transport.link import BUFFERS

logger = logging.getLogger(__name__)

Verify = Literal["off", "digest", "full"]
Outcomes = dict[int, LoadReport | Exception]


class Peers:
    """The engines that can give what they loaded to others.

    routes:   by engine, the pieces in which each of its ranks got what it has
    reports:  by engine, of its last load
    leaders:  by follower, its leader
    links:    by engine that is linked to another one: (the other one, the links)
    """

    def __init__(self, sink: WeightSink, transport: Transport, bucket_bytes: int) -> None:
        self.sink, self.transport, self.bucket_bytes = sink, transport, bucket_bytes
        self.routes: dict[int, list[Route]] = {}
        self.reports: dict[int, LoadReport] = {}
        self.leaders: dict[int, int] = {}
        self.links: dict[int, tuple[int, Links]] = {}

    def record(self, reports: Mapping[int, LoadReport], links: Mapping[int, Links]) -> None:
        """Note what engines have loaded. links: by engine, those to the trainer."""
        for engine, report in reports.items():
            self.reports[engine] = report
            incoming = self.links[engine][1] if engine in self.links else links.get(engine)
            if incoming is not None:  # else it is linked to nothing any more, and `pass_on` has noted its pieces
                self.routes[engine] = _into_ranks(incoming)

    def forget(self, engine: int) -> list[int]:
        """Forget an engine whose process has ended; return the engines that were linked to it."""
        self.routes.pop(engine, None)
        self.reports.pop(engine, None)
        return [follower for follower, (source, _) in self.links.items() if source == engine]

    def direct_names(self, engine: int) -> frozenset[str]:
        """Return the names of the tensors that the engine writes in place, as far as its loads have shown."""
        return self.reports[engine].direct_names if engine in self.reports else frozenset()

    def reason_against(self, engine: int) -> str:
        """Return the reason why the engine cannot give all that it has, or ""."""
        if engine not in self.reports:
            return "it has no version"
        if names := self.reports[engine].repacked_names:
            return f"it keeps {min(names)} in a form of its own"
        return ""

    def assign_leaders(
        self, engines: Collection[int], domains: Mapping[int, Sequence[str]], trainer: Collection[str]
    ) -> tuple[set[int], dict[int, int]]:
        """Choose the leaders of the engines that share a machine without a rank of the trainer.

        Return (engines whose links must be made again, {follower: leader}).

        domains: of each engine's ranks; an engine with several stays alone
        trainer: the domains of the trainer's ranks
        """
        machines: dict[str, list[int]] = {}
        for engine in engines:
            names = {*domains.get(engine, ())}
            if len(names) == 1 and not names & {*trainer}:
                machines.setdefault(min(names), []).append(engine)
        leaders: dict[int, int] = {}
        for members in machines.values():
            candidates = [engine for engine in members if not self.reason_against(engine)]
            leader = min(candidates, key=lambda engine: engine not in self.leaders.values(), default=None)
            if leader is not None:
                leaders |= {engine: leader for engine in members if engine != leader}
        are_leading, self.leaders = {*self.leaders.values()}, leaders
        linked = {engine: source for engine, (source, _) in self.links.items()}
        changed = {engine for engine in engines if linked.get(engine) != leaders.get(engine)}
        return changed | (are_leading ^ {*leaders.values()}), leaders

    def connect(self, source: int, engine: int) -> bool:
        """Link an engine to another one, rank to rank; return False, and log the reason, where that cannot be.

        Raises: what the sink raises where the engine died
        """
        if reason := self.reason_against(source):
            logger.warning("engine %d cannot be linked to engine %d: %s", engine, source, reason)
            return False
        routes = self.routes[source]
        ranks = range(len(routes))
        share = self.bucket_bytes // (2 * max(1, list(self.leaders.values()).count(source)))
        capacities = [link_capacity(route, share) for route in routes]
        links = Links(
            [[routes[i] if i == j else () for j in ranks] for i in ranks],
            [[capacities[i] if i == j else 0 for j in ranks] for i in ranks],
        )
        self.links[engine] = source, links
        is_offered = False
        try:
            addresses = self.sink.offer(source, engine, links, self.transport)
            is_offered = True
            self.sink.connect(engine, links, addresses)
            return True
        except Exception as error:
            self.withdraw(engine)
            is_of_source = not is_offered and self.sink.is_death(error)
            if not is_of_source and not isinstance(error, RefitError):
                raise
            logger.warning("engine %d cannot be linked to engine %d: %s", engine, source, error)
            return False

    def withdraw(self, engine: int) -> None:
        """Close the source's end of an engine's links to another one, if it has any."""
        if engine in self.links:
            source, _ = self.links.pop(engine)
            self.sink.withdraw(source, engine)

    def pass_on(
        self,
        version: int,
        engines: Collection[int],
        *,
        digests: bool,
        delta: bool = False,
        compare: bool = False,
        with_frozen: bool = True,
        keep: bool = False,
    ) -> tuple[list[SendReport], Outcomes]:
        """Have the sources to which these engines are linked send them a version; `keep` concerns the trainer alone.

        Return the reports of the sources' ranks, and the outcome of each engine, and of a source that died.

        delta:    the engines have the version before this one
        digests, compare, with_frozen: as in `WeightSink.load`
        """
        followers: dict[int, list[int]] = {}
        outcomes: Outcomes = {}
        how = {"delta": delta, "direct": not delta and not compare, "with_frozen": with_frozen}
        for engine in engines:
            if engine in self.links:
                followers.setdefault(self.links[engine][0], []).append(engine)
            else:
                outcomes[engine] = RefitError(f"refit {version}: its leader was started again")
        reports: list[SendReport] = []
        started = []
        for source, some in followers.items():
            try:
                self.sink.start_push(source, version, some, **how)
                started.append(source)
            except Exception as error:
                self._note_failure(source, some, error, outcomes)
        loading = [engine for source in started for engine in followers[source]]
        if loading:
            outcomes |= self.sink.load(version, loading, digests, compare, with_frozen)
        self.record({i: outcome for i, outcome in outcomes.items() if isinstance(outcome, LoadReport)}, {})
        for engine in loading:
            if isinstance(outcomes[engine], Exception):  # or its source would wait for an engine that hangs
                self.withdraw(engine)
        for source in started:
            try:
                sent = self.sink.finish_push(source)
            except Exception as error:
                self._note_failure(source, [], error, outcomes)
                continue
            reports += sent
            for (engine, _), why in chain(*(report.failed.items() for report in sent)):
                logger.warning("refit %d: a link from engine %d to engine %d broke: %s", version, source, engine, why)
        return reports, outcomes

    def _note_failure(self, source: int, engines: Collection[int], error: Exception, outcomes: Outcomes) -> None:
        if self.sink.is_death(error):
            outcomes[source] = error
        elif not isinstance(error, RefitError):
            raise error
        outcomes |= {engine: RefitError(f"engine {source} did not pass it on: {error}") for engine in engines}

    def catch_up(
        self,
        engine: int,
        version: int,
        domains: Mapping[int, Sequence[str]],
        *,
        verify: Verify,
        replace: Callable[[int, Exception], bool],
    ) -> bool:
        """Bring an engine without a version to the committed one, from another engine, and commit it.

        Return False where no engine could give it. The log says which did, and why others could not.

        domains: of each engine; engines on the machine of this one come first
        replace: starts this engine again where it dies; False: it leaves. A second death is raised
        """
        machine, deaths = domains.get(engine, ()), 0
        sources = [source for source, report in self.reports.items() if report.version == version and source != engine]
        sources.sort(key=lambda source: (domains.get(source, ()) != machine, source))
        while sources:
            source = sources[0]
            try:
                reason = self.reason_against(source) or self._give(source, engine, version, verify)
                if not reason:
                    self.sink.commit(version, [engine])
            except Exception as death:
                deaths += 1
                if deaths > 1 or not self.sink.is_death(death):
                    raise
                if not replace(engine, death):
                    return False
                continue
            how = "got" if not reason else f"could not get ({reason})"
            logger.warning("engine %d %s version %d from engine %d", engine, how, version, source)
            if not reason:
                return True
            sources.pop(0)
        return False

    def _give(self, source: int, engine: int, version: int, verify: Verify) -> str:
        """Send a version from one engine to another; return "", or the reason why that failed."""
        try:
            if not self.connect(source, engine):
                return "no link"
            for compares in (False, True) if verify == "full" else (False,):
                outcomes = self.pass_on(version, [engine], digests=verify != "off", compare=compares)[1]
                outcome = outcomes[engine]
                if isinstance(outcome, Exception):
                    if self.sink.is_death(outcome):
                        raise outcome
                    return str(outcomes.get(source, outcome))
            return ""
        finally:
            self.withdraw(engine)
            self.sink.disconnect(engine)

    def bucket_memory(self, to_trainer: Mapping[int, Links]) -> int:
        """Return the bytes of the buckets of all links of an engine's rank: of the rank that has most.

        to_trainer: by engine, its links to the trainer
        """
        totals = []
        for leader in {source for source, _ in self.links.values()}:
            given = [links.capacities for source, links in self.links.values() if source == leader]
            ranks = range(len(given[0]))
            taken = to_trainer[leader].capacities if leader in to_trainer else []
            totals += [sum(row[rank] for row in taken) + sum(sum(c[rank]) for c in given) for rank in ranks]
        return BUFFERS * max(totals, default=0)


def _into_ranks(links: Links) -> list[Route]:
    """Return the pieces of each rank of an engine."""
    return [tuple(chain(*column)) for column in zip(*links.routes, strict=True)]
