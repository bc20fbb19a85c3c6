"""The delta between two versions of FP8 bytes: a list of changes, small enough to send instead of the bytes.

After an optimizer step at an RL learning rate some 0.4 % of a weight's bytes differ, nearly all of them by one E4M3
step. A delta lists these changes in the order of the bytes:

    gap         number of bytes skipped before this one, 0 ... 65535
    difference  new byte - old byte, modulo 256; a skip of more than 65535 bytes uses entries of difference 0

so entry i describes byte sum(gap[:i+1] + 1) - 1. On the wire the gaps' low bytes, their high bytes and the differences
are one zstd frame each, because high bytes and differences repeat and low bytes do not:

    magic "FP8D" | u64 bytes of the tensor | u64 entries | 3 x u64 frame lengths | 3 frames | u32 CRC-32 of all before

all little-endian. A delta is valid only for the bytes from which it was made: the receiver must have exactly these (the
refit checks versions and digests). `decode` and `apply_` check every bound before the first write.
"""

import struct
import zlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

ESCAPE = 65535
"""The largest gap; an entry with this gap and difference 0 only skips."""
MAX_CHANGED = 1 / 8
"""Share of changed bytes above which no delta is made: all bytes are then as small to send, and faster."""

HEADER = struct.Struct("<4sQQQQQ")
CHECKSUM = struct.Struct("<I")
MAGIC = b"FP8D"
ZSTD_LEVEL = 1
APPLY_CHUNK = 1 << 20
"""Entries applied at a time."""
WORD = 8
"""Bytes compared at a time."""


class DeltaError(ValueError):
    """The delta is damaged, or belongs to another tensor. Nothing was written."""


@dataclass(frozen=True)
class Delta:
    """The list of changes between two versions of a tensor.

    numel:       bytes of the tensor
    gaps:        uint16 [entries], on the tensor's device
    differences: uint8 [entries], on the tensor's device
    """

    numel: int
    gaps: Tensor
    differences: Tensor

    @classmethod
    def from_positions(cls, positions: Tensor, differences: Tensor, numel: int) -> "Delta":
        """Make a delta from the places of the changes.

        positions:   int64 [changes], ascending and distinct
        differences: uint8 [changes], none of them 0
        numel:       bytes of the tensor
        """
        skipped = torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1
        escapes = skipped // (ESCAPE + 1)
        at = torch.arange(len(positions), device=positions.device) + escapes.cumsum(0)
        entries = len(positions) + int(escapes.sum())
        gaps = torch.full((entries,), ESCAPE, dtype=torch.int64, device=positions.device)
        gaps[at] = skipped - escapes * (ESCAPE + 1)
        spread = torch.zeros(entries, dtype=torch.uint8, device=positions.device)
        spread[at] = differences
        return cls(numel, gaps.to(torch.uint16), spread)

    @classmethod
    def between(cls, old: Tensor, new: Tensor) -> "Delta | None":
        """Compare two contiguous tensors of one shape with one byte per value; None above MAX_CHANGED.

        This is the specification of `quantize_delta`'s result.
        """
        a, b = as_bytes(old), as_bytes(new)
        positions = _changed_positions(a, b)
        if len(positions) > MAX_CHANGED * len(a):
            return None
        return cls.from_positions(positions, b[positions] - a[positions], len(a))

    @property
    def changed_bytes(self) -> int:
        return int((self.differences != 0).sum())

    def apply_(self, data: Tensor) -> None:
        """Turn the old bytes into the new ones in place.

        Raises: DeltaError, before anything is written, if the delta does not fit `data`
        """
        if not data.is_contiguous() or data.element_size() != 1:
            raise DeltaError(
                f"a delta is applied to contiguous FP8 bytes, not to {data.dtype} of {tuple(data.stride())}"
            )
        if data.numel() != self.numel:
            raise DeltaError(f"a delta of {self.numel} bytes cannot be applied to a tensor of {data.numel()}")
        self._check()
        flat, last = as_bytes(data), -1
        for gaps, differences in zip(self.gaps.split(APPLY_CHUNK), self.differences.split(APPLY_CHUNK), strict=True):
            positions = ((gaps.long() + 1).cumsum(0) + last).to(flat.device)
            changes = differences.to(flat.device)
            flat.scatter_add_(0, positions, changes)  # three times as fast as flat[positions] += changes
            last += int(gaps.long().sum()) + len(gaps)

    def _check(self) -> None:
        if len(self.gaps) != len(self.differences):
            raise DeltaError(f"a delta of {len(self.gaps)} gaps has {len(self.differences)} differences")
        end = int(self.gaps.long().sum()) + len(self.gaps)
        if end > self.numel:
            raise DeltaError(f"a delta reaches byte {end - 1} of a tensor of {self.numel}")
        skips = self.differences == 0
        if skips.any() and (skips[-1] or (self.gaps[skips].int() != ESCAPE).any()):
            raise DeltaError("a delta lists a change that is none")

    def encode(self) -> bytes:
        """Return the delta in the wire format of this module."""
        import zstandard

        gaps = self.gaps.cpu().numpy().astype("<u2")
        streams = (gaps.astype(np.uint8), (gaps >> 8).astype(np.uint8), self.differences.cpu().numpy())
        compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        frames = [compressor.compress(stream.tobytes()) for stream in streams]
        message = HEADER.pack(MAGIC, self.numel, len(gaps), *map(len, frames)) + b"".join(frames)
        return message + CHECKSUM.pack(zlib.crc32(message))

    @classmethod
    def decode(cls, message: bytes, numel: int) -> "Delta":
        """Read the wire format of a delta for a tensor of `numel` bytes.

        `numel` alone bounds the memory that decoding takes; no number in the message can raise it.

        Raises: DeltaError on every message that `encode` cannot have written for such a tensor
        """
        if len(message) < HEADER.size + CHECKSUM.size:
            raise DeltaError(f"a delta of {len(message)} bytes is cut off")
        magic, announced, entries, *lengths = HEADER.unpack_from(message)
        if magic != MAGIC:
            raise DeltaError("these bytes are not a delta: they begin with another mark")
        if HEADER.size + sum(lengths) + CHECKSUM.size != len(message):
            raise DeltaError(f"a delta announces {sum(lengths)} bytes of content and has {len(message)} in all")
        if zlib.crc32(message[: -CHECKSUM.size]) != CHECKSUM.unpack(message[-CHECKSUM.size :])[0]:
            raise DeltaError("a delta was damaged on its way: its checksum differs")
        if announced != numel:
            raise DeltaError(f"a delta of {announced} bytes cannot be applied to a tensor of {numel}")
        if entries > MAX_CHANGED * numel + numel // (ESCAPE + 1):
            raise DeltaError(f"a delta lists {entries} changes of a tensor of {numel} bytes")
        streams, start = [], HEADER.size
        for length in lengths:
            streams.append(_decompress(message[start : start + length], entries))
            start += length
        low, high, differences = streams
        gaps = low.astype(np.uint16) | (high.astype(np.uint16) << 8)
        delta = cls(numel, torch.from_numpy(gaps), torch.from_numpy(differences))
        delta._check()
        return delta


def as_bytes(data: Tensor) -> Tensor:
    """View a contiguous tensor of one-byte elements as uint8 [numel]."""
    return data.view(torch.uint8).view(-1)


def _changed_positions(a: Tensor, b: Tensor) -> Tensor:
    """Return the ascending positions of bytes that differ, int64 [changes].

    Eight bytes are compared at a time, because nearly all are equal.
    """
    a, b = (x.clone() if x.storage_offset() % WORD else x for x in (a, b))
    whole = len(a) // WORD * WORD
    words = (a[:whole].view(torch.int64) != b[:whole].view(torch.int64)).nonzero()[:, 0]
    inside = (a[:whole].view(-1, WORD)[words] != b[:whole].view(-1, WORD)[words]).nonzero()
    rest = (a[whole:] != b[whole:]).nonzero()[:, 0] + whole
    return torch.cat([words[inside[:, 0]] * WORD + inside[:, 1], rest])


def _decompress(frame: bytes, size: int) -> np.ndarray:
    """Decompress a zstd frame of `size` bytes; the size that it announces is checked before memory is allocated."""
    import zstandard

    try:
        announced = zstandard.get_frame_parameters(frame).content_size
        if announced != size:
            raise DeltaError(f"a stream of a delta announces {announced} bytes instead of {size}")
        content = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DeltaError(f"a stream of a delta cannot be decompressed: {error}") from None
    return np.frombuffer(bytearray(content), np.uint8)
