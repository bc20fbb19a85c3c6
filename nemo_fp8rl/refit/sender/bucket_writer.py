"""The bucket that a rank fills for one link, and the moment at which it is sent."""

from collections.abc import Callable

from torch import Tensor

from nemo_fp8rl.refit.deferred_checks import DeferredChecks, PendingDigest
from nemo_fp8rl.refit.manifest import TensorPart
from nemo_fp8rl.refit.message import Content, Entry, Header
from nemo_fp8rl.refit.route_plan import align_up
from nemo_fp8rl.refit.transport.link import SendingEnd, finish_gpu_work
from nemo_fp8rl.refit.transport.places import Places

FLUSH_SECONDS = 0.05
"""Seconds that a link waits for a free buffer before the other links send their buckets, even if not full."""


class BucketWriter:
    """Fills and sends the buckets of one link during one refit, and gives out places in the sink's memory.

    A bucket is sent when it is full, and when its deltas, or pieces that are in their places, stand for as many bytes
    as it could have: the sink has to work in the meantime. It is also sent before the rank waits for a buffer of
    another link.

    end:     the link's end
    version: the version of the weights
    on_wait: called when the link has no free buffer after FLUSH_SECONDS
    checks:  the checks of all buckets of the rank, of whichever link
    """

    def __init__(self, end: SendingEnd, version: int, on_wait: Callable[[], None], checks: DeferredChecks) -> None:
        self.end, self.version, self.on_wait, self.sequence = end, version, on_wait, 0
        self.checks = checks
        self.entries: list[tuple[Entry, PendingDigest]] = []
        self.bucket: Tensor | None = None
        self.nbytes = self.represented_bytes = 0
        self.places: Places | None = None

    def wait_for_places(self) -> bool:
        """Wait until the sink has begun to load the version, and use the places that it opens.

        Return True if their memory is mapped for the first time.
        """
        self.places = self.end.wait_for_places(self.version)
        if self.places is None or not self.places.is_new:
            return False
        self.places.is_new = False
        return True

    def find_place(self, part: TensorPart) -> Content | None:
        """Return the memory of the sink in which a piece belongs; None where it goes through a bucket."""
        if self.places is None or (content := self.places.find(part)) is None:
            return None
        self._open_bucket()  # waits for a sink that is behind, and notices one that is gone, before it is written to
        return content

    def reserve(self, nbytes: int) -> Tensor:
        """Return memory for the next entry, of at most `nbytes`."""
        start = align_up(self.nbytes)
        if self.bucket is not None and start + nbytes > self.bucket.numel():
            self.send(last=False)
            start = 0
        return self._open_bucket()[start : start + nbytes]

    def add(self, entry: Entry, digest: PendingDigest, part: TensorPart) -> None:
        """Add the entry of this part, which is in the memory that `reserve` or `find_place` returned."""
        assert self.bucket is not None
        self.nbytes = align_up(self.nbytes) + entry.nbytes
        self.represented_bytes += part.nbytes
        self.entries.append((entry, digest))
        if self.represented_bytes >= self.bucket.numel():
            self.send(last=False)

    def drop(self, checks: DeferredChecks) -> None:
        """Drop the entries in the bucket, and use these checks from now on."""
        self.checks, self.entries, self.nbytes, self.represented_bytes = checks, [], 0, 0

    def flush(self) -> None:
        """Send the bucket if it has entries."""
        if self.entries:
            self.send(last=False)

    def send(self, last: bool, abort: str = "") -> None:
        """Send the bucket.

        last, abort: as in `Header`
        Raises:      NonFiniteError, with the tensor's name, if a value in the bucket is not finite
        """
        self.checks.finish()
        finish_gpu_work(self._open_bucket())
        entries = tuple(entry._replace(digest=digest.text) for entry, digest in self.entries)
        header = Header(self.version, self.sequence, entries, last, abort)
        self.end.send(header.encode(), self.nbytes)
        self.bucket, self.entries, self.sequence = None, [], self.sequence + 1
        self.nbytes = self.represented_bytes = 0

    def _open_bucket(self) -> Tensor:
        if self.bucket is None:
            if not self.end.has_free_buffer(FLUSH_SECONDS):
                self.on_wait()
            self.bucket = self.end.acquire_buffer()
        return self.bucket
