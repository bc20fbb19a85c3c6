"""One push of a version: the links that still work, the pieces that they need, and the report.

A link that breaks is left out of the rest of the push and reported; the other links go on.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType, TracebackType
from typing import NamedTuple

from torch import Tensor

from nemo_fp8rl.common.region import Region
from nemo_fp8rl.fp8 import BlockScaled, NonFiniteError
from nemo_fp8rl.fp8.block_scaled import count_nans, describe_non_finite, is_finite, scale_values
from nemo_fp8rl.refit.deferred_checks import DeferredChecks, PendingDigest, on_gpu
from nemo_fp8rl.refit.expert_stacks import Weight, expert_name
from nemo_fp8rl.refit.manifest import Route, TensorPart
from nemo_fp8rl.refit.message import Content, Encoding, Entry
from nemo_fp8rl.refit.reports import LinkId, SendReport, StageTimer
from nemo_fp8rl.refit.sender.bucket_writer import BucketWriter
from nemo_fp8rl.refit.sender.piece_cut import PieceCut
from nemo_fp8rl.refit.transport.link import LinkError, SendingEnd


@dataclass(frozen=True)
class Link:
    """A link to one sink.

    end:       the source's end
    route:     the pieces that the sink needs of this rank
    full_only: names of tensors for which the sink cannot apply a delta
    """

    end: SendingEnd
    route: Route
    full_only: frozenset[str] = frozenset()


@dataclass
class Piece:
    """A piece that one or more links need.

    part:    the piece
    targets: its index in the route of each link that needs it
    cut:     cuts its values
    """

    part: TensorPart
    targets: dict[LinkId, int] = field(default_factory=dict)
    cut: PieceCut = field(default_factory=PieceCut)


class Target(NamedTuple):
    """Memory for a whole piece.

    link:    the link through which the piece goes
    content: views of the memory
    payload: uint8 [nbytes], the memory, where it is in a bucket; None where it is the piece's place in the sink
    """

    link: LinkId
    content: Content
    payload: Tensor | None

    def copy_(self, other: "Target") -> None:
        if self.payload is not None and other.payload is not None:
            self.payload.copy_(other.payload)
        else:
            self.content.copy_(other.content)


class PushPlan:
    """The pieces of a push, which serve later ones as well, as long as the links have the same routes.

    pieces:      by tensor name
    with_frozen: see `WeightSender.send`
    """

    def __init__(self, links: Mapping[LinkId, Link] = MappingProxyType({}), with_frozen: bool = True) -> None:
        self.routes, self.with_frozen = {i: link.route for i, link in links.items()}, with_frozen
        self.pieces: dict[str, list[Piece]] = {}
        by_region: dict[tuple[str, Region], Piece] = {}
        for i, route in self.routes.items():
            for position, part in enumerate(route):
                if part.is_frozen and not with_frozen:
                    continue
                key = part.name, part.region
                if key not in by_region:
                    by_region[key] = Piece(part)
                    self.pieces.setdefault(part.name, []).append(by_region[key])
                by_region[key].targets[i] = position

    def serves(self, links: Mapping[LinkId, Link], with_frozen: bool) -> bool:
        if with_frozen != self.with_frozen or links.keys() != self.routes.keys():
            return False
        return all(link.route is self.routes[i] for i, link in links.items())


class Push:
    """The state of one push. writers: the links that still work; pieces: by tensor name; report: filled as it goes."""

    def __init__(self, version: int, links: Mapping[LinkId, Link], plan: PushPlan) -> None:
        self.report, self.checks = SendReport(), DeferredChecks()
        self.writers = {i: BucketWriter(link.end, version, self._flush, self.checks) for i, link in links.items()}
        self.links, self.pieces = links, dict(plan.pieces)

    def takes_delta(self, piece: Piece) -> bool:
        """Return True if every link that needs the piece can apply a delta of it."""
        return not any(piece.part.name in self.links[i].full_only for i in piece.targets)

    def wait_for_places(self) -> None:
        """Wait until every sink has begun to load the version, and write what can be into its place."""
        for i in self._working(list(self.writers)):
            with self._guard(i), self.report.time_stage("send"):
                self.report.has_mapped |= self.writers[i].wait_for_places()

    def time_export(self, weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """Yield the weights; the time that the trainer takes to hand them out counts as the export stage."""
        iterator = iter(weights)
        while True:
            with self.report.time_stage("export"):
                weight = next(iterator, None)
            if weight is None:
                return
            yield weight

    def time_quantization(self, part: TensorPart) -> "_QuantizeTimer":
        return _QuantizeTimer(self.report.seconds, part)

    def check_finite(self, part: TensorPart, tensor: Tensor) -> None:
        """Raise NonFiniteError, on a GPU later, if the tensor has NaN or infinity."""
        if on_gpu(tensor):
            self.checks.check_finite(tensor, lambda: NonFiniteError(f"{_describe(part)} are not finite"))
        elif not is_finite(tensor):
            matrix = next(i for i, x in enumerate(tensor) if not is_finite(x)) if part.is_stack else None
            raise NonFiniteError(describe_non_finite(tensor if matrix is None else tensor[matrix]), matrix)

    def check_codes(self, part: TensorPart, quantized: BlockScaled) -> None:
        """Raise NonFiniteError, on a GPU later, if FP8 values or their scales are not finite."""
        scales = scale_values(quantized.scale_inv, quantized.format)
        if quantized.format.is_fp4:  # E2M1 has no NaN
            self.check_finite(part, scales)
            return
        count = count_nans(quantized.data)
        if on_gpu(count):
            self.checks.read(count, partial(_raise_for_codes, part))
            self.check_finite(part, scales)
        elif count or not is_finite(scales):
            data, matrix = quantized.data, None
            if part.is_stack:
                pairs = enumerate(zip(data, scales, strict=True))
                matrix = next(i for i, (x, scale) in pairs if count_nans(x) or not is_finite(scale))
                data, count = data[matrix], count_nans(data[matrix])
            raise NonFiniteError(f"{int(count)} of {data.numel()} FP8 values, or their scales, are NaN", matrix)

    def reserve(self, piece: Piece, nbytes: int) -> Tensor | None:
        """Return memory for an entry in the bucket of the first working link that needs the piece, or None."""
        for i in self._working(piece.targets):
            with self._guard(i), self.report.time_stage("send"):
                return self.writers[i].reserve(nbytes)
        return None

    def target(self, piece: Piece) -> Target | None:
        """Return memory for the whole piece on the way to the first working link that needs it, or None."""
        for i in self._working(piece.targets):
            with self._guard(i), self.report.time_stage("send"):
                return self._target(i, piece.part)
        return None

    def _target(self, i: LinkId, part: TensorPart) -> Target:
        if (place := self.writers[i].find_place(part)) is not None:
            return Target(i, place, None)
        payload = self.writers[i].reserve(part.nbytes)
        return Target(i, Content.of(part, payload), payload)

    def _copy_to(self, i: LinkId, part: TensorPart, target: Target) -> bool:
        """Copy a whole piece for another link; return True if it is in its place there."""
        if (place := self.writers[i].find_place(part)) is not None:
            place.copy_(target.content)
            return True
        payload = self.writers[i].reserve(part.nbytes)
        if target.payload is not None:
            payload.copy_(target.payload)
        else:
            Content.of(part, payload).copy_(target.content)
        return False

    def add_whole(self, piece: Piece, target: Target, digest: PendingDigest) -> None:
        """Make an entry of the memory that `target` returned, and copy it for the other links that need the piece."""
        for i in self._working(piece.targets):
            with self._guard(i), self.report.time_stage("send"):
                is_direct = target.payload is None if i == target.link else self._copy_to(i, piece.part, target)
                encoding: Encoding = "direct" if is_direct else "full"
                nbytes = 0 if is_direct else piece.part.nbytes
                self.writers[i].add(Entry(piece.targets[i], encoding, nbytes, ""), digest, piece.part)
                self.report.count(piece.part, piece.part.nbytes, is_direct=is_direct)

    def add(self, piece: Piece, payload: Tensor, encoding: Encoding, digest: PendingDigest) -> None:
        """Make an entry of the memory that `reserve` returned, and copy it to the other links that need the piece."""
        first, nbytes = next(self._working(piece.targets)), payload.nbytes
        for i in self._working(piece.targets):
            with self._guard(i), self.report.time_stage("send"):
                if i != first:
                    self.writers[i].reserve(nbytes).copy_(payload)
                self.writers[i].add(Entry(piece.targets[i], encoding, nbytes, ""), digest, piece.part)
                self.report.count(piece.part, nbytes)

    def finish(self, abort: str = "") -> None:
        """Send the last bucket of every link. abort: the reason why no more pieces come, or empty."""
        if abort:  # the entries in buckets must not be read any more, nor be sent while another link waits
            self.checks = DeferredChecks()
            for writer in self.writers.values():
                writer.drop(self.checks)
        for i in self._working(list(self.writers)):
            with self._guard(i), self.report.time_stage("send"):
                self.writers[i].send(last=True, abort=abort)

    def _working(self, links: Iterable[LinkId]) -> Iterator[LinkId]:
        """Yield the links that still work at the moment at which they are reached."""
        return (i for i in links if i in self.writers)

    def _flush(self) -> None:
        """Send all buckets, so that no sink waits for data that this rank has while it waits: see `module_order`."""
        for i in self._working(list(self.writers)):
            with self._guard(i):
                self.writers[i].flush()

    def _guard(self, i: LinkId) -> "_LinkGuard":
        return _LinkGuard(self, i)


class _LinkGuard:
    """A block in which a link may break: the link is then closed, so that its sink does not wait, and reported."""

    __slots__ = ("link", "push")

    def __init__(self, push: Push, link: LinkId) -> None:
        self.push, self.link = push, link

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, LinkError):
            return False
        self.push.report.failed[self.link] = str(error)
        if writer := self.push.writers.pop(self.link, None):
            writer.end.close()
        return True


class _QuantizeTimer(StageTimer):
    """Times the quantize stage, and adds the tensor's name, or the expert's, to a NonFiniteError of the block."""

    __slots__ = ("part",)

    def __init__(self, seconds: dict[str, float], part: TensorPart) -> None:
        super().__init__(seconds, "quantize")
        self.part = part

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, NonFiniteError):
            name = self.part.name
            if error.matrix is not None:
                name = expert_name(name, self.part.region[0][0] + error.matrix)
            raise NonFiniteError(f"{name}: {error}") from None


def _raise_for_codes(part: TensorPart, nan_count: int) -> None:
    if nan_count:
        raise NonFiniteError(f"{_describe(part)}: {nan_count} FP8 values are NaN")


def _describe(part: TensorPart) -> str:
    """Return the name and region of a piece, for a number that is read when the piece's values are gone."""
    first, last = [start for start, _ in part.region], [end - 1 for _, end in part.region]
    return f"{part.name}: values from {first} to {last}"
