"""Tensors on disk in parts: every rank writes its parts, and any rank reads any region, whichever rank wrote it.

The format is a folder of safetensors files. A part has the name of its tensor, followed by its start if that is not the
tensor's first element (`NAME@ROW,COLUMN`), so a file may contain several parts of one tensor.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.region import Region, overlap, region_at, region_slices, shape_of
from nemo_fp8rl.hf.storage.safetensors_file import write_safetensors

FILE_BYTES = 4 << 30
"""Bytes that wait in host memory before a file is written."""
START_MARK = "@"


class PartWriter:
    """A writer of `{name}.safetensors`, `{name}-2.safetensors`, ...: `add` every part, then `close`.

    An error while writing is stored in `error` and not raised, and nothing more is written: a rank on a full disk must
    still take part in the collectives of all ranks.
    """

    def __init__(self, folder: Path, name: str, file_bytes: int = FILE_BYTES) -> None:
        self.folder, self.name, self.file_bytes, self.files = folder, name, file_bytes, 0
        self.waiting: dict[str, Tensor] = {}
        self.waiting_bytes = 0
        self.error: Exception | None = None

    def add(self, name: str, part: Tensor, start: tuple[int, ...] | None = None) -> None:
        """Add the part of tensor `name` that begins at `start`; None means the whole tensor."""
        if self.error is not None:
            return
        key = f"{name}{START_MARK}{','.join(map(str, start))}" if start is not None and any(start) else name
        self.waiting[key] = part.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self.waiting_bytes += part.numel() * part.element_size()
        if self.waiting_bytes >= self.file_bytes:
            self._write()

    def close(self) -> None:
        if self.waiting:
            self._write()

    def _write(self) -> None:
        self.files += 1
        suffix = f"-{self.files}" if self.files > 1 else ""
        try:
            write_safetensors(self.waiting, self.folder / f"{self.name}{suffix}.safetensors")
        except (OSError, SafetensorError) as error:
            self.error = error
        self.waiting, self.waiting_bytes = {}, 0


class PartReader:
    """A reader that loads only what `get` returns: `with PartReader(folder) as reader: reader.get(name, region)`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._parts: dict[str, list[tuple[Any, str, Region]]] = {}

    def __enter__(self) -> Self:
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                opened = self._stack.enter_context(safe_open(path, framework="pt"))
                for key in opened.keys():  # noqa: SIM118 (not a dict)
                    shape = opened.get_slice(key).get_shape()
                    name, _, start = key.partition(START_MARK)
                    region = region_at([int(n) for n in start.split(",")] if start else [0] * len(shape), shape)
                    self._parts.setdefault(name, []).append((opened, key, region))
            except (SafetensorError, OSError, ValueError) as error:
                self._stack.close()
                raise UserError(f"{path} is not a whole safetensors file of parts ({error})") from None
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UserError unless every part belongs to one of these tensors and is within its shape."""
        for name, parts in self._parts.items():
            if name not in shapes:
                raise UserError(f"{self.folder} holds {name}, which this model does not have")
            shape = shapes[name]
            for _, key, region in parts:
                stops = tuple(stop for _, stop in region)
                if len(stops) != len(shape) or any(stop > size for stop, size in zip(stops, shape, strict=True)):
                    raise UserError(f"{self.folder}: {key} ends at {stops}, but in this model {name} has shape {shape}")

    def get(self, name: str, region: Region) -> Tensor:
        """Assemble a region from the parts. Raises UserError unless they contain each element of it exactly once."""
        parts = [(opened, key, part, overlap(part, region)) for opened, key, part in self._parts.get(name, [])]
        sources = [(opened, key, part, common) for opened, key, part, common in parts if common is not None]
        if any(overlap(a, b) for (*_, a), (*_, b) in combinations(sources, 2)):
            raise UserError(f"{self.folder} holds some of {name} twice; it is no checkpoint of one save")
        out: Tensor | None = None
        missing = torch.Size(shape_of(region)).numel()
        for opened, key, part, common in sources:
            values = opened.get_slice(key)[region_slices(common, part)]
            if out is None:
                out = values.new_empty(shape_of(region))
            out[region_slices(common, region)] = values
            missing -= values.numel()
        if out is None or missing:
            raise UserError(f"{self.folder} does not hold all of {name}; the checkpoint is not complete")
        return out
