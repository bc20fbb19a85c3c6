"""The trainer's side: quantize each tensor once, send it to the receivers of this rank, and store its bytes.

The stored bytes are the base of the next delta, and what a receiver gets that has lost its link.
"""

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from nemo_fp8rl.common.errors import single_line
from nemo_fp8rl.fp8 import BLOCK, BlockScaled, NonFiniteError, quantize_blockwise, quantize_delta
from nemo_fp8rl.fp8.block_scaled import count_nans
from nemo_fp8rl.fp8.delta import Delta
from nemo_fp8rl.nemo_rl.refit_transport.settings import TIMEOUT, Settings
from nemo_fp8rl.nemo_rl.refit_transport.weight_stream import read_stream
from nemo_fp8rl.nemo_rl.refit_transport.wire import Entry, LinkWriter, Store
from nemo_fp8rl.refit.deferred_checks import DeferredChecks
from nemo_fp8rl.refit.digest import bytes_of
from nemo_fp8rl.refit.manifest import RefitError, TensorPart, split_rows
from nemo_fp8rl.refit.message import Content
from nemo_fp8rl.refit.reports import SendReport
from nemo_fp8rl.refit.route_plan import PIECE_BYTES
from nemo_fp8rl.refit.sender.weight_regions import cut_matrix
from nemo_fp8rl.refit.transport.handshake import Listener
from nemo_fp8rl.refit.transport.link import TIMEOUT_KEY, LinkError, SendingEnd

MIN_DELTA_BYTES = 1 << 14
"""Bytes of the smallest band that is sent as a delta."""
SMALLEST_BUCKET = 1 << 16


def caller_name(rollout_rank: int) -> str:
    """Return the name under which a rollout rank calls the listener of its source."""
    return f"rollout rank {rollout_rank}"


@dataclass
class Receiver:
    """A rollout rank to which this rank sends.

    stored: name of the version that it stores, as far as this rank knows
    end:    the link, None before the first refit and after a failure
    absent: it did not connect in this refit, so that a repetition would only wait once more
    """

    name: str
    stored: str = ""
    end: SendingEnd | None = None
    absent: bool = False

    def disconnect(self) -> None:
        if self.end is not None:
            self.end.close()
        self.end, self.stored = None, ""


@dataclass
class RefitMetrics:
    """Numbers of this rank's last refit.

    version:  name of the version
    report:   bytes and seconds
    deltas:   receivers that got a delta
    whole:    receivers that got a whole version
    retries:  receivers that had to be sent the version again
    seconds:  wall time
    """

    version: str = ""
    report: SendReport = field(default_factory=SendReport)
    deltas: int = 0
    whole: int = 0
    retries: int = 0
    seconds: float = 0.0


class PolicySide:
    """One policy rank. `connect` names its receivers, `send` is a refit, `disconnect` closes its links."""

    def __init__(self, settings: Settings, bucket_bytes: int) -> None:
        self.settings, self.bucket_bytes = settings, bucket_bytes
        self.store = Store(torch.device(settings.device))
        self.receivers: list[Receiver] = []
        self.listener: Listener | None = None
        self.sender_id, self.count = secrets.token_hex(8), 0
        self.metrics = RefitMetrics()

    def connect(self, listener: Listener, receivers: Collection[tuple[int, str]]) -> None:
        """Take these receivers; links are made by the next `send`.

        listener:   accepts their calls
        receivers:  (rollout rank, name of the version that it stores)
        """
        self.disconnect()
        self.listener = listener
        self.receivers = [Receiver(caller_name(rank), stored) for rank, stored in receivers]

    def disconnect(self) -> None:
        for receiver in self.receivers:
            receiver.disconnect()
        self.receivers = []

    @torch.no_grad()
    def send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send a version to all receivers and wait until they have verified it.

        The iterator is read to its end in any case, because other ranks take part in its collectives.
        Raises: NonFiniteError, with the name, for weights that are not finite; RefitError if a receiver has not got
            the version after all retries; what the iterator raises
        """
        start, iterator = time.perf_counter(), iter(weights)
        try:
            if self.receivers:
                self._send(iterator)
        finally:
            with suppress(StopIteration):
                while True:
                    next(iterator)
            self.metrics.seconds = time.perf_counter() - start

    def _send(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        base, self.store.version = self.store.version, ""
        self.count += 1
        version = f"{self.sender_id}:{self.count}"
        self.metrics = RefitMetrics(version)
        transfer = _Transfer(self, version, base)
        try:
            transfer.connect(self.receivers)
            names = set()
            for part, values in read_stream(weights, self.settings.layers):
                transfer.send(part, values)
                names.add(part.name)
            self.store.drop_others(names)
        except BaseException as error:
            transfer.abort(single_line(error) if isinstance(error, Exception) else type(error).__name__)
            raise
        transfer.finish()
        self.store.version = version
        self._repeat(version)

    def _repeat(self, version: str) -> None:
        """Send the stored version to the receivers that do not store it."""
        for attempt in range(self.settings.retries + 1):
            failed = [receiver for receiver in self.receivers if receiver.stored != version]
            if not failed:
                return
            if attempt == self.settings.retries or any(receiver.absent for receiver in failed):
                break
            self.metrics.retries += len(failed)
            transfer = _Transfer(self, version, "")
            transfer.connect(failed)
            for part in self.store.parts():
                transfer.send_stored(part)
            transfer.finish()
        raise RefitError(
            f"refit {version}: {failed[0].name} has not got the weights in {attempt + 1} attempts: "
            f"{self.reasons.get(failed[0].name, 'its log has the reason')}"
        )

    @property
    def reasons(self) -> dict[str, str]:
        """Why links broke in the last refit, by receiver."""
        return {self.receivers[rank].name: why for (_, rank), why in self.metrics.report.failed.items()}

    def capacity(self) -> int:
        return max(self.bucket_bytes // len(self.receivers), SMALLEST_BUCKET)


class _Transfer:
    """One pass over the tensors of a version. A link that breaks is left out of the rest of it.

    base: name of the version whose bytes are stored, for receivers that store it, too; empty for none
    """

    def __init__(self, side: PolicySide, version: str, base: str) -> None:
        self.side, self.version = side, version
        self.base = base if side.settings.mode == "delta" else ""
        self.checks = DeferredChecks()
        self.writers: dict[int, LinkWriter] = {}
        self.piece_bytes = min(PIECE_BYTES, side.capacity())

    def connect(self, receivers: Collection[Receiver]) -> None:
        """Make the links of these receivers that are not there."""
        side, metrics = self.side, self.side.metrics
        assert side.listener is not None
        for receiver in receivers:
            rank = side.receivers.index(receiver)
            try:
                stored = receiver.stored
                if receiver.end is None:
                    receiver.absent = True
                    receiver.end = side.listener.accept(receiver.name, side.capacity())
                    receiver.absent = False
                base = self.base if stored and stored == self.base else ""
                self.writers[rank] = LinkWriter(receiver.end, self.version, base, self.checks)
                metrics.deltas, metrics.whole = metrics.deltas + bool(base), metrics.whole + (not base)
            except LinkError as error:
                self._fail(rank, error)

    def send(self, part: TensorPart, values: Tensor | BlockScaled) -> None:
        """Quantize or copy a tensor into the store, band by band, and send every band."""
        is_stored = self.side.store.has(part)
        whole = self.side.store.content(part)
        wants_delta = is_stored and any(writer.base for writer in self.writers.values())
        report = self.side.metrics.report
        for band in split_rows(part, self.piece_bytes):
            content = whole.cut(part, band.region)
            with report.time_stage("quantize"):
                can_shrink = wants_delta and band.data_bytes >= MIN_DELTA_BYTES
                delta = self._update(band, cut_matrix(values, part, band.region), content, can_shrink)
            self._add(band, content, delta)

    def send_stored(self, part: TensorPart) -> None:
        """Send the stored bytes of a tensor."""
        whole = self.side.store.content(part)
        for band in split_rows(part, self.piece_bytes):
            self._add(band, whole.cut(part, band.region), None)

    def finish(self) -> None:
        """Send the last buckets, and wait until each receiver has verified the version."""
        for rank in list(self.writers):
            self._try_on_link(rank, lambda writer: writer.send(last=True))
        for rank in list(self.writers):
            self._try_on_link(rank, LinkWriter.wait_for_release)
        for rank in self.writers:
            self.side.receivers[rank].stored = self.version

    def abort(self, reason: str) -> None:
        """Tell the receivers that no more comes, and that what came must not be used."""
        for rank in list(self.writers):
            self.side.receivers[rank].stored = ""
            self._try_on_link(rank, lambda writer: writer.send(last=True, abort=reason))

    def _update(
        self, band: TensorPart, values: Tensor | BlockScaled, content: Content, wants_delta: bool
    ) -> Delta | None:
        """Write the values over the band's stored bytes; return the changes, None if too many or not wanted."""
        stored, scale_format = content.data.device, self.side.settings.scale_format
        if isinstance(values, Tensor) and content.scale_inv is not None:
            if wants_delta and values.device == stored:
                out = BlockScaled(content.data, content.scale_inv, BLOCK)
                with _with_tensor_name(band):
                    return quantize_delta(values, content.data, scale_format=scale_format, out=out)[1]
            with _with_tensor_name(band):
                values = quantize_blockwise(values, scale_format=scale_format, check=not values.is_cuda)
        if isinstance(values, BlockScaled):
            assert content.scale_inv is not None
            new = values.data.to(stored)
            content.scale_inv.copy_(values.scale_inv)
            self.checks.read(count_nans(new), partial(_raise_for_nans, band))
            self._check_finite(content.scale_inv, f"{band.name}: its scales are not finite; training diverged")
        else:
            new = values.to(stored, content.data.dtype).view(content.data.shape)
            self._check_finite(new, f"{band.name} holds values that are not finite; training diverged")
        delta = Delta.between(bytes_of(content.data), bytes_of(new)) if wants_delta else None
        bytes_of(content.data).copy_(bytes_of(new))
        return delta

    def _check_finite(self, values: Tensor, reason: str) -> None:
        self.checks.check_finite(values, partial(NonFiniteError, reason))

    def _add(self, band: TensorPart, content: Content, delta: Delta | None) -> None:
        report = self.side.metrics.report
        with report.time_stage("encode"):
            digest = self.checks.take_digest(content)
            message = delta.encode() if delta is not None else b""
        scales = () if content.scale_inv is None else (bytes_of(content.scale_inv),)
        full = Entry.of(band, "full", band.nbytes), (*scales, bytes_of(content.data))
        changes = full
        if delta is not None and len(message) < band.data_bytes // 2:
            listed = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            changes = Entry.of(band, "delta", band.scale_bytes + len(message)), (*scales, listed)
        for rank in list(self.writers):
            with report.time_stage("send"):
                entry, pieces = changes if self.writers[rank].base else full
                if self._try_on_link(rank, partial(LinkWriter.add, entry=entry, pieces=pieces, digest=digest)):
                    report.count(band, entry.nbytes)

    def _try_on_link(self, rank: int, work: Callable[[LinkWriter], None]) -> bool:
        """Do the work on a link; if the link breaks, close it, note why, and return False."""
        try:
            work(self.writers[rank])
        except LinkError as error:
            self._fail(rank, error)
            return False
        return True

    def _fail(self, rank: int, error: LinkError) -> None:
        self.writers.pop(rank, None)
        self.side.receivers[rank].disconnect()
        self.side.metrics.report.failed[0, rank] = str(error).replace(TIMEOUT_KEY, TIMEOUT)


@contextmanager
def _with_tensor_name(band: TensorPart) -> Iterator[None]:
    """Add the tensor's name to a NonFiniteError of the block."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"{band.name}: {error}; training diverged") from None


def _raise_for_nans(band: TensorPart, count: int) -> None:
    if count:
        raise NonFiniteError(f"{band.name}: {count} of {band.data_bytes} FP8 values are NaN; training diverged")
