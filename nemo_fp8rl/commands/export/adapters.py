"""The adapters of an export: merged into the base, or copied beside it for `vllm serve --enable-lora`."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import Self

from torch import Tensor

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.hf.adapter_folder import (
    CONFIG,
    WEIGHTS,
    base_digest,
    read_adapter_folder,
    read_base_name,
    read_folder_adapters,
)
from nemo_fp8rl.hf.adapters import FUSED_NAMES, LORA_A, LORA_B, Adapters
from nemo_fp8rl.hf.checkpoint_reader import CheckpointReader
from nemo_fp8rl.hf.hub import checkpoint_folder
from nemo_fp8rl.hf.model_config import read_hf_config

FOLDER = "adapter"
"""In the output, beside the base."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's --max-lora-rank (config/lora.py, `MaxLoRARanks`)."""


@dataclass(frozen=True)
class CheckpointAdapters:
    """The adapters in a folder of a checkpoint.

    folder:   the folder
    base:     the folder of the base under them
    tensors:  by the names of `hf.adapters.adapter_tensors`
    """

    folder: Path
    base: Path
    adapters: Adapters
    tensors: Mapping[str, Tensor]

    def check_served_beside(self) -> None:
        """Raise UserError where vLLM does not serve these adapters beside a base."""
        if self.adapters.adapts_experts():
            raise UserError(
                f"{self.folder} has adapters of experts, which vLLM's --enable-lora does not compute on a CPU, and "
                "which are untested on GPUs; give --merge"
            )
        if self.adapters.rank > max(RANKS):
            raise UserError(
                f"{self.folder} has adapters of rank {self.adapters.rank}, above the {max(RANKS)} of vLLM's "
                "--enable-lora; give --merge"
            )

    def copy_to(self, output: Path) -> None:
        """Raises: OSError on a full disk"""
        (output / FOLDER).mkdir()
        for name in (CONFIG, WEIGHTS):
            shutil.copyfile(self.folder / name, output / FOLDER / name)

    def command(self, output: Path) -> str:
        """Return the command that serves base and adapters."""
        rank = next(rank for rank in RANKS if rank >= self.adapters.rank)
        names = f"--lora-modules policy={quote(f'{output}/{FOLDER}')}"
        return f"vllm serve {quote(str(output))} --enable-lora --max-lora-rank {rank} {names}"


class MergedReader:
    """A `CheckpointReader` of a base that returns the weights with their adapters.

    A merged weight is W + B A * alpha / rank, computed in float32 and rounded once to the dtype of W.
    """

    def __init__(self, source: CheckpointAdapters) -> None:
        self.base, self.source, self.folder = CheckpointReader(source.base), source, source.folder

    def __enter__(self) -> Self:
        self.base.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.base.__exit__(kind, error, tb)

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        self.base.check(expected)

    def dtype(self, name: str) -> str:
        return self.base.dtype(name)

    def get(self, name: str) -> Tensor:
        weight, module = self.base.get(name), name.removesuffix(".weight")
        if not self.source.adapters.adapts(module):
            return weight
        above, _, leaf = module.rpartition(".")
        a = self.source.tensors[f"{above}.{FUSED_NAMES.get(leaf, leaf)}.{LORA_A}.weight"]
        b = self.source.tensors[f"{module}.{LORA_B}.weight"]
        return (weight.float() + (b.float() @ a.float()) * self.source.adapters.scale).to(weight.dtype)


def read_checkpoint_adapters(checkpoint: Path) -> CheckpointAdapters | None:
    """Return the adapters of a checkpoint folder; None where it has weights.

    Raises: UserError if the folder is not whole, or if its base is not there or another one
    """
    if (checkpoint / "config.json").is_file() or not (checkpoint / CONFIG).is_file():
        return None
    name = read_base_name(checkpoint)
    key = f"{checkpoint / CONFIG}: base_model_name_or_path"
    base = checkpoint_folder(name, key, weights=True)
    if not (base / "config.json").is_file():
        raise UserError(f"{key}={name} is no HF checkpoint folder here; write there where the base is now")
    hf = read_hf_config(base)
    adapters = read_folder_adapters(checkpoint, hf)
    return CheckpointAdapters(
        checkpoint, base, adapters, read_adapter_folder(checkpoint, hf, adapters, base_digest(base))
    )
