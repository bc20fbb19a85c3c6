"""Tensors on disk in parts: every rank writes what it holds, any rank reads the region it needs, whoever wrote it.

A folder of safetensors files; a part keeps the name of its tensor, and the header says where in it the part begins.
"""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nemo_fp8rl.errors import UserError
from nemo_fp8rl.hf.region import Region, index, overlap, placed, shape_of

FILE_BYTES = 4 << 30
"""A file is written when this much is waiting for it."""
STARTS = "starts"


class PartWriter:
    """`add` parts, then `close`. Files are `{name}.safetensors`, `{name}-2.safetensors`, ...

    An error is kept in `error` and ends the writing, not the caller: a rank on a full disk goes on to take part in what
    the ranks do together.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.files = folder, name, 0
        self.waiting: dict[str, Tensor] = {}
        self.waiting_bytes = 0
        self.starts: dict[str, tuple[int, ...]] = {}
        self.error: Exception | None = None

    def add(self, name: str, part: Tensor, start: tuple[int, ...] | None = None) -> None:
        """The part of tensor `name` that begins at `start`; None: all of it."""
        self.waiting[name] = part.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self.waiting_bytes += part.numel() * part.element_size()
        if start is not None and any(start):
            self.starts[name] = start
        if self.waiting_bytes >= FILE_BYTES:
            self._write()

    def close(self) -> None:
        if self.waiting:
            self._write()

    def _write(self) -> None:
        self.files += 1
        suffix = f"-{self.files}" if self.files > 1 else ""
        metadata = {"format": "pt"} | ({STARTS: json.dumps(self.starts)} if self.starts else {})
        try:
            if self.error is None:
                save_file(self.waiting, self.folder / f"{self.name}{suffix}.safetensors", metadata=metadata)
        except (OSError, SafetensorError) as error:
            self.error = error
        self.waiting, self.waiting_bytes, self.starts = {}, 0, {}


class PartReader:
    """`with PartReader(folder) as reader: reader.get(name, region)`. Only what is asked for is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._parts: dict[str, list[tuple[Any, Region]]] = {}

    def __enter__(self) -> Self:
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                opened = self._stack.enter_context(safe_open(path, framework="pt"))
                starts = json.loads((opened.metadata() or {}).get(STARTS, "{}"))
            except (SafetensorError, OSError, ValueError) as error:
                self._stack.close()
                raise UserError(f"{path} is not a whole safetensors file ({error})") from None
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                shape = opened.get_slice(name).get_shape()
                held = placed(starts.get(name, [0] * len(shape)), shape)
                self._parts.setdefault(name, []).append((opened, held))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def get(self, name: str, region: Region) -> Tensor:
        """The region, put together from the parts. Raises UserError when they do not hold all of it."""
        out: Tensor | None = None
        missing = torch.Size(shape_of(region)).numel()
        for opened, held in self._parts.get(name, []):
            common = overlap(held, region)
            if common is not None:
                part = opened.get_slice(name)[index(common, held)]
                if out is None:
                    out = part.new_empty(shape_of(region))
                out[index(common, region)] = part
                missing -= part.numel()
        if out is None or missing:
            raise UserError(f"{self.folder} does not hold all of {name}; the checkpoint is not complete")
        return out
