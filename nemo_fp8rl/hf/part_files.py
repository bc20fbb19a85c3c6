"""Tensors on disk in parts: every rank writes what it holds, any rank reads the region it needs, whoever wrote it.

A folder of safetensors files. A part is named as its tensor is, with where it begins behind it if that is not the
tensor's first element (`NAME@ROW,COLUMN`): several of one tensor may be in a file.
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
from nemo_fp8rl.common.region import Region, index, overlap, placed, shape_of
from nemo_fp8rl.hf.safetensors_file import write_safetensors

FILE_BYTES = 4 << 30
"""A file is written when this much is waiting for it, on the host."""
AT = "@"


class PartWriter:
    """`add` parts, then `close`. Files are `{name}.safetensors`, `{name}-2.safetensors`, ...

    An error is kept in `error` and ends the writing, not the caller: a rank on a full disk goes on to take part in what
    the ranks do together.
    """

    def __init__(self, folder: Path, name: str, file_bytes: int = FILE_BYTES) -> None:
        self.folder, self.name, self.file_bytes, self.files = folder, name, file_bytes, 0
        self.waiting: dict[str, Tensor] = {}
        self.waiting_bytes = 0
        self.error: Exception | None = None

    def add(self, name: str, part: Tensor, start: tuple[int, ...] | None = None) -> None:
        """The part of tensor `name` that begins at `start`; None: all of it."""
        if self.error is not None:
            return
        key = f"{name}{AT}{','.join(map(str, start))}" if start is not None and any(start) else name
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
    """`with PartReader(folder) as reader: reader.get(name, region)`. Only what is asked for is read."""

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
                    name, _, start = key.partition(AT)
                    held = placed([int(n) for n in start.split(",")] if start else [0] * len(shape), shape)
                    self._parts.setdefault(name, []).append((opened, key, held))
            except (SafetensorError, OSError, ValueError) as error:
                self._stack.close()
                raise UserError(f"{path} is not a whole safetensors file of parts ({error})") from None
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises UserError unless every part is of one of these tensors and within its shape."""
        for name, parts in self._parts.items():
            if name not in shapes:
                raise UserError(f"{self.folder} holds {name}, which this model does not have")
            shape = shapes[name]
            for _, key, held in parts:
                stops = tuple(stop for _, stop in held)
                if len(stops) != len(shape) or any(stop > size for stop, size in zip(stops, shape, strict=True)):
                    raise UserError(f"{self.folder}: {key} ends at {stops}, but in this model {name} has shape {shape}")

    def get(self, name: str, region: Region) -> Tensor:
        """The region, put together from the parts. Raises UserError unless they hold each element of it once."""
        parts = [(part, key, held, overlap(held, region)) for part, key, held in self._parts.get(name, [])]
        found = [(part, key, held, common) for part, key, held, common in parts if common is not None]
        if any(overlap(a, b) for (*_, a), (*_, b) in combinations(found, 2)):
            raise UserError(f"{self.folder} holds some of {name} twice; it is no checkpoint of one save")
        out: Tensor | None = None
        missing = torch.Size(shape_of(region)).numel()
        for opened, key, held, common in found:
            part = opened.get_slice(key)[index(common, held)]
            if out is None:
                out = part.new_empty(shape_of(region))
            out[index(common, region)] = part
            missing -= part.numel()
        if out is None or missing:
            raise UserError(f"{self.folder} does not hold all of {name}; the checkpoint is not complete")
        return out
