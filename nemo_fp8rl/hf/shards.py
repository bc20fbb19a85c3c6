"""Writing an HF checkpoint one tensor at a time: safetensors files that never exist whole in memory.

Shapes and dtypes are known beforehand, and so is every byte's place: a file's header is written first, then each tensor
where it belongs, whichever comes first. (The library's own `save_file` takes all tensors of a file at once.)
Format: https://github.com/huggingface/safetensors#format.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Self

import torch
from torch import Tensor

from nemo_fp8rl.fp8.format import E4M3

FILE_BYTES = 4 << 30
"""What a file holds at most, unless a single tensor is larger."""
DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", E4M3: "F8_E4M3"}
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Spec:
    """A tensor that is to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ShardWriter:
    """`with ShardWriter(folder, specs) as writer`: `write` every tensor of `specs` once, in about their order.

    One file is called model.safetensors; several are model-00001-of-0000N.safetensors, with an index, written at the
    end. All are synced. Raises OSError when the disk is full.
    """

    def __init__(self, folder: Path, specs: Mapping[str, Spec], file_bytes: int = FILE_BYTES) -> None:
        self.folder, self.specs = folder, specs
        self.nbytes = sum(spec.nbytes for spec in specs.values())
        groups = _grouped(specs, file_bytes)
        names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
        self.files = dict(zip(names if len(groups) > 1 else ["model.safetensors"], groups, strict=True))
        self._file_of = {name: file for file, group in self.files.items() for name in group}
        self._missing = Counter(self._file_of.values())
        self._offsets: dict[str, int] = {}  # of the tensors of open files, in bytes
        self._open: dict[str, BinaryIO] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for file in self._open.values():
            file.close()
        if kind is None:
            assert not self._missing.total(), f"{self._missing.total()} tensors were not written"
            if len(self.files) > 1:
                self._write_index()

    def write(self, name: str, tensor: Tensor) -> None:
        """tensor: as its spec says; of any strides."""
        found = Spec(tensor.dtype, tuple(tensor.shape))
        assert found == self.specs[name], (name, found, self.specs[name])
        path = self._file_of[name]
        if path not in self._open:
            self._begin(path)
        file = self._open[path]
        file.seek(self._offsets.pop(name))  # KeyError: a tensor comes once
        file.write(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
        self._missing[path] -= 1
        if not self._missing[path]:
            with self._open.pop(path):
                _sync(file)

    def _write_index(self) -> None:
        with open(self.folder / INDEX, "w") as file:
            json.dump({"metadata": {"total_size": self.nbytes}, "weight_map": self._file_of}, file, indent=1)
            _sync(file)

    def _begin(self, path: str) -> None:
        """Write the header. Wide dtypes go first, so that every tensor is aligned to its elements."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets, end = {}, 0
        for name in sorted(self.files[path], key=lambda name: -self.specs[name].dtype.itemsize):
            spec = self.specs[name]
            offsets[name], end = end, end + spec.nbytes
            header[name] = {"dtype": DTYPES[spec.dtype], "shape": spec.shape, "data_offsets": [offsets[name], end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file = self._open[path] = open(self.folder / path, "wb")  # noqa: SIM115 (closed when full, or by __exit__)
        file.write(len(text).to_bytes(8, "little") + text)
        self._offsets |= {name: 8 + len(text) + offset for name, offset in offsets.items()}


def _grouped(specs: Mapping[str, Spec], file_bytes: int) -> list[list[str]]:
    """The names of each file's tensors."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, spec in specs.items():
        if groups[-1] and filled + spec.nbytes > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += spec.nbytes
    return groups


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
