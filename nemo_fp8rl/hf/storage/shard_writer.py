"""A writer of HF checkpoints in files of limited size: model.safetensors, or several files and an index."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from nemo_fp8rl.hf.storage.safetensors_file import write_safetensors

FILE_BYTES = 1 << 30
"""Most bytes of a file, unless a single tensor is larger, and so of the tensors that wait in memory."""


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of a tensor to write."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_index(folder: Path, weight_map: Mapping[str, str], metadata: Mapping[str, int]) -> None:
    """Write the index of a checkpoint of several files.

    weight_map: file by the tensor's name
    metadata:   total_size, in bytes
    """
    text = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text + "\n")


class ShardWriter:
    """A writer that stores a file as soon as `write` has received all its tensors.

    Use it as `with ShardWriter(folder, specs) as writer`, and `write` every tensor of `specs` once, in their order.

    Raises: OSError or SafetensorError, for example on a full disk
    """

    def __init__(self, folder: Path, specs: Mapping[str, TensorSpec], file_bytes: int = FILE_BYTES) -> None:
        self.folder, self.specs = folder, specs
        self.nbytes = sum(spec.nbytes for spec in specs.values())
        groups = _group_by_file(specs, file_bytes)
        names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
        self.files = dict(zip(names if len(groups) > 1 else ["model.safetensors"], groups, strict=True))
        self._missing = {file: set(group) for file, group in self.files.items()}
        self._waiting: dict[str, Tensor] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            assert not self._missing, f"not written: {self._missing}"
            if len(self.files) > 1:
                weight_map = {name: file for file, group in self.files.items() for name in group}
                write_index(self.folder, weight_map, {"total_size": self.nbytes})

    def write(self, name: str, tensor: Tensor) -> None:
        """Add the next tensor; its dtype and shape must be those of its spec."""
        actual = TensorSpec(tensor.dtype, tuple(tensor.shape))
        assert actual == self.specs[name], (name, actual, self.specs[name])
        file, missing = next(iter(self._missing.items()))
        missing.remove(name)  # KeyError: out of order
        self._waiting[name] = tensor
        if not missing:
            write_safetensors(self._waiting, self.folder / file)
            self._waiting.clear()
            del self._missing[file]


def _group_by_file(specs: Mapping[str, TensorSpec], file_bytes: int) -> list[list[str]]:
    """Return the names of the tensors of each file."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, spec in specs.items():
        if groups[-1] and filled + spec.nbytes > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += spec.nbytes
    return groups
