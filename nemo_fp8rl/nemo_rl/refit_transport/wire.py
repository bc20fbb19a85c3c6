"""The messages of a refit between NeMo RL's workers: each header names its tensors, unlike those of `refit.message`.

The names are known only when NeMo RL's iterator has been read, so no route can be agreed on before. A bucket is a
header in JSON and a payload; each entry in it begins at a multiple of `route_plan.ALIGNMENT` bytes. A full entry is the
scales of an FP8 band and its data, a delta entry the scales and a message of `fp8.delta`. The digest is that of the
band as the receiver will store it, so it also proves that the delta's base was the right one.
"""

import json
from dataclasses import dataclass
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from nemo_fp8rl.common.region import Region
from nemo_fp8rl.fp8 import FORMATS
from nemo_fp8rl.refit.deferred_checks import DeferredChecks, PendingDigest
from nemo_fp8rl.refit.manifest import RefitError, TensorPart
from nemo_fp8rl.refit.message import Content, Encoding
from nemo_fp8rl.refit.route_plan import align_up
from nemo_fp8rl.refit.transport.link import SendingEnd, finish_gpu_work

Rows = tuple[int, int]
DIGEST_BYTES = 8


class Entry(NamedTuple):
    """A band of a tensor in a bucket.

    name, dtype, shape: of the whole tensor, as in `TensorPart`
    rows:      first row and the row after the last one; (0, 0) for a tensor without dimensions
    encoding:  full or delta
    nbytes:    bytes of the entry in the payload
    digest:    digest of the band's scales and data
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: Rows
    encoding: Encoding
    nbytes: int
    digest: str = ""

    @classmethod
    def of(cls, band: TensorPart, encoding: Encoding, nbytes: int) -> "Entry":
        rows = band.region[0] if band.region else (0, 0)
        return cls(band.name, band.dtype, band.shape, rows, encoding, nbytes)

    @property
    def part(self) -> TensorPart:
        """The whole tensor."""
        return TensorPart(self.name, self.dtype, self.shape, tuple((0, size) for size in self.shape))

    @property
    def region(self) -> Region:
        """The band's region. Raises RefitError for rows that the tensor does not have."""
        (start, end), region = self.rows, self.part.region
        if not region:
            return region
        if not 0 <= start <= end <= self.shape[0]:
            raise RefitError(f"{self.name}: rows {start} to {end} of {self.shape[0]} arrived")
        return ((start, end), *region[1:])


@dataclass(frozen=True)
class Header:
    """The header of a bucket.

    version:  name of the version of the weights
    base:     name of the version to which delta entries apply; empty for a whole version
    sequence: number of this bucket in its refit on its link, from 0
    last:     True for the last bucket of the refit
    abort:    the reason for which the sender gave up, or empty
    """

    version: str
    base: str
    sequence: int
    entries: tuple[Entry, ...] = ()
    last: bool = False
    abort: str = ""

    def encode(self) -> bytes:
        """Return the header behind its own digest: no other number would tell a tensor's name from another one."""
        fields = [self.version, self.base, self.sequence, self.entries, self.last, self.abort]
        message = json.dumps(fields).encode()
        return xxhash.xxh3_64_digest(message) + message

    @classmethod
    def decode(cls, message: bytes) -> "Header":
        """Decode a header. Raises RefitError on bytes that are not a header."""
        digest, message = message[:DIGEST_BYTES], message[DIGEST_BYTES:]
        if digest != xxhash.xxh3_64_digest(message):
            raise RefitError("a message of the refit is damaged (its digest is another)")
        try:
            version, base, sequence, raw, last, abort = json.loads(message)
            entries = tuple(_decode_entry(*fields) for fields in raw)
            return cls(str(version), str(base), int(sequence), entries, bool(last), str(abort))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise RefitError(f"a message of the refit is damaged ({error})") from None


def _decode_entry(
    name: object, dtype: object, shape: list[int], rows: list[int], encoding: Encoding, nbytes: object, digest: object
) -> Entry:
    known = str(dtype) in FORMATS or isinstance(getattr(torch, str(dtype), None), torch.dtype)
    if encoding not in ("full", "delta") or not known:
        raise ValueError(f"an unknown encoding or dtype of {name}")
    start, end = map(int, rows)
    sizes = tuple(map(int, shape))
    if min(sizes, default=0) < 0 or not isinstance(nbytes, int) or nbytes < 0:
        raise ValueError(f"a negative size of {name}")
    return Entry(str(name), str(dtype), sizes, (start, end), encoding, nbytes, str(digest))


class Store:
    """The bytes of one version: for each tensor its scales and its data, contiguous.

    version: name of the version that is complete in this memory; empty for none
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.version = device, ""
        self._tensors: dict[str, tuple[TensorPart, Tensor]] = {}

    def has(self, part: TensorPart) -> bool:
        """Return True if the tensor is stored with this dtype and shape."""
        return part.name in self._tensors and self._tensors[part.name][0] == part

    def content(self, part: TensorPart) -> Content:
        """Return views of the tensor's memory, which is allocated if it is not there with this dtype and shape."""
        if not self.has(part):
            pinned = self.device.type == "cpu" and torch.cuda.is_available()  # so that a GPU copies at full speed
            memory = torch.empty(part.nbytes, dtype=torch.uint8, device=self.device, pin_memory=pinned)
            self._tensors[part.name] = part, memory
        stored, memory = self._tensors[part.name]
        return Content.of(stored, memory)

    def drop_others(self, names: set[str]) -> None:
        """Free the tensors that are not among these."""
        for name in self._tensors.keys() - names:
            del self._tensors[name]

    def parts(self) -> list[TensorPart]:
        """Return the stored tensors in the order of their first arrival."""
        return [part for part, _ in self._tensors.values()]

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for _, memory in self._tensors.values())


class LinkWriter:
    """Fills and sends the buckets of one link during one refit.

    end:      the link's end
    version, base: as in `Header`
    checks:   checks of the bands in the bucket, shared with other links
    """

    def __init__(self, end: SendingEnd, version: str, base: str, checks: DeferredChecks) -> None:
        self.end, self.version, self.base, self.checks = end, version, base, checks
        self.entries: list[tuple[Entry, PendingDigest]] = []
        self.sequence = self.nbytes = 0

    def add(self, entry: Entry, pieces: tuple[Tensor, ...], digest: PendingDigest) -> None:
        """Copy an entry, uint8 tensors of together entry.nbytes, into the bucket; send the bucket first if it is full.

        Raises: LinkError if the other side is gone or silent, RefitError for a band larger than a bucket
        """
        start = align_up(self.nbytes)
        if self.entries and start + entry.nbytes > self.end.acquire_buffer().numel():
            self.send(last=False)
            start = 0
        bucket = self.end.acquire_buffer()
        if entry.nbytes > bucket.numel():
            raise RefitError(
                f"{entry.name}: a band of {entry.nbytes} bytes cannot be cut smaller and does not fit into a bucket of "
                f"{bucket.numel()}: set a larger bucket_bytes"
            )
        for piece in pieces:
            bucket[start : start + piece.nbytes].copy_(piece)
            start += piece.nbytes
        self.nbytes = start
        self.entries.append((entry, digest))

    def send(self, last: bool, abort: str = "") -> None:
        """Send the bucket. Raises LinkError as `add`, and NonFiniteError for a value in it that is not finite."""
        if abort:
            self.entries, self.nbytes = [], 0
        else:
            self.checks.finish()
        finish_gpu_work(self.end.acquire_buffer())
        entries = tuple(entry._replace(digest=digest.text) for entry, digest in self.entries)
        header = Header(self.version, self.base, self.sequence, entries, last, abort)
        self.end.send(header.encode(), self.nbytes)
        self.entries, self.nbytes, self.sequence = [], 0, self.sequence + 1

    def wait_for_release(self) -> None:
        """Wait until the receiver has released the last bucket, which it does once it has verified the version.

        A link has two buffers, so an empty message and the request of a third buffer wait for the release of the first.
        Raises: LinkError if the receiver has closed the link, which is its way to refuse the version
        """
        self.end.acquire_buffer()
        self.end.send(Header(self.version, self.base, self.sequence).encode(), 0)
        self.end.acquire_buffer()
