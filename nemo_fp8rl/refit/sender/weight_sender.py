"""The trainer's side of a refit: one rank quantizes what it holds, once, and sends every engine rank what it stores.

Blocks are quantized independently of each other, so a piece has the same bytes whatever part of its tensor is cut out.
It is quantized, or copied where the rank holds FP8, straight into one link's bucket, and copied from there into those
of other engines. For deltas a rank keeps the bytes that it sent last.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType

import torch
from torch import Tensor

from nemo_fp8rl.common.region import Region
from nemo_fp8rl.fp8 import (
    BLOCK,
    BlockScaled,
    NonFiniteError,
    ScaleFormat,
    quantize_blockwise,
    quantize_delta,
    scale_shape,
)
from nemo_fp8rl.fp8.delta import Delta
from nemo_fp8rl.fp8.format import count_nans, describe_non_finite, is_finite
from nemo_fp8rl.refit.deferred_checks import DeferredChecks, PendingDigest, on_gpu
from nemo_fp8rl.refit.digest import bytes_of
from nemo_fp8rl.refit.manifest import RefitError, Route, TensorPart, blocks_of
from nemo_fp8rl.refit.message import Content, Encoding, Entry
from nemo_fp8rl.refit.reports import LinkId, SendReport, StageTimer
from nemo_fp8rl.refit.sender.bucket_writer import BucketWriter
from nemo_fp8rl.refit.transport.link import LinkError, SendingEnd

MIN_DELTA_BYTES = 1 << 14
"""Bytes below which a piece is sent whole: a delta of it would hardly be smaller."""


@dataclass(frozen=True)
class Link:
    """A link to one sink. whole: names of tensors that it cannot take a delta of."""

    end: SendingEnd
    route: Route
    whole: frozenset[str] = frozenset()


@dataclass
class Piece:
    """A piece with the links that want it, and its place in the route of each."""

    part: TensorPart
    targets: dict[LinkId, int] = field(default_factory=dict)
    whole: bool = False


class WeightSender:
    """The sender of one rank's weights. base_version: of the bytes that it kept, -1 without any."""

    def __init__(self, parts: Sequence[TensorPart], scale_format: ScaleFormat) -> None:
        self.parts = {part.name: part for part in parts}
        self.scale_format = scale_format
        self.base_version = -1
        self.base: dict[tuple[str, Region], Tensor] = {}  # scales and data

    @torch.no_grad()
    def send(
        self,
        weights: Iterable[tuple[str, Tensor | BlockScaled]],
        version: int,
        links: Mapping[LinkId, Link],
        *,
        delta: bool = False,
        keep: bool = False,
        digests: bool = True,
    ) -> SendReport:
        """Send every link its pieces of these weights: this rank's parts, by name, in the order of all ranks (`pace`).

        weights: a matrix may be a stack [count, rows, K] of what is one below the other in it; what is FP8 already
        goes as it is.

        delta: every sink holds what this rank kept. keep: keep these bytes for the next one. A link that breaks is left
        out of the rest and reported. Raises RefitError, naming the tensor, on a weight that is not finite; the sinks
        are then told that nothing more comes.
        """
        assert not delta or self.base_version >= 0
        self.base_version = -1
        sending = _Sending(version, links)
        pieces = sending.pieces
        going = {(name, piece.part.region) for name, own in pieces.items() for piece in own} if delta or keep else set()
        self.base = {key: kept for key, kept in self.base.items() if key in going}
        try:
            for name, weight in sending.exported(weights):
                for piece in pieces.pop(name, ()):
                    values = _cut(weight, self.parts[name], piece.part.region)
                    if delta and not piece.whole and (piece.part.name, piece.part.region) in self.base:
                        self._send_delta(sending, piece, values, digests)
                    else:
                        self._send_full(sending, piece, values, keep, digests)
            assert not pieces, f"the trainer did not hand out {sorted(pieces)[0]}"
            sending.finish()
            if keep and not sending.report.failed:
                self.base_version = version
        except NonFiniteError as error:
            reason = f"refit {version}: {error}; training diverged"
            sending.finish(reason)
            raise RefitError(reason) from None
        finally:
            sending.going.clear()  # each of them knows `sending`, and a link that ends must not wait for the collector
            if self.base_version < 0:
                self.base = {}
        sending.report.base_nbytes = sum(kept.nbytes for kept in self.base.values())
        return sending.report

    def _send_full(
        self, sending: "_Sending", piece: Piece, values: Tensor | BlockScaled, keep: bool, digests: bool
    ) -> None:
        part = piece.part
        if (room := sending.room(piece, part.nbytes)) is None:
            return
        payload = room if values.device == room.device else torch.empty_like(room, device=values.device)
        content = Content.of(part, payload)
        with sending.quantizing(part):
            self._quantize(sending, part, values, content)
            if payload is not room:
                room.copy_(payload)
        with sending.report.time_stage("encode"):
            mark = sending.checks.take_digest(content) if digests else PendingDigest()
            if keep and part.data_bytes >= MIN_DELTA_BYTES:
                self._kept(part, values.device).copy_(payload)
        sending.add(piece, room, "full", mark)

    def _send_delta(self, sending: "_Sending", piece: Piece, values: Tensor | BlockScaled, digests: bool) -> None:
        part, kept = piece.part, self._kept(piece.part, values.device)
        content = Content.of(part, kept)
        with sending.quantizing(part):
            delta = self._update(sending, part, values, content)
        with sending.report.time_stage("encode"):
            mark = sending.checks.take_digest(content) if digests else PendingDigest()
            message = delta.encode() if delta is not None else b""
        if delta is None or len(message) >= part.data_bytes // 2:
            if (room := sending.room(piece, part.nbytes)) is not None:
                sending.add(piece, room.copy_(kept), "full", mark)
        elif (room := sending.room(piece, part.scale_bytes + len(message))) is not None:
            room[: part.scale_bytes] = kept[: part.scale_bytes]
            room[part.scale_bytes :] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            sending.add(piece, room, "delta", mark)

    def _quantize(self, sending: "_Sending", part: TensorPart, values: Tensor | BlockScaled, content: Content) -> None:
        if isinstance(values, BlockScaled):
            out = _like(values.data, content)
            out.data.view(torch.uint8).copy_(values.data.view(torch.uint8))
            out.scale_inv.copy_(values.scale_inv)
            sending.check_codes(part, out)
            return
        if content.scale_inv is not None:
            out, later = _like(values, content), on_gpu(content.scale_inv)
            quantize_blockwise(values, scale_format=self.scale_format, out=out, check=not later)
            if later:
                sending.check_finite(part, content.scale_inv)
            return
        content.data.view(values.shape).copy_(values)
        sending.check_finite(part, content.data)

    def _update(
        self, sending: "_Sending", part: TensorPart, values: Tensor | BlockScaled, content: Content
    ) -> Delta | None:
        """Quantize over the content that was sent last, and say what differs from it."""
        if content.scale_inv is not None and not isinstance(values, BlockScaled):
            out = _like(values, content)
            return quantize_delta(values, out.data, scale_format=self.scale_format, out=out)[1]
        new = values.data if isinstance(values, BlockScaled) else values.to(content.data.dtype)
        delta = Delta.between(bytes_of(content.data), bytes_of(new))
        self._quantize(sending, part, values, content)
        return delta

    def _kept(self, part: TensorPart, device: torch.device) -> Tensor:
        """uint8 [nbytes]: what was sent of the piece, or is now to be; where the weights are. Of large pieces."""
        key = part.name, part.region
        if key not in self.base:
            self.base[key] = torch.empty(part.nbytes, dtype=torch.uint8, device=device)
        return self.base[key]


class _Sending:
    """The links of one refit, as long as they hold."""

    def __init__(self, version: int, links: Mapping[LinkId, Link]) -> None:
        self.report, self.checks = SendReport(), DeferredChecks()
        self.going = {i: BucketWriter(link.end, version, self._flush, self.checks) for i, link in links.items()}
        self.pieces: dict[str, list[Piece]] = {}
        found: dict[tuple[str, Region], Piece] = {}
        for i, link in links.items():
            for place, part in enumerate(link.route):
                key = part.name, part.region
                if key not in found:
                    found[key] = Piece(part)
                    self.pieces.setdefault(part.name, []).append(found[key])
                found[key].targets[i] = place
                found[key].whole |= part.name in link.whole

    def exported(
        self, weights: Iterable[tuple[str, Tensor | BlockScaled]]
    ) -> Iterator[tuple[str, Tensor | BlockScaled]]:
        parts = iter(weights)
        while True:
            with self.report.time_stage("export"):
                part = next(parts, None)
            if part is None:
                return
            yield part

    def quantizing(self, part: TensorPart) -> "_Quantizing":
        return _Quantizing(self.report.seconds, part.name)

    def check_finite(self, part: TensorPart, tensor: Tensor) -> None:
        if on_gpu(tensor):
            self.checks.check_finite(tensor, lambda: NonFiniteError(f"{_place(part)} are not finite"))
        elif not is_finite(tensor):
            raise NonFiniteError(describe_non_finite(tensor))

    def check_codes(self, part: TensorPart, quantized: BlockScaled) -> None:
        count = count_nans(quantized.data)
        if on_gpu(count):
            self.checks.read(count, partial(_refuse_codes, part))
            self.check_finite(part, quantized.scale_inv)
        elif count or not is_finite(quantized.scale_inv):
            raise NonFiniteError(f"{int(count)} of {quantized.data.numel()} FP8 values, or their scales, are NaN")

    def room(self, piece: Piece, nbytes: int) -> Tensor | None:
        """Memory for an entry, in the bucket of the first link that wants the piece and still holds, if any does."""
        for i in self._open_links(piece.targets):
            with self._or_failed(i), self.report.time_stage("send"):
                return self.going[i].room(nbytes)
        return None

    def add(self, piece: Piece, payload: Tensor, encoding: Encoding, mark: PendingDigest) -> None:
        """Make an entry of what `room` gave, and copy it to the other links that want the piece."""
        first, nbytes = next(self._open_links(piece.targets)), payload.nbytes
        for i in self._open_links(piece.targets):
            with self._or_failed(i), self.report.time_stage("send"):
                if i != first:
                    self.going[i].room(nbytes).copy_(payload)
                self.going[i].add(Entry(piece.targets[i], encoding, nbytes, ""), mark, piece.part)
                self.report.count(piece.part, nbytes)

    def finish(self, abort: str = "") -> None:
        if abort:  # what is in buckets is not to be read any more, nor to go out while another link is waited for
            self.checks = DeferredChecks()
            for outgoing in self.going.values():
                outgoing.drop(self.checks)
        for i in self._open_links(list(self.going)):
            with self._or_failed(i), self.report.time_stage("send"):
                self.going[i].send(last=True, abort=abort)

    def _open_links(self, links: Iterable[LinkId]) -> Iterator[LinkId]:
        """The links that hold when it is their turn."""
        return (i for i in links if i in self.going)

    def _flush(self) -> None:
        """Send what waits here for more, so that no sink waits for it that another one waits for (`pace`)."""
        for i in self._open_links(list(self.going)):
            with self._or_failed(i):
                self.going[i].flush()

    def _or_failed(self, i: LinkId) -> "_OrFailed":
        return _OrFailed(self, i)


class _OrFailed:
    """A link that breaks in the block is closed, so that its sink does not wait either, left out of the rest and
    reported.
    """

    __slots__ = ("link", "sending")

    def __init__(self, sending: _Sending, link: LinkId) -> None:
        self.sending, self.link = sending, link

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, LinkError):
            return False
        self.sending.report.failed[self.link] = str(error)
        if outgoing := self.sending.going.pop(self.link, None):
            outgoing.end.close()
        return True


class _Quantizing(StageTimer):
    """The stage of that name; a NonFiniteError of the block gets the tensor's name."""

    __slots__ = ("tensor",)

    def __init__(self, seconds: dict[str, float], tensor: str) -> None:
        super().__init__(seconds, "quantize")
        self.tensor = tensor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, NonFiniteError):
            raise NonFiniteError(f"{self.tensor}: {error}") from None


def _cut(weight: Tensor | BlockScaled, part: TensorPart, region: Region) -> Tensor | BlockScaled:
    """The region of the weight that a rank holds as `part`; of a stack a stack, where its matrices stay whole."""
    if isinstance(weight, BlockScaled):
        scales = TensorPart.of(part.name, torch.float32, scale_shape(part.shape, BLOCK), blocks_of(part.region))
        return BlockScaled(
            _cut_tensor(weight.data, part, region), _cut_tensor(weight.scale_inv, scales, blocks_of(region), 1), BLOCK
        )
    return _cut_tensor(weight, part, region)


def _cut_tensor(weight: Tensor, part: TensorPart, region: Region, block: int = BLOCK[0]) -> Tensor:
    """block: rows of one, which no matrix of a stack may cut."""
    is_stack = weight.dim() > len(part.size)
    uncut = not is_stack or weight.size(1) % block == 0
    if region == part.region and uncut:
        return weight
    index = part.local(region)
    if not is_stack:
        return weight[index]
    (rows, columns), height = index, weight.size(1)
    first, end = rows.start // height, -(-rows.stop // height)
    matrices = weight[first:end, :, columns]
    if uncut and (rows.start, rows.stop) == (first * height, end * height):
        return matrices
    return matrices.flatten(0, 1)[rows.start - first * height : rows.stop - first * height]


def _like(values: Tensor, content: Content) -> BlockScaled:
    """The content for values that may be a stack."""
    assert content.scale_inv is not None
    if values.dim() == content.data.dim():
        return BlockScaled(content.data, content.scale_inv, BLOCK)
    shape = scale_shape(values.shape, BLOCK)
    return BlockScaled(content.data.view(values.shape), content.scale_inv.view(shape), BLOCK)


def _refuse_codes(part: TensorPart, not_numbers: int) -> None:
    if not_numbers:
        raise NonFiniteError(f"{_place(part)}: {not_numbers} FP8 values are NaN")


def _place(part: TensorPart) -> str:
    """The place of a piece in words, for a number that is read when its values are gone."""
    first, last = [start for start, _ in part.region], [end - 1 for _, end in part.region]
    return f"{part.name}: values from {first} to {last}"
