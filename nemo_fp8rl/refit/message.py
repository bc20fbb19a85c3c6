"""What one bucket says of its content, on every transport alike.

A bucket is a header in JSON and a payload: entries one after the other, each at a multiple of `plan.ALIGNMENT` bytes.
A full entry is the scales of an FP8 piece and its bytes; a delta entry is the scales and `fp8.delta`'s message. The
digest is that of the piece as the engine will hold it, so it also proves that a delta met the bytes it was made of.
"""

import json
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nemo_fp8rl.common.region import Region, index
from nemo_fp8rl.fp8 import BLOCK, scale_shape
from nemo_fp8rl.refit.digest import bytes_of, digest_of, has_digest
from nemo_fp8rl.refit.manifest import RefitError, TensorPart, blocks_of

Encoding = Literal["full", "delta"]


class Entry(NamedTuple):
    """piece: its place in the route. nbytes: of payload. digest: of the piece's scales and bytes, or empty."""

    piece: int
    encoding: Encoding
    nbytes: int
    digest: str


@dataclass(frozen=True)
class Header:
    """sequence: 0, 1, ... of the buckets of a refit on a link. abort: why the source gave up; nothing more comes."""

    version: int
    sequence: int
    entries: tuple[Entry, ...] = ()
    last: bool = False
    abort: str = ""

    def encode(self) -> bytes:
        return json.dumps([self.version, self.sequence, self.entries, self.last, self.abort]).encode()

    @classmethod
    def decode(cls, message: bytes) -> "Header":
        """Raises RefitError on bytes that are no header."""
        try:
            version, sequence, raw, last, abort = json.loads(message)
            entries = tuple(Entry(int(p), e, int(n), str(d)) for p, e, n, d in raw)
            if any(entry.encoding not in ("full", "delta") for entry in entries):
                raise ValueError("an unknown encoding")
            return cls(int(version), int(sequence), entries, bool(last), str(abort))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise RefitError(f"a message of the refit is damaged ({error})") from None


@dataclass(frozen=True)
class Content:
    """A piece in memory: `data` in its dtype and, of an FP8 piece, float32 `scale_inv`."""

    data: Tensor
    scale_inv: Tensor | None = None

    @classmethod
    def of(cls, part: TensorPart, payload: Tensor) -> "Content":
        """Views of uint8 [part.nbytes], at a multiple of four: scales before data."""
        if not part.is_fp8:
            return cls(payload.view(part.torch_dtype).view(part.size))
        return cls(payload[part.scale_bytes :].view(part.torch_dtype).view(part.size), scales_of(part, payload))

    def cut(self, part: TensorPart, region: Region) -> "Content":
        """Views of the region, where this is the content of `part`."""
        if region == part.region:
            return self
        if self.scale_inv is None:
            return Content(self.data[part.local(region)])
        blocks = index(blocks_of(region), blocks_of(part.region))
        return Content(self.data[part.local(region)], self.scale_inv[blocks])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.data,) if self.scale_inv is None else (self.scale_inv, self.data)

    @property
    def digest(self) -> str:
        """The digest of the scales and the data, of the kind for where they are."""
        return digest_of(*self.tensors)

    def matches(self, digest: str) -> bool:
        """Whether the digest, of either kind, is that of the scales and the data."""
        return has_digest(digest, *self.tensors)

    def equals(self, other: "Content") -> bool:
        """Whether both are equal to the bit, on any devices."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return all(torch.equal(bytes_of(a), bytes_of(b.to(a.device))) for a, b in pairs)


def scales_of(part: TensorPart, payload: Tensor) -> Tensor | None:
    if not part.is_fp8:
        return None
    return payload[: part.scale_bytes].view(torch.float32).view(scale_shape(part.size, BLOCK))
