"""A model's weights from and to an HF checkpoint folder: each rank reads its part alone; files hold whole tensors."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemo_fp8rl.common.region import Region, index
from nemo_fp8rl.hf.checkpoint_reader import CheckpointReader
from nemo_fp8rl.hf.hub import MODEL_FILES, TOKENIZER_FILES
from nemo_fp8rl.hf.model_tensors import expected_tensors
from nemo_fp8rl.hf.part_files import PartWriter
from nemo_fp8rl.hf.shard_writer import write_index
from nemo_fp8rl.policy.weights.fp8_params import assign
from nemo_fp8rl.policy.weights.hf_names import from_hf
from nemo_fp8rl.policy.weights.layout import EXPERT, Layout


@torch.no_grad()
def load_hf(folder: Path, model: torch.nn.Module, layout: Layout) -> None:
    """Copy weights that `save_hf` (or anyone) wrote into a rank's parameters, which nothing else sets: all of each."""
    parameters = dict(model.named_parameters())
    shapes = expected_tensors(layout.hf)
    with CheckpointReader(folder) as reader:
        reader.check(shapes)
        for name, tensor in from_hf(layout, lambda name: reader.get(name, layout.region(name, shapes[name]))):
            assign(parameters.pop(name), tensor)
    assert not parameters, f"parameters without a checkpoint tensor: {sorted(parameters)}"


def save_hf(
    folder: Path, weights: Iterator[tuple[str, Tensor]], layout: Layout, rank: int, model: Path, tokenizer: Path
) -> Exception | None:
    """Write the weights beside copies of the model's config and the tokenizer's files. All ranks call it together.

    Ranks that share a tensor bring it together on the first of them, one tensor at a time. Returns what kept this rank
    from writing, so that it can still do its part.
    """
    writer = PartWriter(folder, f"model-rank{rank:05d}")
    try:
        folder.mkdir(exist_ok=True)  # beside the other ranks', or not at all
        for source, patterns in ((model, MODEL_FILES), (tokenizer, TOKENIZER_FILES)) if rank == 0 else ():
            for path in (path for pattern in patterns for path in source.glob(pattern)):
                shutil.copy2(path, folder / path.name)
    except OSError as error:
        writer.error = error
    shapes = expected_tensors(layout.hf)
    for name, part in weights:
        if not layout.is_copy(name):
            tensor = _joined(name, part, shapes[name], layout)
            if layout.axis(name).rank == 0:
                writer.add(name, tensor)
    writer.close()
    dist.barrier()
    if rank == 0 and writer.error is None:
        try:
            _name_as_hf_does(folder)
        except (OSError, SafetensorError) as error:
            writer.error = error
    return writer.error


def _joined(name: str, part: Tensor, shape: tuple[int, ...], layout: Layout) -> Tensor:
    """The whole tensor on the first rank of those that share it."""
    if not layout.is_split(name):
        return part
    if EXPERT.search(name):
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    return assembled(part, layout.region(name, shape), shape, group)


def assembled(part: Tensor | None, region: Region, shape: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """A tensor of which each rank of the group holds a region, whole on the first of them; garbage on the others.

    part: None on a rank that holds nothing. Bytes are added to zeros, so that every bit arrives, also the sign of -0.
    """
    if group.size() == 1 and part is not None:
        return part.view(tuple(shape))
    out = torch.zeros(tuple(shape), dtype=torch.float32 if part is None else part.dtype)
    if part is not None:
        out[index(region)] = part
    dist.reduce(out.view(torch.uint8), group_dst=0, group=group)
    return out


def _name_as_hf_does(folder: Path) -> None:
    """One file is model.safetensors; of several, none may be: HF's tools would read that one alone, not the index."""
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        files[0].rename(folder / "model.safetensors")
    else:
        weight_map: dict[str, str] = {}
        for path in files:
            with safe_open(path, framework="pt") as opened:
                weight_map |= dict.fromkeys(opened.keys(), path.name)
        write_index(folder, weight_map, {})
