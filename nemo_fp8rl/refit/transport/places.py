"""The places of pieces in an engine rank's memory, into which a source that maps this memory writes them.

A sink offers places, opens them at the begin of a load, and has the source's word, an entry "direct" in a message, that
a piece is in its place. So a source writes only while the sink loads the version that it sends. In JSON an offer is

    {"memory": [what a process needs to map each], "parts": [parts], "places": [[[memory, start, strides], ...], ...]}

with a place for each tensor of a part's `Content`: the number of a memory, the byte at which it begins there, and its
strides in elements.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor

from nemo_fp8rl.refit.manifest import GLOBAL_BYTES, TensorPart, from_json, to_json

if TYPE_CHECKING:
    from nemo_fp8rl.refit.message import Content

Reach = Literal["process", "host", "gpu"]
"""The memory of a sink that a source reaches: that of a thread of the same process, of the host, of a GPU."""
Contents: TypeAlias = "Mapping[str, tuple[TensorPart, Content]]"
"""By name, a part of a tensor and its memory."""
Location = tuple[int, int]
"""(number of a memory, byte at which a tensor begins there)"""


class Places:
    """The places of tensors.

    tensors: by name, (the part of the tensor that is there, its content)
    memory:  what keeps memory of another process mapped
    is_new:  this memory is mapped, and not yet written: the first touch of its pages takes time
    """

    def __init__(self, tensors: Contents, memory: Sequence[Tensor] = ()) -> None:
        self.tensors, self._memory = tensors, memory
        self.is_new = bool(memory)
        self._of_pieces: dict[TensorPart, Content | None] = {}

    def find(self, piece: TensorPart) -> "Content | None":
        """Return views of a piece's place.

        None where the piece has none, and where the quantizer would not write it: matrices must be contiguous.
        """
        if piece not in self._of_pieces:
            self._of_pieces[piece] = self._cut(piece)
        return self._of_pieces[piece]

    def _cut(self, piece: TensorPart) -> "Content | None":
        if piece.name not in self.tensors or not piece.data_bytes:
            return None
        part, whole = self.tensors[piece.name]
        if (part.dtype, part.shape) != (piece.dtype, piece.shape):
            return None
        content = whole.cut(part, piece.region)
        return content if piece.format is None or _has_contiguous_matrices(content) else None


@dataclass(frozen=True)
class Offer:
    """Places that sources may write.

    places: as this process sees them
    reach:  the sources that can reach them
    memory: what `map_memory` of other processes needs
    where:  the locations of each content's tensors, by name
    """

    places: Places
    reach: Reach
    memory: Sequence[Any]
    where: Mapping[str, Sequence[Location]]

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The offer in JSON's types, for `read_offer`."""
        parts, places = [], []
        for name, locations in self.where.items():
            part, content = self.places.tensors[name]
            parts.append(part)
            pairs = zip(locations, content.tensors, strict=True)
            places.append([[*location, tensor.stride()] for location, tensor in pairs])
        return {"memory": self.memory, "parts": to_json(parts), "places": places}


def read_offer(fields: Mapping[str, Any], memory: Sequence[Tensor]) -> Places:
    """Return the places of another process's offer.

    memory: uint8 [nbytes], each memory of the offer as this process maps it
    Raises: ValueError on an offer that does not fit its memory
    """
    from nemo_fp8rl.refit.message import Content  # xxhash, without which links can be imported

    tensors: dict[str, tuple[TensorPart, Content]] = {}
    try:
        for part, located in zip(from_json(fields["parts"]), fields["places"], strict=True):
            pairs = zip(located, _kinds(part), strict=True)
            views = [_view(memory[number], start, strides, *kind) for (number, start, strides), kind in pairs]
            scales = views[-2] if len(views) > 1 else None
            tensors[part.name] = part, Content(views[-1], scales, views[0] if len(views) > 2 else None)
    except (KeyError, IndexError, TypeError, RuntimeError, AttributeError, AssertionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    return Places(tensors, memory)


def _kinds(part: TensorPart) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Return (dtype, shape) of each tensor of a part's content."""
    data = part.torch_dtype, part.data_shape
    if part.format is None:
        return [data]
    scales = [(part.scale_dtype, part.scale_shape), data]
    return [(torch.float32, (part.global_bytes // GLOBAL_BYTES,)), *scales] if part.global_bytes else scales


def _view(memory: Tensor, start: int, strides: Sequence[int], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor in memory. Raises ValueError or RuntimeError where it would end outside."""
    if len(strides) != len(shape) or min((start, *strides)) < 0:
        raise ValueError(f"a place at {start} with strides {strides}")
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0
    within = memory[start : start + extent * dtype.itemsize]
    if within.numel() != extent * dtype.itemsize:
        raise ValueError(f"a place at {start} ends outside a memory of {memory.numel()} bytes")
    return within.view(dtype).as_strided(shape, strides)


def _has_contiguous_matrices(content: "Content") -> bool:
    """Return True where each matrix can be quantized into its place; on a GPU all of a stack by one launch."""
    tensors = [x for x in (content.data, content.scale_inv) if x is not None]
    return all((x[0] if x.dim() > 2 and not x.is_cuda else x).is_contiguous() for x in tensors)
