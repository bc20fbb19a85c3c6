"""Weights and optimizer state on disk, in safetensors and JSON: nothing pickled, resumable to the bit.

weights/     an HF checkpoint in the policy's dtype, with config and tokenizer: any HF tool opens it
optimizer/   rank_R.safetensors: this rank's shard of the float32 masters and Adam's moments, by Megatron name
             rank_R.json: steps and schedule
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_fp8rl.errors import UserError
from nemo_fp8rl.hf.checkpoint import CheckpointReader
from nemo_fp8rl.hf.config import HfConfig
from nemo_fp8rl.hf.tensors import expected_tensors
from nemo_fp8rl.policy.megatron_names import from_hf

MODEL_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = ("*token*.json", "vocab.*", "merges.txt", "tokenizer.model", "chat_template*")
MOMENTS = ("exp_avg", "exp_avg_sq")


def save_hf(folder: Path, weights: Iterable[tuple[str, Tensor]], model: Path, tokenizer: Path) -> None:
    """Write the weights beside copies of the model's config and the tokenizer's files."""
    folder.mkdir(parents=True)
    for source, patterns in ((model, MODEL_FILES), (tokenizer, TOKENIZER_FILES)):
        for path in (path for pattern in patterns for path in source.glob(pattern)):
            shutil.copy2(path, folder / path.name)
    tensors = {name: tensor.contiguous().clone() for name, tensor in weights}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def load_hf(folder: Path, model: torch.nn.Module, hf: HfConfig) -> None:
    """Copy weights that `save_hf` (or anyone) wrote into a model's parameters."""
    parameters = dict(model.named_parameters())
    with CheckpointReader(folder) as reader:
        reader.check(expected_tensors(hf))
        for name, tensor in from_hf(hf, reader.get):
            parameters.pop(name).copy_(tensor)
    assert not parameters, f"parameters without a checkpoint tensor: {sorted(parameters)}"


def save_optimizer(folder: Path, rank: int, model: torch.nn.Module, optimizer: Any, scheduler: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    steps: dict[str, float] = {}
    for name, main, state in _shards(model, optimizer):
        tensors[f"{name}.main"] = main.detach().clone()
        if state:
            tensors |= {f"{name}.{moment}": state[moment].clone() for moment in MOMENTS}
            steps[name] = float(state["step"])
    save_file(tensors, folder / f"rank_{rank}.safetensors")
    (folder / f"rank_{rank}.json").write_text(json.dumps({"steps": steps, "scheduler_steps": scheduler.num_steps}))


@torch.no_grad()
def load_optimizer(folder: Path, rank: int, model: torch.nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Restore what `save_optimizer` wrote on a rank of the same layout; UserError for another number of ranks."""
    try:
        tensors = load_file(folder / f"rank_{rank}.safetensors")
        record = json.loads((folder / f"rank_{rank}.json").read_text())
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} is missing: resume with the cluster.train_ranks that saved it") from None
    for name, main, state in _shards(model, optimizer):
        saved = tensors.get(f"{name}.main")
        if saved is None or saved.shape != main.shape:
            raise UserError(f"{folder} has another shard of {name}: resume with the cluster.train_ranks that saved it")
        main.copy_(saved)
        if name in record["steps"]:
            # A tensor of its own for each parameter: Megatron's own loader shares one, and Adam then counts wrongly.
            state.update({moment: tensors[f"{name}.{moment}"].clone() for moment in MOMENTS})
            state["step"] = torch.tensor(record["steps"][name])
    scheduler.num_steps = 0
    scheduler.step(increment=record["scheduler_steps"])


def _shards(model: torch.nn.Module, optimizer: Any) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """(Megatron name, float32 master shard, Adam state) of every parameter this rank's optimizer holds a piece of."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for parameter, (group, order) in part.model_param_group_index_map.items():
            main = part.optimizer.param_groups[group]["params"][order]
            yield names[parameter], main, part.optimizer.state[main]
