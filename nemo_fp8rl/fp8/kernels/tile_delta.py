"""A delta in tiles (`tile_format`): found and packed, checked, and applied.

What is here in torch is the specification, and what a CPU uses. `triton_tiles` has the kernels, for a GPU with Triton.
"""

from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from nemo_fp8rl.fp8.delta import DeltaError
from nemo_fp8rl.fp8.kernels import load_triton
from nemo_fp8rl.fp8.kernels.tile_format import HEADER, MAGIC, MAX_BYTES, ROW, TILE, body_capacity, body_start, tiles_of


def kernels_for(tensor: Tensor) -> ModuleType | None:
    """Return `triton_tiles` where it runs on the tensor's device; else None."""
    return load_triton("triton_tiles") if tensor.is_cuda else None


def pack(old: Tensor, new: Tensor) -> Tensor | None:
    """Return the message, uint8 [bytes], of what differs between uint8 [numel] on a CPU; None above `body_capacity`."""
    numel = len(old)
    positions = (old != new).nonzero()[:, 0]
    tiles, offsets = positions // TILE, positions % TILE
    counts = torch.bincount(tiles, minlength=tiles_of(numel))
    sizes = _part_sizes(counts)
    if (body_bytes := int(sizes.sum())) > body_capacity(numel):
        return None
    starts = sizes.cumsum(0) - sizes
    message = torch.zeros(body_start(numel) + body_bytes, dtype=torch.uint8)
    message[: HEADER.size] = torch.frombuffer(bytearray(HEADER.pack(MAGIC, TILE, numel)), dtype=torch.uint8)
    table = torch.stack([starts, counts], 1).to(torch.int32)
    message[HEADER.size : body_start(numel)] = table.view(-1).view(torch.uint8)
    body = message[body_start(numel) :]
    place = torch.arange(len(positions)) - (counts.cumsum(0) - counts)[tiles]  # in its tile
    at = starts[tiles] + 2 * place
    body[at], body[at + 1] = (offsets & 255).to(torch.uint8), (offsets >> 8).to(torch.uint8)
    body[starts[tiles] + 2 * counts[tiles] + place] = new[positions] - old[positions]
    return message


def _part_sizes(counts: Tensor) -> Tensor:
    """Return the bytes in the body of tiles with so many changes."""
    return 3 * counts + counts % 2


@dataclass(frozen=True)
class TileDelta:
    """A delta as it arrived.

    numel:    bytes of the tensor
    message:  uint8 [bytes]
    verdict:  int64 [] on the message's GPU, where a kernel checks the message: 0 if it is valid. None: it is
    """

    numel: int
    message: Tensor
    verdict: Tensor | None = field(default=None, repr=False)

    @classmethod
    def decode(cls, message: Tensor, numel: int) -> "TileDelta":
        """Read a message, uint8 [bytes], for a tensor of `numel` bytes.

        Raises: DeltaError on a message that no sender can have made for such a tensor; of one on a GPU only where its
                length shows that, and the rest is in `verdict`
        """
        if not 0 <= len(message) - body_start(numel) <= body_capacity(numel) or numel > MAX_BYTES:
            raise DeltaError(f"a delta in tiles of {len(message)} bytes cannot be one of a tensor of {numel} bytes")
        if (kernels := kernels_for(message)) is not None:
            message = message if message.data_ptr() % ROW == 0 else message.clone()
            return cls(numel, message, kernels.check(message, numel))
        message = message.cpu()
        _check(message, numel)
        return cls(numel, message)

    def apply_(self, data: Tensor) -> None:
        """Turn the old bytes into the new ones in place; on a GPU only if the verdict is that the message is valid.

        data:   any dtype and strides, `numel` bytes
        Raises: DeltaError, before anything is written, if the delta does not fit `data`
        """
        if data.nbytes != self.numel:
            raise DeltaError(f"a delta of {self.numel} bytes cannot be applied to a tensor of {data.nbytes}")
        if (kernels := kernels_for(data)) is not None:
            kernels.apply_(data, self.message.to(data.device), self.verdict)
            return
        message = self.message.cpu()
        if self.verdict is not None:
            _check(message, self.numel)
        contiguous = data.contiguous()
        positions, differences = _changes(message, self.numel)
        bytes_of_data = contiguous.view(-1).view(torch.uint8)
        bytes_of_data.scatter_add_(0, positions.to(data.device), differences.to(data.device))
        if contiguous.data_ptr() != data.data_ptr():
            data.copy_(contiguous)


def _check(message: Tensor, numel: int) -> None:
    """Raise DeltaError unless this message on a CPU is one that `pack`, or its kernel, can have made."""
    magic, tile, announced = HEADER.unpack(message[: HEADER.size].numpy().tobytes())
    if (magic, tile) != (MAGIC, TILE):
        raise DeltaError("these bytes are not a delta in tiles: they begin with another mark")
    if announced != numel:
        raise DeltaError(f"a delta of {announced} bytes cannot be applied to a tensor of {numel}")
    starts, counts = _table(message, numel)
    lengths = (numel - TILE * torch.arange(len(counts))).clamp_(max=TILE)
    if (counts < 0).any() or (counts > lengths).any() or (starts % 2 != 0).any():
        raise DeltaError("a delta in tiles lists changes that a tile cannot have")
    used = counts > 0
    order = starts[used].argsort()
    first, sizes = starts[used][order], _part_sizes(counts[used])[order]
    if not torch.equal(first, sizes.cumsum(0) - sizes) or int(sizes.sum()) != len(message) - body_start(numel):
        raise DeltaError("a delta in tiles does not fill its body, each byte once")
    positions, differences = _changes(message, numel)
    tiles = torch.repeat_interleave(torch.arange(len(counts)), counts)
    if (positions >= (TILE * tiles + lengths[tiles])).any() or (positions.diff() <= 0).any():
        raise DeltaError("a delta in tiles lists a change outside of its tile, or out of order")
    if (differences == 0).any():
        raise DeltaError("a delta lists a change that is none")


def _table(message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return (starts, counts), int64 [tiles]."""
    table = message[HEADER.size : body_start(numel)].clone().view(torch.int32).view(-1, 2).long()
    return table[:, 0], table[:, 1]


def _changes(message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return (positions, int64 [changes], ascending in a valid message; differences, uint8 [changes])."""
    starts, counts = _table(message, numel)
    tiles = torch.repeat_interleave(torch.arange(len(counts)), counts)
    place = torch.arange(len(tiles)) - (counts.cumsum(0) - counts)[tiles]
    body = message[body_start(numel) :]
    at = starts[tiles] + 2 * place
    offsets = body[at].long() | (body[at + 1].long() << 8)
    return TILE * tiles + offsets, body[starts[tiles] + 2 * counts[tiles] + place]
