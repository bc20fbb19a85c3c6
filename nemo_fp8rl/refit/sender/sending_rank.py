"""The refit of one rank that sends: its links to the engines, and the thread that sends while the engines load."""

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

import torch

from nemo_fp8rl.common.errors import single_line
from nemo_fp8rl.refit.interface import Transport
from nemo_fp8rl.refit.manifest import RefitError, Route
from nemo_fp8rl.refit.reports import LinkId, SendReport
from nemo_fp8rl.refit.sender.push import Link
from nemo_fp8rl.refit.transport.handshake import Listener
from nemo_fp8rl.refit.transport.in_process import in_process_link
from nemo_fp8rl.refit.transport.link import HOST, LinkError, SendingEnd

ENGINE_RANKS = 1024
"""The largest number of engine ranks that one trainer rank can wait for at the same time."""
Address = Any
"""The address of a link for an engine rank: [host, port, name], or the receiving end itself where
both sides share a process."""


class Sender(Protocol):
    """Reads a rank's weights and sends them: `WeightSender` in a trainer, `StoredSender` in an engine.

    owner: "trainer" or "engine", for error messages
    """

    owner: str

    @property
    def send(self) -> Callable[..., SendReport]:
        """Return the method that sends every link its pieces: (weights, version, {LinkId: Link}, options).

        A link that breaks is left out of the rest and reported.
        """


AnySender = TypeVar("AnySender", bound=Sender)


class SendingRank(Generic[AnySender]):
    """The links of one rank that sends to engines, and the push of a version through them.

    `offer` makes the links to an engine, `start` and `finish` are a push, `withdraw` closes the links to an engine.

    sender:  reads the weights of this rank and sends them
    host:    the address of this rank on the network from which engines may connect
    token:   the run's token, which both ends of a link prove to know
    timeout: seconds that a wait for an engine may last
    device:  the device of the weights
    """

    def __init__(
        self,
        sender: AnySender,
        *,
        transport: Transport,
        host: str,
        token: str,
        timeout: float,
        device: torch.device = HOST,
    ) -> None:
        self.sender = sender
        self.timeout, self.device = timeout, device
        self.listener = None if transport == "in_process" else Listener(transport, host, token, timeout, device)
        self.link_ends: dict[LinkId, Future[SendingEnd]] = {}
        self.routes: dict[LinkId, Route] = {}
        # an engine that never connects keeps one of these threads
        self.accept_threads = ThreadPoolExecutor(ENGINE_RANKS, "refit-accept")
        self.send_thread = ThreadPoolExecutor(1, "refit-send")
        self.push: Future[SendReport] | None = None
        self.offer_count = 0

    def offer(self, engine: int, routes: Sequence[Route], capacities: Sequence[int]) -> list[Address | None]:
        """Return the address of each engine rank's link; None for a rank that needs nothing of this one.

        routes:     the route to each rank of the engine
        capacities: bytes of each of the two buckets of each link
        """
        addresses: list[Address | None] = []
        for rank, (route, capacity) in enumerate(zip(routes, capacities, strict=True)):
            if not route:
                addresses.append(None)
                continue
            key = engine, rank
            self.routes[key] = route
            if self.listener is None:
                sending_end, receiving_end = in_process_link(capacity, self.timeout, self.device)
                self.link_ends[key] = Future()
                self.link_ends[key].set_result(sending_end)
                addresses.append(receiving_end)
            else:
                self.offer_count += 1
                name = f"{engine}.{rank}.{self.offer_count}"
                self.link_ends[key] = self.accept_threads.submit(self.listener.accept, name, capacity)
                addresses.append([*self.listener.address, name])
        return addresses

    def withdraw(self, engine: int) -> None:
        """Close the links to an engine."""
        for key in [key for key in self.link_ends if key[0] == engine]:
            self.link_ends.pop(key).add_done_callback(_close)
            del self.routes[key]

    def start(
        self,
        weights: Iterable[Any],
        version: int,
        engines: Collection[int],
        *,
        full_only: frozenset[str] = frozenset(),
        **options: Any,
    ) -> None:
        """Start to send a version to these engines, in a thread.

        weights:   as the sender takes them
        full_only: as in `Link`
        options:   the other arguments of the sender's `send`
        """
        assert self.push is None
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # the thread has a stream that waits for no other one
        link_ends = {key: (self.link_ends[key], route) for key, route in self.routes.items() if key[0] in engines}
        self.push = self.send_thread.submit(self._send, weights, version, link_ends, full_only, options)

    def finish(self) -> SendReport:
        """Wait until everything is sent. Raises RefitError on weights that must not be sent."""
        assert self.push is not None
        try:
            return self.push.result()
        finally:
            self.push = None

    def _send(
        self,
        weights: Iterable[Any],
        version: int,
        link_ends: dict[LinkId, tuple[Future[SendingEnd], Route]],
        full_only: frozenset[str],
        options: dict[str, Any],
    ) -> SendReport:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread, for kernels that ignore their tensors' device
        links, failed, has_links = dict[LinkId, Link](), dict[LinkId, str](), False
        try:
            for key, (end, route) in link_ends.items():
                try:
                    links[key] = Link(end.result(), route, full_only)
                except LinkError as error:  # the sink's end is closed as well
                    failed[key] = str(error)
            has_links = True
            report = self.sender.send(weights, version, links, **options)
        except BaseException as error:
            if not (has_links and isinstance(error, RefitError)):  # the engines have received no abort and would wait
                for end, _ in link_ends.values():
                    end.add_done_callback(_close)
            if isinstance(error, torch.OutOfMemoryError):
                raise RefitError(
                    f"refit {version}: the {self.sender.owner}'s memory is full ({single_line(error)[:300]}); lower "
                    "nemo_fp8rl.refit.bucket_bytes, or set nemo_fp8rl.refit.mode=full, which keeps no copy of what "
                    "was sent"
                ) from None
            raise
        finally:
            links.clear()
        report.failed |= failed
        return report

    def close(self) -> None:
        for engine in {key[0] for key in self.link_ends}:
            self.withdraw(engine)
        if self.listener is not None:
            self.listener.close()
        self.accept_threads.shutdown(wait=False)
        self.send_thread.shutdown(wait=False)


def _close(end: Future[SendingEnd]) -> None:
    if end.exception() is None:
        end.result().close()
