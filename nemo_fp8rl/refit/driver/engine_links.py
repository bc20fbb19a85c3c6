"""The links of every engine, to the trainer or to the leader of its machine: planned, made, closed and made again."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from nemo_fp8rl.refit.driver.peers import Peers
from nemo_fp8rl.refit.interface import Transport, WeightSink, WeightSource
from nemo_fp8rl.refit.manifest import cross_domain_share
from nemo_fp8rl.refit.reports import LoadReport
from nemo_fp8rl.refit.route_plan import Links, bucket_memory, plan


class EngineLinks:
    """The driver's knowledge of each engine and its links.

    bucket_bytes:   bytes of all buckets of a process's links, each twice

    direct_names:   by linked engine, names of the tensors that it writes in place, and so can take deltas of
    engines_with_frozen: engines that have the tensors that never change, as long as they have a version at all
    domains:        of the ranks of each engine, as far as known
    wire_shares:    by engine, the share of its bytes that leaves the machine on which they were
    to_trainer:     by engine that is linked to the trainer, the links
    peers:          the engines as sources for other engines
    stale:          engines that were started again or left, whose links the trainer has still to close
    """

    def __init__(self, source: WeightSource, sink: WeightSink, transport: Transport, bucket_bytes: int) -> None:
        self.source, self.sink, self.bucket_bytes = source, sink, bucket_bytes
        self.direct_names: dict[int, frozenset[str]] = {}
        self.engines_with_frozen = set[int]()
        self.domains: dict[int, list[str]] = {}
        self.wire_shares: dict[int, float] = {}
        self.to_trainer: dict[int, Links] = {}
        self.peers = Peers(sink, transport, bucket_bytes)
        self.stale = set[int]()

    def present(self, engines: Collection[int]) -> list[int]:
        """Return those of the engines that take part in refits."""
        present = self.sink.present_engines()
        return [engine for engine in engines if engine in present]

    def link(self, engines: Collection[int]) -> None:
        """Link every engine to the trainer, or to the leader of its machine. Engines may be dead."""
        changed, leaders = self.peers.assign_leaders(engines, self.domains, self.source.sources().domains)
        unlinked = self.stale | changed
        for engine in unlinked:
            self.disconnect(engine, is_alive=engine in engines)
        self.engines_with_frozen |= unlinked & self.peers.reports.keys()
        self.stale.clear()
        for engine in sorted(engines, key=leaders.__contains__):
            self.connect(engine, leaders.get(engine))

    def connect(self, engine: int, leader: int | None = None) -> None:
        """Link an engine to its leader, or else to the trainer.

        An engine that is found dead is started again, or is no longer present.
        """
        while engine not in self.direct_names and self.present([engine]):
            sources = self.source.sources()
            try:
                if leader is not None:
                    with self._deaths_as_engine_died():
                        is_linked = self.peers.connect(leader, engine)
                    leader = None
                    if is_linked:
                        self.direct_names[engine], self.wire_shares[engine] = self.peers.direct_names(engine), 0.0
                        self.stale.discard(engine)
                    continue
                with self._deaths_as_engine_died():
                    stored = self.sink.stored_parts(engine)
                domains = self.find_domains(engine)
                if not domains[engine]:
                    continue
                links = plan(sources, stored, self.bucket_bytes, engine, domains)
                self.wire_shares[engine] = cross_domain_share(links.routes, sources.domains, domains[engine])
                self.to_trainer[engine] = links
                addresses = self.source.offer(engine, links)
                self.direct_names[engine] = self.peers.direct_names(engine)
                with self._deaths_as_engine_died():
                    self.sink.connect(engine, links, addresses)
                self.stale.discard(engine)
            except _EngineDied as died:
                self.disconnect(engine)
                self.replace(engine, died.death)
            except BaseException:
                self.disconnect(engine)
                raise

    def replace(self, engine: int, death: Exception) -> bool:
        """Start an engine again that was found dead; return False where its place is left empty instead."""
        self.source.make_room()
        self.sink.replace(engine, death)
        self.forget(engine)
        return bool(self.present([engine]))

    def forget(self, engine: int) -> None:
        """Forget an engine's process, which has ended, and close the links of its followers.

        The trainer's end of its links is closed when links are next made: the trainer may be at a step now.
        """
        self.stale.add(engine)
        self.domains.pop(engine, None)
        for follower in self.peers.forget(engine):
            self.disconnect(follower)

    def find_domains(self, engine: int) -> list[list[str]]:
        """Return, by number, the domains of the engines to which the trainer sends, this one among them.

        An engine that may be busy is asked only until it has answered once.
        """
        engines = self.sink.present_engines()
        self.domains.pop(engine, None)
        self.domains |= self.sink.domains([other for other in engines if other not in self.domains])
        left_out = self.peers.leaders.keys() - {engine}
        return [self.domains.get(i, []) if i not in left_out else [] for i in range(max(engines) + 1)]

    def disconnect(self, engine: int, is_alive: bool = True) -> None:
        """Close both ends of an engine's links, if it has any."""
        self.engines_with_frozen.discard(engine)
        if self.direct_names.pop(engine, None) is not None:
            try:
                self.peers.withdraw(engine)
                if self.to_trainer.pop(engine, None) is not None:
                    self.source.withdraw(engine)
            finally:
                if is_alive and self.present([engine]):  # else another one may be starting in its place
                    self.sink.disconnect(engine)

    def record(self, outcomes: dict[int, LoadReport | Exception]) -> dict[int, LoadReport]:
        """Note what engines have loaded, and return the reports."""
        loaded = {engine: outcome for engine, outcome in outcomes.items() if isinstance(outcome, LoadReport)}
        self.direct_names |= {i: report.direct_names for i, report in loaded.items() if i in self.direct_names}
        self.engines_with_frozen |= loaded.keys()
        self.peers.record(loaded, self.to_trainer)
        return loaded

    def names_without_delta(self, engines: Collection[int]) -> frozenset[str]:
        """Return the names of the tensors of which some engine takes no delta."""
        deltas = frozenset.intersection(*(self.direct_names.get(engine, frozenset()) for engine in engines))
        return self.source.sources().names - deltas

    def bucket_nbytes(self) -> int:
        """Return the bytes of the buckets of all links of a process: of the process that has most."""
        to_trainer = bucket_memory([links.capacities for links in self.to_trainer.values()])
        return max(to_trainer, self.peers.bucket_memory(self.to_trainer))

    @contextmanager
    def _deaths_as_engine_died(self) -> Iterator[None]:
        """Raise an engine's death as _EngineDied: `is_death` may not tell it from the death of a trainer's rank."""
        try:
            yield
        except Exception as error:
            raise (_EngineDied(error) if self.sink.is_death(error) else error) from None


class _EngineDied(Exception):
    def __init__(self, death: Exception) -> None:
        super().__init__(str(death))
        self.death = death
