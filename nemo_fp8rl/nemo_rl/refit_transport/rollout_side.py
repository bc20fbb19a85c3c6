"""The engine's side: receive a whole version into memory of its own, verify it, and only then hand it out."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_fp8rl.fp8 import scale_name
from nemo_fp8rl.fp8.delta import Delta, DeltaError
from nemo_fp8rl.nemo_rl.refit_transport.policy_side import caller_name
from nemo_fp8rl.nemo_rl.refit_transport.settings import TIMEOUT, Settings
from nemo_fp8rl.nemo_rl.refit_transport.topology import Peer
from nemo_fp8rl.nemo_rl.refit_transport.wire import Entry, Header, Store
from nemo_fp8rl.refit.deferred_checks import DeferredChecks
from nemo_fp8rl.refit.digest import bytes_of
from nemo_fp8rl.refit.manifest import RefitError, TensorPart
from nemo_fp8rl.refit.message import Content, scales_of
from nemo_fp8rl.refit.route_plan import align_up
from nemo_fp8rl.refit.transport.handshake import connect
from nemo_fp8rl.refit.transport.link import TIMEOUT_KEY, LinkError, ReceivingEnd, finish_gpu_work

BATCH_BYTES = 256 << 20
"""Bytes of the tensors that are handed out at a time, about."""


class AbortedRefit(RefitError):
    """The trainer gave up; to repeat the refit at once would be of no use."""


@dataclass
class RolloutMetrics:
    """Numbers of this rank's last refit. version: empty if it failed; nbytes: on the wire; retries: after failures."""

    version: str = ""
    is_delta: bool = False
    nbytes: int = 0
    retries: int = 0


class RolloutSide:
    """One rollout rank. `connect` names its source, `receive` is a refit, `disconnect` closes its link."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.store = Store(torch.device(settings.device))
        self.rank = 0
        self.source: Peer | None = None
        self.end: ReceivingEnd | None = None
        self.metrics = RolloutMetrics()

    def connect(self, rank: int, source: Peer) -> None:
        """Take this source; the link is made by the next `receive`."""
        self.disconnect()
        self.rank, self.source = rank, source

    def disconnect(self) -> None:
        if self.end is not None:
            self.end.close()
        self.end = None

    def receive(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Receive and verify a version; then yield all its tensors in batches, as a checkpoint has them.

        The tensors are views of memory that the next refit changes.
        Raises: RefitError if the version has not arrived whole after all retries; nothing was yielded then
        """
        self.metrics = RolloutMetrics()
        while True:
            try:
                self._receive_version()
                break
            except AbortedRefit:
                raise
            except RefitError as error:
                self.disconnect()
                error = RefitError(str(error).replace(TIMEOUT_KEY, TIMEOUT))
                if self.metrics.retries == self.settings.retries:
                    raise error from None
                self.metrics.retries += 1
                logging.getLogger(__name__).warning(
                    "%s: %s; the whole version is sent again", caller_name(self.rank), error
                )
        yield from self._batches()

    def _receive_version(self) -> None:
        if self.end is None:
            if self.source is None:
                raise RefitError("the process group of this checkpoint engine was not initialized")
            address = self.source.host, self.source.port
            device = torch.device(self.settings.device)
            self.end = connect(
                address, self.source.token, caller_name(self.rank), self.settings.timeout_seconds, device
            )
        incoming = _Incoming(self.store)
        try:
            while not incoming.is_complete:
                message, payload = self.end.receive()
                incoming.read(Header.decode(message), payload)
                if not incoming.is_complete:
                    self.end.release()
        except AbortedRefit:
            self.end.release()
            raise
        self.store.version = incoming.version
        self.metrics.version, self.metrics.is_delta = incoming.version, bool(incoming.base)
        self.metrics.nbytes += incoming.nbytes
        self.end.release()  # tells the source that the version is verified: `LinkWriter.wait_for_release`
        with suppress(LinkError):  # a trainer that is gone takes nothing from a version that is verified
            self.end.receive()
            self.end.release()

    def _batches(self) -> Iterator[list[tuple[str, Tensor]]]:
        batch, nbytes = list[tuple[str, Tensor]](), 0
        for part in self.store.parts():
            content = self.store.content(part)
            batch.append((part.name, content.data))
            if content.scale_inv is not None:
                batch.append((scale_name(part.name), content.scale_inv))
            nbytes += part.nbytes
            if nbytes >= BATCH_BYTES:
                yield batch
                batch, nbytes = [], 0
        if batch:
            yield batch


class _Incoming:
    """A version on its way into the store.

    version: its name; base: as in `Header`; both are empty until the first message
    nbytes:  received bytes of the wire
    """

    def __init__(self, store: Store) -> None:
        self.store, self.stored, store.version = store, store.version, ""
        self.version = self.base = ""
        self.sequence = self.nbytes = 0
        self.rows: dict[str, int] = {}
        """Rows that have arrived, by tensor; a tensor without rows counts as one."""
        self.is_complete = False
        self.checks = DeferredChecks()

    def read(self, header: Header, payload: Tensor) -> None:
        """Store the bands of a bucket, and verify them.

        Raises: AbortedRefit if the trainer gave up; RefitError, with the tensor's name, for a band that is damaged,
            repeated or missing, and for a delta to another version than the stored one
        """
        if header.abort:
            raise AbortedRefit(f"refit {header.version}: the trainer gave up: {header.abort}")
        if not self.sequence:
            self.version, self.base = header.version, header.base
            if self.base and self.base != self.stored:
                raise RefitError(
                    f"refit {self.version}: a delta to {self.base} arrived, stored is {self.stored or '-'}"
                )
        if (header.version, header.base, header.sequence) != (self.version, self.base, self.sequence):
            raise RefitError(
                f"refit {self.version}: message {header.sequence} of {header.version} arrived where {self.sequence} of "
                "this version was due"
            )
        self.sequence += 1
        offset = 0
        for entry in header.entries:
            offset = align_up(offset)
            self._read_band(entry, payload[offset : offset + entry.nbytes])
            offset += entry.nbytes
        self.checks.finish()
        finish_gpu_work(payload)
        self.nbytes += offset
        if header.last:
            self._check_complete()
            self.is_complete = True

    def _read_band(self, entry: Entry, data: Tensor) -> None:
        part, region = entry.part, entry.region
        band = part.cut(region)
        rows = entry.rows[1] - entry.rows[0] if region else 1
        start = entry.rows[0] if region else 0
        if self.rows.get(entry.name, 0) != start:
            raise RefitError(f"refit {self.version}: {entry.name}: row {start} arrived out of order")
        self.rows[entry.name] = start + rows
        if data.nbytes != entry.nbytes or (entry.encoding == "full" and entry.nbytes != band.nbytes):
            raise RefitError(f"refit {self.version}: {entry.name} has {data.nbytes} bytes, must have {band.nbytes}")
        if entry.encoding == "delta" and not (self.base and self.store.has(part)):
            raise RefitError(f"refit {self.version}: a delta of {entry.name} arrived, which is not stored")
        content = self.store.content(part).cut(part, region)
        if content.scale_inv is not None:
            if data.nbytes < band.scale_bytes:
                raise RefitError(f"refit {self.version}: {entry.name} was cut off")
            content.scale_inv.copy_(_scales(band, data))
        self._write_data(entry, band, content, data[band.scale_bytes :])
        name, version = entry.name, self.version
        self.checks.check_digest(
            content, entry.digest, lambda: RefitError(f"refit {version}: the digest of {name} is not the trainer's")
        )

    def _write_data(self, entry: Entry, band: TensorPart, content: Content, data: Tensor) -> None:
        if entry.encoding == "full":
            bytes_of(content.data).copy_(data)
            return
        try:
            Delta.decode(data.cpu().numpy().tobytes(), band.data_bytes).apply_(content.data.view(torch.uint8))
        except DeltaError as error:
            raise RefitError(f"refit {self.version}: {entry.name}: {error}") from None

    def _check_complete(self) -> None:
        for part in self.store.parts():
            if part.name not in self.rows:
                continue
            rows = part.shape[0] if part.shape else 1
            if self.rows[part.name] != rows:
                raise RefitError(f"refit {self.version}: {self.rows[part.name]} of {rows} rows of {part.name} arrived")
        self.store.drop_others(set(self.rows))


def _scales(band: TensorPart, data: Tensor) -> Tensor:
    scales = scales_of(band, data)[0]
    assert scales is not None
    return scales
