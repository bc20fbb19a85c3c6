"""The folder of trained adapters, which HF's `peft` and `vllm serve --enable-lora` read.

adapter_model.safetensors   A and B of every projection; projections of a fused module have equal A
adapter_config.json         rank, alpha and modules
base.json                   digest of the base on which they were trained
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.region import full_region
from nemo_fp8rl.hf.adapters import LORA_A, LORA_B, Adapters, adapter_tensors, expert_names, linear_modules
from nemo_fp8rl.hf.checkpoint_reader import CheckpointReader
from nemo_fp8rl.hf.hub import split_hub_name
from nemo_fp8rl.hf.model_config import HfConfig
from nemo_fp8rl.hf.storage.safetensors_file import write_safetensors

WEIGHTS, CONFIG, BASE = "adapter_model.safetensors", "adapter_config.json", "base.json"
PREFIX = "base_model.model."


def base_digest(folder: Path) -> str:
    """Return a digest of a base: of the name, the shape and the first row of every tensor in its checkpoint."""
    digest = hashlib.sha256()
    with CheckpointReader(folder) as reader:
        for name in sorted(reader.names):
            shape = reader.shape(name)
            rows = reader.get(name, ((0, 1), *full_region(shape[1:])))
            digest.update(f"{name} {shape}".encode())
            digest.update(rows.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def write_adapter_folder(
    folder: Path, hf: HfConfig, adapters: Adapters, tensors: Mapping[str, Tensor], base_model: str, digest: str
) -> None:
    """Write the folder. tensors: by the names of `hf.adapters.adapter_tensors`; digest: `base_digest`"""
    peft_tensors: dict[str, Tensor] = {}
    for fused, projection in _projections(hf, adapters):
        peft_tensors[f"{PREFIX}{projection}.{LORA_A}.weight"] = tensors[f"{fused}.{LORA_A}.weight"].clone()
        peft_tensors[f"{PREFIX}{projection}.{LORA_B}.weight"] = tensors[f"{projection}.{LORA_B}.weight"]
    base_model, revision = split_hub_name(base_model)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "revision": revision or None,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({projection for _, projection in _projections(hf, adapters)}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
    (folder / BASE).write_text(json.dumps({"digest": digest}) + "\n")
    write_safetensors(peft_tensors, folder / WEIGHTS)


def read_base_name(folder: Path) -> str:
    """Return policy.model_name of the run that trained the adapters in a folder. Raises UserError."""
    config = _read_config(folder)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    return f"{name}@{revision}" if revision else str(name)


def read_folder_adapters(folder: Path, hf: HfConfig) -> Adapters:
    """Return the adapters in a folder, of a model with this config. Raises UserError."""
    config = _read_config(folder)
    projections = set(config["target_modules"])
    modules = frozenset(
        module.name
        for module in linear_modules(hf)
        for name in expert_names(hf, module.name)
        if f"{name.rpartition('.')[0]}.{module.projections[0]}" in projections
    )
    return Adapters(config["r"], config["lora_alpha"], modules)


def read_adapter_folder(folder: Path, hf: HfConfig, adapters: Adapters, digest: str) -> dict[str, Tensor]:
    """Return the tensors by the names of `hf.adapters.adapter_tensors`.

    Raises: UserError where the folder cannot be read, is of another base or of other adapters
    """
    config = _read_config(folder)
    with _complete(folder):
        found_digest, tensors = json.loads((folder / BASE).read_text())["digest"], load_file(folder / WEIGHTS)
    rank, alpha = config["r"], config["lora_alpha"]
    if found_digest != digest:
        raise UserError(
            f"{folder} has adapters of another base (digest {found_digest}, the model given has {digest}); give the "
            f"one on which they were trained: policy.model_name, or in an export base_model_name_or_path of {CONFIG}"
        )
    if (rank, alpha) != (adapters.rank, adapters.alpha):
        raise UserError(
            f"{folder} has adapters of dim={rank}, alpha={alpha:g}; set policy.megatron_cfg.peft.dim and alpha to these"
        )
    result: dict[str, Tensor] = {}
    try:
        for fused, projection in _projections(hf, adapters):
            a = tensors.pop(f"{PREFIX}{projection}.{LORA_A}.weight")
            name = f"{fused}.{LORA_A}.weight"
            if not torch.equal(result.setdefault(name, a), a):
                raise UserError(
                    f"{folder}: the projections of {fused} have different {LORA_A}, and here they share one; train "
                    "them with NeMo RL's LoRA, or start with new adapters"
                )
            result[f"{projection}.{LORA_B}.weight"] = tensors.pop(f"{PREFIX}{projection}.{LORA_B}.weight")
    except KeyError as error:
        raise UserError(f"{folder} lacks {error.args[0]}; policy.megatron_cfg.peft asks for other modules") from None
    if tensors:
        raise UserError(f"{folder} has {min(tensors)}, for which policy.megatron_cfg.peft has no module")
    for name, shape in adapter_tensors(hf, adapters).items():
        if tuple(result[name].shape) != shape:
            raise UserError(
                f"{folder}: {name} has shape {list(result[name].shape)}, the model of policy.model_name asks for "
                f"{list(shape)}; give the model on which the adapters were trained"
            )
    return result


def _read_config(folder: Path) -> dict[str, Any]:
    with _complete(folder):
        config = json.loads((folder / CONFIG).read_text())
        names = list(map(str, config["target_modules"]))
        return config | {"r": int(config["r"]), "lora_alpha": float(config["lora_alpha"]), "target_modules": names}


@contextmanager
def _complete(folder: Path) -> Iterator[None]:
    """Raise UserError where the block cannot read a file of the folder."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be read as adapters ({error}); the checkpoint is not complete") from None


def _projections(hf: HfConfig, adapters: Adapters) -> list[tuple[str, str]]:
    """Return (HF name of the fused module, HF name of a projection) for every projection with an adapter."""
    return [
        (name, f"{name.rpartition('.')[0]}.{projection}")
        for module in linear_modules(hf)
        if adapters.adapts(module.name)
        for name in expert_names(hf, module.name)
        for projection in module.projections
    ]
