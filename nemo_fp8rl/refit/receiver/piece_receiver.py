"""The engine's side of a refit: the pieces of one version, each exactly once, in the order that links bring them."""

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from nemo_fp8rl.fp8.delta import Delta, DeltaError
from nemo_fp8rl.refit.deferred_checks import DeferredChecks
from nemo_fp8rl.refit.manifest import RefitError, Route, TensorPart
from nemo_fp8rl.refit.message import Content, Header, scales_of
from nemo_fp8rl.refit.receiver.module_order import ModuleOrder
from nemo_fp8rl.refit.route_plan import align_up
from nemo_fp8rl.refit.transport import link_threads
from nemo_fp8rl.refit.transport.link import ReceivingEnd, finish_gpu_work


class ReceivedPiece(NamedTuple):
    """A piece as it came. content: views that hold until the next piece is asked for; of a delta, None: `delta` and
    `scale_inv` make it, from the last version's bytes. digest: of the content, empty when none was sent.
    """

    part: TensorPart
    content: Content | None
    delta: Delta | None
    scale_inv: Tensor | None
    digest: str


@dataclass(frozen=True)
class IncomingLink:
    end: ReceivingEnd
    route: Route


def receive_pieces(
    links: Sequence[IncomingLink],
    version: int,
    modules: Mapping[str, Hashable] = MappingProxyType({}),
    checks: DeferredChecks | None = None,
) -> Iterator[ReceivedPiece]:
    """What the links bring of a version. modules: see `ModuleOrder`. checks: what else is to be known of a message
    before it is given back.

    Raises RefitError when anything is lost, repeated, out of order, of another version, or not of the route, when a
    source gave up, and when a link breaks; the links are then closed, as when the caller stops. A thread reads each
    link, so that none waits for another to be read, unless `ModuleOrder` holds it back.
    """
    arrived: SimpleQueue[tuple[int, Header, Tensor] | RefitError] = SimpleQueue()
    reading = [
        link_threads.start(f"refit-link-{i}", partial(_read, i, link.end, arrived), link.end.close)
        for i, link in enumerate(links)
    ]
    checks = checks or DeferredChecks()
    progress = [_Progress(link.route, version, checks) for link in links]
    pace, waiting = (
        ModuleOrder([link.route for link in links], modules),
        [deque[tuple[Header, Tensor]]() for _ in links],
    )
    try:
        while not all(one.ended for one in progress):
            i = next((i for i, messages in enumerate(waiting) if messages and pace.may_read(i)), None)
            if i is None:
                item = arrived.get()
                if isinstance(item, RefitError):
                    raise item
                waiting[item[0]].append(item[1:])
                continue
            header, payload = waiting[i].popleft()
            for piece in progress[i].entries(header, payload):
                pace.arrived(i, piece.part)
                yield piece
            checks.finish()
            finish_gpu_work(payload)
            links[i].end.release()
    except BaseException:
        for link in links:  # or the sources would wait for buffers that nobody gives back, and the threads for messages
            link.end.close()
        raise
    finally:
        link_threads.join(reading)


def _read(i: int, end: ReceivingEnd, arrived: "SimpleQueue[tuple[int, Header, Tensor] | RefitError]") -> None:
    """Hand on what arrives, until the last message of a refit, or one that cannot be read."""
    try:
        while True:
            message, payload = end.receive()
            header = Header.decode(message)
            arrived.put((i, header, payload))
            if header.last:
                return
    except Exception as error:  # whatever it is: the reader of what arrives waits for it
        arrived.put(error if isinstance(error, RefitError) else RefitError(f"{type(error).__name__}: {error}"))


class _Progress:
    """What of a route has arrived."""

    def __init__(self, route: Route, version: int, checks: DeferredChecks) -> None:
        self.route, self.version, self.checks = route, version, checks
        self.missing = set(range(len(route)))
        self.sequence = 0
        self.ended = False

    def entries(self, header: Header, payload: Tensor) -> Iterator[ReceivedPiece]:
        here = f"refit {self.version}"
        if header.version != self.version:
            raise RefitError(f"{here}: a message of version {header.version} arrived")
        if header.abort:
            raise RefitError(f"{here}: the trainer gave up: {header.abort}")
        if header.sequence != self.sequence:
            raise RefitError(f"{here}: message {header.sequence} arrived where {self.sequence} was due")
        self.sequence += 1
        at = 0
        for entry in header.entries:
            if entry.piece not in self.missing:
                known = 0 <= entry.piece < len(self.route)
                raise RefitError(f"{here}: {self.route[entry.piece].name if known else 'a piece'} arrived unexpectedly")
            self.missing.remove(entry.piece)
            at = align_up(at)
            part, bytes_ = self.route[entry.piece], payload[at : at + entry.nbytes]
            at += entry.nbytes
            if bytes_.nbytes != entry.nbytes or entry.nbytes < part.scale_bytes:
                raise RefitError(f"{here}: {part.name} was cut off")
            yield self._read(part, entry.encoding == "delta", bytes_, entry.digest)
        if header.last:
            self.ended = True
            if self.missing:
                name = self.route[min(self.missing)].name
                raise RefitError(f"{here}: {len(self.missing)} pieces did not arrive, among them one of {name}")

    def _read(self, part: TensorPart, is_delta: bool, bytes_: Tensor, digest: str) -> ReceivedPiece:
        if not is_delta:
            if (nbytes := bytes_.nbytes) != part.nbytes:
                raise RefitError(f"refit {self.version}: {part.name} has {nbytes} bytes, must have {part.nbytes}")
            content = Content.of(part, bytes_)
            self._check(part, content.scale_inv)
            return ReceivedPiece(part, content, None, content.scale_inv, digest)
        scale_inv = scales_of(part, bytes_)
        self._check(part, scale_inv)
        try:
            delta = Delta.decode(bytes_[part.scale_bytes :].cpu().numpy().tobytes(), part.data_bytes)
        except DeltaError as error:
            raise RefitError(f"refit {self.version}: {part.name}: {error}") from None
        return ReceivedPiece(part, None, delta, scale_inv, digest)

    def _check(self, part: TensorPart, scale_inv: Tensor | None) -> None:
        if scale_inv is not None:
            text = f"refit {self.version}: {part.name} has a scale that is not finite"
            self.checks.check_finite(scale_inv, partial(RefitError, text))
