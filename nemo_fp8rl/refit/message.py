"""The header and payload of one bucket, the same on every transport.

A bucket is a header in JSON and a payload. The payload is a sequence of entries, each at a multiple of
`route_plan.ALIGNMENT` bytes. A full entry is the scales of a quantized piece (the global scale, then those of blocks)
and its data. A delta entry is the scales and a message of `fp8.delta`. An entry of encoding `tiles` is the scales and a
message of `fp8.kernels.tile_format`, at a multiple of eight bytes. A direct entry has no bytes, because the source has
written the piece into its place (`transport.places`). The digest is that of the piece as the engine will store it, so
it also proves that a delta was applied to the bytes from which it was made.
"""

import json
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from nemo_fp8rl.common.region import Region
from nemo_fp8rl.fp8 import BlockScaled
from nemo_fp8rl.fp8.kernels.tile_format import ROW
from nemo_fp8rl.refit.digest import bytes_of, digest_of, has_digest
from nemo_fp8rl.refit.manifest import RefitError, TensorPart

Encoding = Literal["full", "delta", "tiles", "direct"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)


class Entry(NamedTuple):
    """One piece in a bucket.

    piece:    index of the piece in the route
    encoding: full, direct, or one of the two kinds of deltas
    nbytes:   bytes of the entry in the payload
    digest:   digest of the piece's scales and data, or empty
    """

    piece: int
    encoding: Encoding
    nbytes: int
    digest: str


@dataclass(frozen=True)
class Header:
    """The header of a bucket.

    version:  the version of the weights
    sequence: number of this bucket in its refit on its link, from 0
    entries:  the pieces in the payload, in order
    last:     True for the last bucket of a refit on a link
    abort:    the reason for which the source gave up, or empty; no bucket follows an abort
    """

    version: int
    sequence: int
    entries: tuple[Entry, ...] = ()
    last: bool = False
    abort: str = ""

    def encode(self) -> bytes:
        return json.dumps([self.version, self.sequence, self.entries, self.last, self.abort]).encode()

    @classmethod
    def decode(cls, message: bytes) -> "Header":
        """Decode a header. Raises RefitError on bytes that are not a header."""
        try:
            version, sequence, raw, last, abort = json.loads(message)
            entries = tuple(Entry(int(p), e, int(n), str(d)) for p, e, n, d in raw)
            if any(entry.encoding not in ENCODINGS for entry in entries):
                raise ValueError("an unknown encoding")
            return cls(int(version), int(sequence), entries, bool(last), str(abort))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise RefitError(f"a message of the refit is damaged ({error})") from None


@dataclass(frozen=True)
class Content:
    """The values of a piece in memory.

    data:         the piece in its dtype
    scale_inv:    the block scales of a quantized piece; None for other dtypes
    global_scale: float32 [1], where the format has one; of a stack [matrices]
    """

    data: Tensor
    scale_inv: Tensor | None = None
    global_scale: Tensor | None = None

    @classmethod
    def of(cls, part: TensorPart, payload: Tensor) -> "Content":
        """Return views of uint8 [part.nbytes], scales before data. The payload begins at a multiple of four bytes."""
        data = payload[part.scale_bytes :].view(part.torch_dtype).view(part.data_shape)
        return cls(data, *scales_of(part, payload))

    def cut(self, part: TensorPart, region: Region) -> "Content":
        """Return views of the region, where this is the content of `part`."""
        if region == part.region:
            return self
        if self.scale_inv is None:
            return Content(self.data[part.local(region)])
        data, scales = self.data[part.local_data(region)], self.scale_inv[part.local_scales(region)]
        matrices, factors = part.local(region)[:-2], self.global_scale
        return Content(data, scales, factors[matrices] if factors is not None and matrices else factors)

    def as_block_scaled(self, part: TensorPart) -> BlockScaled:
        """Return the same memory as a tensor of the part's format."""
        assert part.format is not None and self.scale_inv is not None
        is_stack = self.data.dim() > 2
        global_scale = None if self.global_scale is None else self.global_scale if is_stack else self.global_scale[0]
        return BlockScaled(self.data, self.scale_inv, part.format.weight_block, part.format, global_scale)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(x for x in (self.global_scale, self.scale_inv, self.data) if x is not None)

    def copy_(self, other: "Content") -> None:
        """Copy the values of the same piece in other memory."""
        for tensor, source in zip(self.tensors, other.tensors, strict=True):
            tensor.copy_(source)

    @property
    def digest(self) -> str:
        """The digest of the scales and the data; its kind depends on the device: see `digest`."""
        return digest_of(*self.tensors)

    def matches(self, digest: str) -> bool:
        """Return True if the digest, of either kind, is that of the scales and the data."""
        return has_digest(digest, *self.tensors)

    def equals(self, other: "Content") -> bool:
        """Return True if both are equal to the bit; they may be on different devices."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return all(torch.equal(bytes_of(a), bytes_of(b.to(a.device))) for a, b in pairs)


def scales_of(part: TensorPart, payload: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return views of the block scales and of the global scale at the start of a payload; None where there is none."""
    if part.format is None:
        return None, None
    first = part.global_bytes
    block_scales = payload[first : part.scale_bytes].view(part.scale_dtype).view(part.scale_shape)
    return block_scales, payload[:first].view(torch.float32) if first else None


def message_start(part: TensorPart) -> int:
    """Return the bytes before the message of a delta in tiles, in an entry of this part."""
    return -(-part.scale_bytes // ROW) * ROW
