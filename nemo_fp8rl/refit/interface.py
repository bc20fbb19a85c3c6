"""The interface of a refit to its two sides: the trainer (`WeightSource`) and the engines (`WeightSink`).

`policy.rank_group` and `generation.engine_pool` implement it; `RefitBridge` calls it.

The driver takes its locks in this order, and never in another:

    1. RefitBridge._refitting    for a whole refit; a second refit is refused, it does not wait
    2. RefitBridge._recovering   for a whole refit, for one recovery, or while one engine joins or leaves
    3. MegatronPolicy.weights_lock   `WeightSource.hold_weights`; a training step takes it as well
    4. EnginePool.replacing      while an engine is started again, or the lives of the engines are compared
    5. EngineClient.counting     for counts of prompts; nothing is waited for

Under 1 to 3 a refit also waits, in `fence`, until the threads that read answers have finished; with updates in flight
it does not. So a thread that reads answers must not wait for lock 2: it reports a death with wait=False, and again with
wait=True after its answers.
RemoteEnginePool.first_version is taken alone.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

from nemo_fp8rl.refit.manifest import Sources, TensorPart
from nemo_fp8rl.refit.reports import LoadReport, SendReport
from nemo_fp8rl.refit.route_plan import Links
from nemo_fp8rl.refit.transport.link import TransportChoice

Transport = Literal["in_process"] | TransportChoice
Addresses = list[list[Any]]
"""[source][sink]: where a sink finds the source's end of a link; None where there is no link."""
Recover = Callable[[int, Exception, int, bool], bool]
"""`RefitBridge.recover`: (engine, death, life, wait) -> whether it is done."""


class WeightSource(Protocol):
    """The trainer's side of a refit."""

    def sources(self) -> Sources:
        """Return the parts that the trainer's ranks hold; the same in every call."""
        ...

    def hold_weights(self) -> AbstractContextManager[Any]:
        """Return a block in which weights keep value and place: a thread that would change them waits."""
        ...

    def updates(self) -> int:
        """Return a number that changes whenever the weights do."""
        ...

    def base_version(self) -> int:
        """Return the version whose bytes every rank keeps for a delta, or -1."""
        ...

    def make_room(self) -> None:
        """Give memory back for an engine that is started beside the trainer; a push takes it again."""
        ...

    def offer(self, engine: int, links: Links) -> Addresses:
        """Get ready for these links to an engine, and return their addresses."""
        ...

    def withdraw(self, engine: int) -> None: ...

    def start_push(self, version: int, engines: Collection[int], full_only: frozenset[str], **how: bool) -> None:
        """Begin to send a version.

        full_only:  names of the tensors of which no delta may be sent
        how:    the keywords of `WeightSender.send`
        """
        ...

    def finish_push(self) -> list[SendReport]:
        """Return one report per rank. Raises RefitError on weights that must not be sent."""
        ...


class WeightSink(Protocol):
    """The engines' side of a refit."""

    def report_deaths_to(self, recover: Recover) -> None:
        """Call `recover` for every engine that is found dead between refits."""
        ...

    def present_engines(self) -> list[int]:
        """Return the engines that take part in refits, in order. Fewer, where `replace` leaves a place empty."""
        ...

    def enter(self, engine: int) -> None:
        """Have an engine that was started beside the others take part in refits. It has prompts from its commit on."""
        ...

    def leave(self, engine: int) -> None:
        """Have an engine take part in nothing any more."""
        ...

    def stored_parts(self, engine: int) -> list[Sequence[TensorPart]]:
        """Return the parts that each rank of an engine stores."""
        ...

    def domains(self, engines: Collection[int]) -> dict[int, list[str]]:
        """Return the domain (see `Sources`) of each rank of these engines; dead engines are left out."""
        ...

    def connect(self, engine: int, links: Links, addresses: Addresses) -> None:
        """Have an engine's ranks take these links."""
        ...

    def disconnect(self, engine: int) -> None: ...

    def fence(self, engines: Collection[int]) -> dict[int, int]:
        """Have engines refuse to generate until a commit, or with updates in flight have answers wait for it.

        Return the version in the memory of each, -1 without one.
        """
        ...

    def load(
        self, version: int, engines: Collection[int], verify: bool, compare: bool, with_frozen: bool
    ) -> Mapping[int, LoadReport | Exception]:
        """Have engines load what is sent. Return the report, or the failure, of each engine.

        Nothing but this call changes what an engine has in memory; from its beginning `fence` returns -1 for it.

        verify:   compare the digest of every piece with the trainer's
        compare:  write nothing, compare what arrives with the engine's memory
        with_frozen: tensors that the trainer never changes come as well
        """
        ...

    def offer(self, source: int, engine: int, links: Links, transport: Transport) -> Addresses:
        """Have an engine get ready for links to another engine, which `connect` takes; return their addresses."""
        ...

    def withdraw(self, source: int, engine: int) -> None: ...

    def start_push(self, source: int, version: int, engines: Collection[int], **how: bool) -> None:
        """Have an engine send the version in its memory to other engines, with the trainer's digests.

        how:     delta: the engines have the version before, so they may get the deltas that came from the trainer;
                 direct and with_frozen, as in `WeightSender.send`
        Raises:  RefitError where it has another version, or keeps a tensor in a form that it cannot pass on
        """
        ...

    def finish_push(self, source: int) -> list[SendReport]: ...

    def replace(self, engine: int, death: Exception, life: int | None = None) -> bool:
        """Start a dead engine again, without weights. Return False where another thread has done so since that life.

        Where enough other engines have prompts, its place is left empty instead, and the engine is no longer present.

        life:    the life in which the engine was reported dead; prompts then avoid the engine until `readmit`. None:
                 the life that the last `fence` saw
        Raises:  UserError where engines have been started again too often
        """
        ...

    def readmit(self, engine: int) -> None:
        """Let a replaced engine have prompts again."""
        ...

    def is_death(self, outcome: Exception) -> bool:
        """True for an exception that means that an engine is gone."""
        ...

    def commit(self, version: int, engines: Collection[int]) -> None: ...
