"""A trainer rank's end of the refit: its links to the engines, and the thread that sends while they load."""

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.common.errors import one_line
from nemo_fp8rl.fp8 import BlockScaled, ScaleFormat
from nemo_fp8rl.refit.bridge import Transport
from nemo_fp8rl.refit.manifest import RefitError, Route, TensorPart
from nemo_fp8rl.refit.reports import LinkId, SendReport
from nemo_fp8rl.refit.sender.weight_sender import Link, WeightSender
from nemo_fp8rl.refit.transport.handshake import Listener
from nemo_fp8rl.refit.transport.in_process import in_process_link
from nemo_fp8rl.refit.transport.link import HOST, LinkError, SendingEnd

ENGINE_RANKS = 1024
"""Ranks of engines that may be waited for at once."""
Address = Any
"""What an engine rank dials: numbers and texts, or the end itself where both sides share a process."""


class SendingRank:
    """`offer` links to an engine, `start` sending it a version, `finish`; `withdraw` the links of one that failed.

    host: of this rank, on the interface where engines may call. device: of its weights.
    """

    def __init__(
        self,
        parts: Sequence[TensorPart],
        scale_format: ScaleFormat,
        *,
        transport: Transport,
        host: str,
        token: str,
        timeout: float,
        device: torch.device = HOST,
    ) -> None:
        self.sender = WeightSender(parts, scale_format)
        self.timeout, self.device = timeout, device
        self.post = None if transport == "in_process" else Listener(transport, host, token, timeout, device)
        self.ends: dict[tuple[int, int], Future[SendingEnd]] = {}
        self.routes: dict[tuple[int, int], Route] = {}
        self.accepting = ThreadPoolExecutor(ENGINE_RANKS, "refit-accept")  # one that never calls keeps a thread
        self.thread = ThreadPoolExecutor(1, "refit-send")
        self.sending: Future[SendReport] | None = None
        self.offers = 0

    @property
    def base_version(self) -> int:
        return self.sender.base_version

    def offer(self, engine: int, routes: Sequence[Route], capacities: Sequence[int]) -> list[Address | None]:
        """Addresses where each rank of the engine finds its link; None for one that needs nothing of this rank.
        capacities: bytes of each of a link's two buckets.
        """
        addresses: list[Address | None] = []
        for rank, (route, capacity) in enumerate(zip(routes, capacities, strict=True)):
            if not route:
                addresses.append(None)
                continue
            key = engine, rank
            self.routes[key] = route
            if self.post is None:
                sending, receiving = in_process_link(capacity, self.timeout, self.device)
                self.ends[key] = Future()
                self.ends[key].set_result(sending)
                addresses.append(receiving)
            else:
                self.offers += 1
                name = f"{engine}.{rank}.{self.offers}"
                self.ends[key] = self.accepting.submit(self.post.accept, name, capacity)
                addresses.append([*self.post.address, name])
        return addresses

    def withdraw(self, engine: int) -> None:
        """Close the links to an engine."""
        for key in [key for key in self.ends if key[0] == engine]:
            self.ends.pop(key).add_done_callback(_close)
            del self.routes[key]

    def start(
        self,
        weights: Iterable[tuple[str, Tensor | BlockScaled]],
        version: int,
        engines: Collection[int],
        *,
        whole: frozenset[str] = frozenset(),
        **how: bool,
    ) -> None:
        """Send a version to these engines, in a thread. whole, how: see `Link` and `WeightSender.send`."""
        assert self.sending is None
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # the thread's own stream waits for no other
        ends = {key: (self.ends[key], route) for key, route in self.routes.items() if key[0] in engines}
        self.sending = self.thread.submit(self._send, weights, version, ends, whole, how)

    def finish(self) -> SendReport:
        """Wait for the sending. Raises RefitError on weights that must not be sent."""
        assert self.sending is not None
        try:
            return self.sending.result()
        finally:
            self.sending = None

    def _send(
        self,
        weights: Iterable[tuple[str, Tensor | BlockScaled]],
        version: int,
        ends: dict[LinkId, tuple[Future[SendingEnd], Route]],
        whole: frozenset[str],
        how: dict[str, bool],
    ) -> SendReport:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread, for kernels that do not ask where their tensors are
        links, failed, told = dict[LinkId, Link](), dict[LinkId, str](), False
        try:
            for key, (end, route) in ends.items():
                try:
                    links[key] = Link(end.result(), route, whole)
                except LinkError as error:  # the sink's end is closed, too
                    failed[key] = str(error)
            told = True
            report = self.sender.send(weights, version, links, **how)
        except BaseException as error:
            if not (told and isinstance(error, RefitError)):  # or engines would wait for what does not come
                for end, _ in ends.values():
                    end.add_done_callback(_close)
            if isinstance(error, torch.OutOfMemoryError):
                raise RefitError(
                    f"refit {version}: the trainer's memory is full ({one_line(error)[:300]}); lower "
                    "nemo_fp8rl.refit.bucket_bytes, or set nemo_fp8rl.refit.mode=full, which keeps no copy of what "
                    "was sent"
                ) from None
            raise
        finally:
            links.clear()
        report.failed |= failed
        return report

    def close(self) -> None:
        for engine in {key[0] for key in self.ends}:
            self.withdraw(engine)
        if self.post is not None:
            self.post.close()
        self.accepting.shutdown(wait=False)
        self.thread.shutdown(wait=False)


def _close(end: Future[SendingEnd]) -> None:
    if end.exception() is None:
        end.result().close()
