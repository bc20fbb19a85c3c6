"""What a rank has ready for one link: a bucket in the making, and when it goes out."""

from collections.abc import Callable

from torch import Tensor

from nemo_fp8rl.refit.deferred_checks import DeferredChecks, PendingDigest
from nemo_fp8rl.refit.manifest import TensorPart
from nemo_fp8rl.refit.message import Entry, Header
from nemo_fp8rl.refit.route_plan import align_up
from nemo_fp8rl.refit.transport.link import SendingEnd, finish_gpu_work

PATIENCE = 0.05
"""Seconds to wait for a bucket before the others go out as full as they are."""


class BucketWriter:
    """A link during one refit: the bucket in the making.

    It is sent when it is full, or when deltas in it stand for as much: the sink is to work meanwhile. And before the
    rank waits for a bucket of another link. checks: of all that the rank has in buckets, whichever link takes it.
    """

    def __init__(
        self, end: SendingEnd, version: int, before_waiting: Callable[[], None], checks: DeferredChecks
    ) -> None:
        self.end, self.version, self.before_waiting, self.sequence = end, version, before_waiting, 0
        self.checks = checks
        self.entries: list[tuple[Entry, PendingDigest]] = []
        self.bucket: Tensor | None = None
        self.filled = self.stands_for = 0

    def room(self, nbytes: int) -> Tensor:
        """Memory for the next entry, of up to `nbytes`."""
        start = align_up(self.filled)
        if self.bucket is not None and start + nbytes > self.bucket.numel():
            self.send(last=False)
            start = 0
        return self._held()[start : start + nbytes]

    def add(self, entry: Entry, mark: PendingDigest, part: TensorPart) -> None:
        """Add the entry, of this part, that is in what `room` gave. mark: its digest."""
        assert self.bucket is not None
        self.filled = align_up(self.filled) + entry.nbytes
        self.stands_for += part.nbytes
        self.entries.append((entry, mark))
        if self.stands_for >= self.bucket.numel():
            self.send(last=False)

    def drop(self, checks: DeferredChecks) -> None:
        """Drop what is in the bucket, and go on with these checks."""
        self.checks, self.entries, self.filled, self.stands_for = checks, [], 0, 0

    def flush(self) -> None:
        if self.entries:
            self.send(last=False)

    def send(self, last: bool, abort: str = "") -> None:
        """Raises NonFiniteError instead, with the tensor's name, where a value that is on its way is not finite."""
        self.checks.finish()
        finish_gpu_work(self._held())
        entries = tuple(entry._replace(digest=mark.text) for entry, mark in self.entries)
        header = Header(self.version, self.sequence, entries, last, abort)
        self.end.send(header.encode(), self.filled)
        self.bucket, self.entries, self.sequence = None, [], self.sequence + 1
        self.filled = self.stands_for = 0

    def _held(self) -> Tensor:
        if self.bucket is None:
            if not self.end.has_free_buffer(PATIENCE):
                self.before_waiting()
            self.bucket = self.end.acquire_buffer()
        return self.bucket
