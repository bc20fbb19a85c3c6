"""Reads and writes a model's weights as an HF checkpoint folder.

Each rank reads only its part; the files hold whole tensors.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemo_fp8rl.common.region import Region, region_slices
from nemo_fp8rl.hf.adapters import is_adapter
from nemo_fp8rl.hf.checkpoint_reader import CheckpointReader
from nemo_fp8rl.hf.config_dtype import write_dtype
from nemo_fp8rl.hf.hub import MODEL_FILES, TOKENIZER_FILES
from nemo_fp8rl.hf.model_tensors import expected_tensors
from nemo_fp8rl.hf.storage.part_files import PartWriter
from nemo_fp8rl.hf.storage.shard_writer import write_index
from nemo_fp8rl.policy.weights.fp8_params import assign
from nemo_fp8rl.policy.weights.hf_names import from_hf
from nemo_fp8rl.policy.weights.layout import EXPERT, Layout


@torch.no_grad()
def load_hf(folder: Path, model: torch.nn.Module, layout: Layout) -> None:
    """Set every parameter of a rank, adapters excepted, from an HF checkpoint folder; nothing else sets them."""
    parameters = {name: p for name, p in model.named_parameters() if not is_adapter(name)}
    shapes = expected_tensors(layout.hf)
    with CheckpointReader(folder) as reader:
        reader.check(shapes)
        for name, tensor in from_hf(layout, lambda name: reader.get(name, layout.region(name, shapes[name]))):
            assign(parameters.pop(name), tensor)
    assert not parameters, f"parameters without a checkpoint tensor: {sorted(parameters)}"


def save_hf(
    folder: Path,
    weights: Iterator[tuple[str, Tensor]],
    dtype: str,
    layout: Layout,
    rank: int,
    model: Path,
    tokenizer: Path,
) -> Exception | None:
    """Write the weights, and copies of the model's config and the tokenizer's files. All ranks call it together.

    Ranks that share a tensor assemble it on the first of them, one tensor at a time. The function returns the error
    that kept this rank from writing and does not raise it, because the other ranks need this rank's parts.

    weights:    (HF name, this rank's part)
    dtype:      the name of their dtype, for config.json
    model:      the folder of the model's config
    tokenizer:  the folder of the tokenizer
    """
    writer = PartWriter(folder, f"model-rank{rank:05d}")
    try:
        folder.mkdir(exist_ok=True)  # another rank may have made it; a parent must exist
        for source, patterns in ((model, MODEL_FILES), (tokenizer, TOKENIZER_FILES)) if rank == 0 else ():
            for path in (path for pattern in patterns for path in source.glob(pattern)):
                shutil.copyfile(path, folder / path.name)  # some filesystems refuse to set modes and times
        if rank == 0:
            write_dtype(folder / "config.json", dtype)
    except OSError as error:
        writer.error = error
    shapes = expected_tensors(layout.hf)
    for name, part in weights:
        if not layout.is_replica(name):
            tensor = _gather_tensor(name, part, shapes[name], layout)
            if layout.sharing_axis(name).rank == 0:
                writer.add(name, tensor)
    writer.close()
    dist.barrier()
    if rank == 0 and writer.error is None:
        try:
            _rename_as_hf(folder)
        except (OSError, SafetensorError) as error:
            writer.error = error
    return writer.error


def _gather_tensor(name: str, part: Tensor, shape: tuple[int, ...], layout: Layout) -> Tensor:
    """Return the whole tensor on the first of the ranks that share it."""
    if not layout.is_split(name):
        return part
    if EXPERT.search(name):
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    return assemble_on_first(part, layout.region(name, shape), shape, group)


def assemble_on_first(part: Tensor | None, region: Region, shape: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return a tensor of which each rank of the group has a region; it is whole on the first rank, garbage on others.

    Bytes are added to zeros, so that every bit arrives, also the sign of -0.
    part:  this rank's region; None on a rank that has nothing
    """
    if group.size() == 1 and part is not None:
        return part.view(tuple(shape))
    out = torch.zeros(tuple(shape), dtype=torch.float32 if part is None else part.dtype)
    if part is not None:
        out[region_slices(region)] = part
    dist.reduce(out.view(torch.uint8), group_dst=0, group=group)
    return out


def _rename_as_hf(folder: Path) -> None:
    """Name a single file model.safetensors; write an index for several files.

    None of several files may have that name, because HF's tools would then read it alone and not the index.
    """
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        files[0].rename(folder / "model.safetensors")
    else:
        weight_map: dict[str, str] = {}
        for path in files:
            with safe_open(path, framework="pt") as opened:
                weight_map |= dict.fromkeys(opened.keys(), path.name)
        write_index(folder, weight_map, {})
