"""The receiver of one engine rank: it yields each piece of a version exactly once, in the order of arrival."""

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from nemo_fp8rl.fp8.block_scaled import scale_values
from nemo_fp8rl.fp8.delta import Delta, DeltaError
from nemo_fp8rl.fp8.kernels.tile_delta import TileDelta
from nemo_fp8rl.refit.deferred_checks import DeferredChecks
from nemo_fp8rl.refit.digest import bytes_of
from nemo_fp8rl.refit.manifest import RefitError, Route, TensorPart
from nemo_fp8rl.refit.message import Content, Encoding, Header, message_start, scales_of
from nemo_fp8rl.refit.receiver.module_order import ModuleOrder
from nemo_fp8rl.refit.route_plan import align_up
from nemo_fp8rl.refit.transport import link_threads
from nemo_fp8rl.refit.transport.link import ReceivingEnd, finish_gpu_work
from nemo_fp8rl.refit.transport.places import Places


class ReceivedPiece(NamedTuple):
    """A piece as it arrived.

    part:      the piece
    content:   views that are valid until the next piece is requested, or of the place; None for a delta
    delta:     the changes to the last version's data; None for a full piece
    entry:     (encoding, payload), as the delta came; None for a full piece
    scales:    (block scales, global scale) of a quantized piece, full or delta, as in `Content`
    digest:    the digest of the content that the trainer sent, or empty
    is_in_place: the source has written the piece into its place
    """

    part: TensorPart
    content: Content | None
    delta: Delta | TileDelta | None
    scales: tuple[Tensor | None, Tensor | None]
    digest: str
    entry: tuple[Encoding, Tensor] | None = None
    is_in_place: bool = False

    def write_data(self, data: Tensor) -> None:
        """Write the piece's data, or its changes, over `data`, of any strides, without the scales.

        Raises: DeltaError, before anything is written
        """
        if self.content is not None:
            if not self.is_in_place:
                data.copy_(self.content.data)
        elif isinstance(self.delta, TileDelta):
            self.delta.apply_(data)
        else:
            assert self.delta is not None
            contiguous = data.contiguous()
            self.delta.apply_(bytes_of(contiguous))
            if not data.is_contiguous():
                data.copy_(contiguous)


@dataclass(frozen=True)
class IncomingLink:
    end: ReceivingEnd
    route: Route


def receive_pieces(
    links: Sequence[IncomingLink],
    version: int,
    modules: Mapping[str, Hashable] = MappingProxyType({}),
    checks: DeferredChecks | None = None,
    with_frozen: bool = True,
    places: Places | None = None,
) -> Iterator[ReceivedPiece]:
    """Yield every piece of a version that the links bring.

    A thread reads each link, so that no link waits for another one to be read, unless `ModuleOrder` stalls it. On an
    error, and when the caller stops early, all links are closed.

    modules: as in `ModuleOrder`
    checks:  the caller's checks of a message, which are finished before the message is released
    with_frozen: tensors that never change come as well
    places:  the places that this sink has opened
    Raises:  RefitError if a message is lost, repeated, out of order, of another version, or not on the route, if a
             source gave up, and if a link breaks
    """
    messages: SimpleQueue[tuple[int, Header, Tensor] | RefitError] = SimpleQueue()
    readers = [
        link_threads.start(f"refit-link-{i}", partial(_read_link, i, link.end, messages), link.end.close)
        for i, link in enumerate(links)
    ]
    checks = checks or DeferredChecks()
    progress = [_RouteProgress(link.route, version, checks, with_frozen, places) for link in links]
    order = ModuleOrder([[route.route[i] for i in sorted(route.missing)] for route in progress], modules)
    unread = [deque[tuple[Header, Tensor]]() for _ in links]
    try:
        while not all(route.is_complete for route in progress):
            i = next((i for i, queue in enumerate(unread) if queue and order.may_read(i)), None)
            if i is None:
                message = messages.get()
                if isinstance(message, RefitError):
                    raise message
                unread[message[0]].append(message[1:])
                continue
            header, payload = unread[i].popleft()
            for piece in progress[i].read_entries(header, payload):
                order.record(i, piece.part)
                yield piece
            checks.finish()
            finish_gpu_work(payload)
            links[i].end.release()
    except BaseException:
        for link in links:  # else sources would wait for buffers that are never released, and threads for messages
            link.end.close()
        raise
    finally:
        link_threads.join(readers)


def _read_link(i: int, end: ReceivingEnd, messages: "SimpleQueue[tuple[int, Header, Tensor] | RefitError]") -> None:
    """Queue the link's messages, up to the last one of a refit, or the error of one that cannot be read."""
    try:
        while True:
            message, payload = end.receive()
            header = Header.decode(message)
            messages.put((i, header, payload))
            if header.last:
                return
    except Exception as error:  # of any kind, because the reader of the queue waits for it
        messages.put(error if isinstance(error, RefitError) else RefitError(f"{type(error).__name__}: {error}"))


class _RouteProgress:
    """The pieces of one route that are still to arrive. missing: their positions in the route"""

    def __init__(
        self, route: Route, version: int, checks: DeferredChecks, with_frozen: bool, places: Places | None
    ) -> None:
        self.route, self.version, self.checks, self.places = route, version, checks, places
        self.missing = {i for i, part in enumerate(route) if with_frozen or not part.is_frozen}
        self.sequence = 0
        self.is_complete = False

    def read_entries(self, header: Header, payload: Tensor) -> Iterator[ReceivedPiece]:
        prefix = f"refit {self.version}"
        if header.version != self.version:
            raise RefitError(f"{prefix}: a message of version {header.version} arrived")
        if header.abort:
            raise RefitError(f"{prefix}: the trainer gave up: {header.abort}")
        if header.sequence != self.sequence:
            raise RefitError(f"{prefix}: message {header.sequence} arrived where {self.sequence} was due")
        self.sequence += 1
        offset = 0
        for entry in header.entries:
            if entry.piece not in self.missing:
                name = self.route[entry.piece].name if 0 <= entry.piece < len(self.route) else "a piece"
                raise RefitError(f"{prefix}: {name} arrived unexpectedly")
            self.missing.remove(entry.piece)
            offset = align_up(offset)
            part, data = self.route[entry.piece], payload[offset : offset + entry.nbytes]
            offset += entry.nbytes
            if entry.encoding == "direct":
                yield self._find_piece(part, entry.digest)
                continue
            if data.nbytes != entry.nbytes or entry.nbytes < part.scale_bytes:
                raise RefitError(f"{prefix}: {part.name} was cut off")
            yield self._read_piece(part, entry.encoding, data, entry.digest)
        if header.last:
            self.is_complete = True
            if self.missing:
                name = self.route[min(self.missing)].name
                raise RefitError(f"{prefix}: {len(self.missing)} pieces did not arrive, among them one of {name}")

    def _find_piece(self, part: TensorPart, digest: str) -> ReceivedPiece:
        content = self.places.find(part) if self.places is not None else None
        if content is None:
            raise RefitError(f"refit {self.version}: {part.name} is said to be in its place, which was not opened")
        scales = content.scale_inv, content.global_scale
        self._check_scales(part, *scales)
        return ReceivedPiece(part, content, None, scales, digest, is_in_place=True)

    def _read_piece(self, part: TensorPart, encoding: Encoding, data: Tensor, digest: str) -> ReceivedPiece:
        if encoding == "full":
            if (nbytes := data.nbytes) != part.nbytes:
                raise RefitError(f"refit {self.version}: {part.name} has {nbytes} bytes, must have {part.nbytes}")
            content = Content.of(part, data)
            scales = content.scale_inv, content.global_scale
            self._check_scales(part, *scales)
            return ReceivedPiece(part, content, None, scales, digest)
        scales = scales_of(part, data)
        self._check_scales(part, *scales)
        try:
            delta = self._read_tiles(part, data) if encoding == "tiles" else self._read_list(part, data)
        except DeltaError as error:
            raise RefitError(f"refit {self.version}: {part.name}: {error}") from None
        return ReceivedPiece(part, None, delta, scales, digest, (encoding, data))

    def _read_list(self, part: TensorPart, data: Tensor) -> Delta:
        return Delta.decode(data[part.scale_bytes :].cpu().numpy().tobytes(), part.data_bytes)

    def _read_tiles(self, part: TensorPart, data: Tensor) -> TileDelta:
        """Read a delta in tiles; on a GPU its verdict is read with the other checks of the message."""
        delta = TileDelta.decode(data[message_start(part) :], part.data_bytes)
        if delta.verdict is not None:
            text = f"refit {self.version}: {part.name}: a delta in tiles was damaged on its way"

            def check(faults: int) -> None:
                if faults:
                    raise RefitError(text)

            self.checks.read(delta.verdict, check)
        return delta

    def _check_scales(self, part: TensorPart, scale_inv: Tensor | None, global_scale: Tensor | None) -> None:
        text = f"refit {self.version}: {part.name} has a scale that is not finite"
        if scale_inv is not None and part.format is not None:
            self.checks.check_finite(scale_values(scale_inv, part.format), partial(RefitError, text))
        if global_scale is not None:
            self.checks.check_finite(global_scale, partial(RefitError, text))
