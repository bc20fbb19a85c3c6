"""The values of a rank's adapters: their first values, and the folder of a checkpoint in the format of HF's `peft`."""

import math
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.region import region_slices
from nemo_fp8rl.config.policy_schema import AdapterInit, PeftConfig
from nemo_fp8rl.hf.adapter_folder import read_adapter_folder, write_adapter_folder
from nemo_fp8rl.hf.adapters import KEY, LORA_A, Adapters, adapter_tensors
from nemo_fp8rl.hf.hub import TOKENIZER_FILES
from nemo_fp8rl.hf.storage.part_files import PartReader, PartWriter
from nemo_fp8rl.policy.weights.adapter_names import adapters_from_hf
from nemo_fp8rl.policy.weights.layout import Layout

PARTS = "parts"
"""The folder in which ranks write their parts, until the first rank has assembled them."""
FIRST_VALUES: dict[AdapterInit, Callable[[Tensor, torch.Generator], Tensor]] = {
    "xavier": lambda values, generator: nn.init.xavier_normal_(values, generator=generator),
    "kaiming": lambda values, generator: nn.init.kaiming_uniform_(values, math.sqrt(5), generator=generator),
    "normal": lambda values, generator: nn.init.normal_(values, std=0.2, generator=generator),
    "zero": lambda values, _: nn.init.zeros_(values),
}
"""The methods of Megatron-Bridge (peft/utils.py, `_get_init_fn`), for a weight [out, in]."""


@torch.no_grad()
def init_adapters(model: nn.Module, layout: Layout, peft: PeftConfig, seed: int) -> None:
    """Set the first values of the rank's adapters. Each tensor is drawn whole, by its name, so no layout matters."""
    shapes = adapter_tensors(layout.hf, layout.adapters)

    def draw(name: str) -> Tensor:
        shape = shapes[name]
        method = peft.lora_A_init_method if f".{LORA_A}." in name else peft.lora_B_init_method
        generator = torch.Generator().manual_seed(Random(f"{seed} {name}").getrandbits(63))
        values = FIRST_VALUES[method](torch.empty(shape), generator)
        return values[region_slices(layout.region(name, shape))]

    _assign(model, layout, draw)


def save_adapters(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    layout: Layout,
    rank: int,
    tokenizer: Path,
    base_model: str,
    base_digest: str,
) -> Exception | None:
    """Write the adapters and copies of the tokenizer's files; all ranks call it together.

    Returns the error that kept this rank from writing.

    weights:      (name, this rank's part)
    tokenizer:    the folder of the tokenizer
    base_model:   policy.model_name
    base_digest:  of the base (`hf.adapter_folder.base_digest`)
    """
    parts = folder / PARTS
    shapes = adapter_tensors(layout.hf, layout.adapters)
    writer = PartWriter(parts, f"rank_{rank}")
    try:
        parts.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        writer.error = error
    for name, part in weights:
        if layout.is_writer(name):
            writer.add(name, part, tuple(start for start, _ in layout.region(name, shapes[name])))
    writer.close()
    dist.barrier()
    if rank == 0 and writer.error is None:
        try:
            with PartReader(parts) as reader:
                tensors = {name: reader.get(name, tuple((0, n) for n in shape)) for name, shape in shapes.items()}
            write_adapter_folder(folder, layout.hf, layout.adapters, tensors, base_model, base_digest)
            for path in (path for pattern in TOKENIZER_FILES for path in tokenizer.glob(pattern)):
                shutil.copyfile(path, folder / path.name)
            shutil.rmtree(parts)
        except (OSError, SafetensorError) as error:
            writer.error = error
    return writer.error


def check_kind(folder: Path, adapters: Adapters) -> None:
    """Raise UserError where a checkpoint has weights and the run trains adapters, or the other way round."""
    if adapters and not (folder / "adapter").is_dir() and (folder / "weights").is_dir():
        raise UserError(
            f"{folder} has weights and no adapters; set {KEY}.enabled=false, or start a new run with "
            f"policy.model_name={folder}/weights, which trains adapters over them"
        )
    if not adapters and not (folder / "weights").is_dir() and (folder / "adapter").is_dir():
        raise UserError(
            f"{folder} has adapters and no weights; set {KEY}.enabled=true, or merge them by `nemo-fp8rl export "
            f"--checkpoint {folder}/adapter --merge --format bf16` and start a new run with that as policy.model_name"
        )


@torch.no_grad()
def load_adapters(folder: Path, model: nn.Module, layout: Layout, base_digest: str) -> None:
    """Set the rank's adapters from a folder. Raises UserError where it is not of this base and these adapters."""
    tensors = read_adapter_folder(folder, layout.hf, layout.adapters, base_digest)
    _assign(model, layout, lambda name: tensors[name][region_slices(layout.region(name, tuple(tensors[name].shape)))])


def _assign(model: nn.Module, layout: Layout, get: Callable[[str], Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for name, values in adapters_from_hf(layout, get):
        parameters[name].copy_(values)
