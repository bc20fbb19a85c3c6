"""A lazy reader of HF checkpoints: one tensor at a time, from one or many safetensors files."""

from collections.abc import Mapping, Set
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.region import Region, full_region, region_slices
from nemo_fp8rl.hf.hub import WEIGHTS
from nemo_fp8rl.hf.model_tensors import EMBEDDING, HEAD

DTYPES = ("BF16", "F16", "F32")
"""Dtypes of tensors that are weights by themselves, without a scale."""
ROWS = 1024
"""Rows of head and embedding that are compared at a time."""


class CheckpointReader:
    """A lazy reader, which loads no whole file: `with CheckpointReader(folder) as reader: reader.get(name, region)`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}

    def __enter__(self) -> Self:
        from safetensors import SafetensorError, safe_open

        paths = sorted(self.folder.glob(WEIGHTS))
        if not paths:
            raise UserError(f"{self.folder} has no .safetensors file; give an HF checkpoint folder")
        for path in paths:
            try:
                opened = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                self._stack.close()
                raise UserError(f"{path} is not a whole safetensors file ({error}); copy it again") from None
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                if name in self._file_of:
                    raise UserError(f"{self.folder} holds {name} in two files, one is {path.name}; remove one of them")
                self._file_of[name] = opened
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    @property
    def names(self) -> Set[str]:
        return self._file_of.keys()

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UserError unless the checkpoint has exactly the expected tensors, in 16 or 32 bits.

        A model with tied embeddings may have a head as well (as Qwen3-0.6B does); its values must be those of the
        embedding, and it is dropped.

        expected: shapes by HF name
        """
        tied = HEAD not in expected and HEAD in self._file_of and EMBEDDING in expected
        required = {**expected, HEAD: expected[EMBEDDING]} if tied else expected
        missing = sorted(set(required) - set(self._file_of))
        extra = sorted(set(self._file_of) - set(required))
        if missing:
            raise UserError(f"{self.folder} lacks {_list_names(missing)}; the checkpoint is incomplete")
        if extra:
            raise UserError(f"{self.folder} holds {_list_names(extra)}, which config.json does not describe")
        for name, shape in required.items():
            actual = self.shape(name)
            if actual != tuple(shape):
                raise UserError(f"{self.folder}: {name} has shape {list(actual)}, config.json asks for {list(shape)}")
            if self.dtype(name) not in DTYPES:
                raise UserError(
                    f"{self.folder}: {name} is {self.dtype(name)}; give the bfloat16 checkpoint that it was made from"
                )
        if tied:
            if not self._are_equal(HEAD, EMBEDDING, expected[EMBEDDING]):
                raise UserError(f"{self.folder}: config.json ties {HEAD} to {EMBEDDING}, but their values differ")
            del self._file_of[HEAD]

    def _are_equal(self, first: str, second: str, shape: tuple[int, ...]) -> bool:
        """Return whether two tensors have the same values; reads a few rows at a time, because every rank calls it."""
        for start in range(0, shape[0], ROWS):
            region = ((start, min(start + ROWS, shape[0])), *full_region(shape[1:]))
            if not torch.equal(self.get(first, region).float(), self.get(second, region).float()):
                return False
        return True

    def dtype(self, name: str) -> str:
        """Return the tensor's dtype as safetensors spells it, such as BF16."""
        return self._file_of[name].get_slice(name).get_dtype()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def get(self, name: str, region: Region | None = None) -> Tensor:
        """Read the tensor, or only this region of it."""
        if region is None:
            return self._file_of[name].get_tensor(name)
        return self._file_of[name].get_slice(name)[region_slices(region)]


def _list_names(names: list[str]) -> str:
    return f"{len(names)} tensors, among them {names[0]}" if len(names) > 1 else f"the tensor {names[0]}"
