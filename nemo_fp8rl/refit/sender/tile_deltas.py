"""The deltas that a GPU packs (`fp8.kernels.tile_format`): the host waits once for the sizes of many of them.

The GPU packs piece after piece into memory of its own. Only when a group is complete does the host read how long the
messages are, and copies them into buckets. A piece of which too much changed is then sent whole.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nemo_fp8rl.fp8.kernels.tile_delta import kernels_for
from nemo_fp8rl.fp8.kernels.tile_format import MAX_BYTES, ROW, body_capacity, body_start
from nemo_fp8rl.refit.deferred_checks import PendingDigest
from nemo_fp8rl.refit.manifest import TensorPart
from nemo_fp8rl.refit.message import message_start
from nemo_fp8rl.refit.sender.push import Piece, Push

GROUP_BYTES, GROUP_PIECES = 1 << 27, 256
"""The pieces of a group stand for at most so many bytes; their messages take up to 3/8 of that on the GPU."""


class Packed(NamedTuple):
    """A piece that is packed. payload: all of its bytes; message: memory of scales and message; digest: of the piece"""

    piece: Piece
    payload: Tensor
    message: Tensor
    digest: PendingDigest


class TileDeltas:
    """The group of one push.

    Its pieces are sent later than pieces that go whole. That stalls no link (`module_order`): every engine writes them
    in place, so that no module waits for them.
    """

    def __init__(self, push: Push) -> None:
        self.push = push
        self.group: list[Packed] = []
        self.nbytes = 0
        self.used: Tensor | None = None
        """int32 [GROUP_PIECES], bytes of each message's body, which the GPU counts."""

    @property
    def is_full(self) -> bool:
        return self.nbytes >= GROUP_BYTES or len(self.group) == GROUP_PIECES

    def add(self, piece: Piece, base: Tensor, payload: Tensor, digest: PendingDigest) -> None:
        """Pack what differs from the base, without waiting for the GPU.

        base, payload: uint8 [part.nbytes], scales and data: as they were sent last, and as they are now
        """
        part = piece.part
        kernels = kernels_for(payload)
        assert kernels is not None
        if self.used is None:
            self.used = torch.zeros(GROUP_PIECES, dtype=torch.int32, device=payload.device)
        start = message_start(part)
        size = start + body_start(part.data_bytes) + body_capacity(part.data_bytes)
        message = torch.empty(size, dtype=torch.uint8, device=payload.device)
        message[: part.scale_bytes] = payload[: part.scale_bytes]
        used = self.used[len(self.group) :]
        kernels.pack(base[part.scale_bytes :], payload[part.scale_bytes :], message[start:], used)
        self.group.append(Packed(piece, payload, message, digest))
        self.nbytes += part.data_bytes

    def flush(self) -> None:
        """Wait until the group is packed, and add it to the buckets of its links."""
        if not self.group:
            return
        assert self.used is not None
        group, used, self.group, self.used, self.nbytes = self.group, self.used, [], None, 0
        with self.push.report.time_stage("encode"):
            sizes = used.tolist()
        for packed, size in zip(group, sizes, strict=False):
            part = packed.piece.part
            is_delta = size <= body_capacity(part.data_bytes)
            nbytes = message_start(part) + body_start(part.data_bytes) + size if is_delta else part.nbytes
            if (entry := self.push.reserve(packed.piece, nbytes)) is not None:
                entry.copy_((packed.message if is_delta else packed.payload)[:nbytes])
                self.push.add(packed.piece, entry, "tiles" if is_delta else "full", packed.digest)


def can_pack(part: TensorPart, base: Tensor) -> bool:
    """Return whether the deltas of a piece are packed where its bytes are."""
    return kernels_for(base) is not None and part.data_bytes <= MAX_BYTES


def empty_payload(part: TensorPart, device: torch.device) -> Tensor:
    """Return memory, uint8 [part.nbytes], for scales and data; the data begin at a multiple of 8 bytes, if they can.

    Bytes are then compared eight at a time. Scales of four bytes begin at a multiple of four in any case.
    """
    before = -part.scale_bytes % ROW
    before = before if before % 4 == 0 else 0
    return torch.empty(before + part.nbytes, dtype=torch.uint8, device=device)[before:]
