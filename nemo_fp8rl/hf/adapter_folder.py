"""The folder of trained adapters, which HF's `peft` and `vllm serve --enable-lora` read.

adapter_model.safetensors   A and B of every projection; projections of a fused module have equal A
adapter_config.json         rank, alpha and modules
base.json                   digest of the base on which they were trained
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.region import full_region
from nemo_fp8rl.hf.adapters import LORA_A, LORA_B, Adapters, adapter_tensors, expert_names, linear_modules
from nemo_fp8rl.hf.checkpoint_reader import CheckpointReader
from nemo_fp8rl.hf.model_config import HfConfig
from nemo_fp8rl.hf.safetensors_file import write_safetensors

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
    found: dict[str, Tensor] = {}
    for fused, projection in _projections(hf, adapters):
        found[f"{PREFIX}{projection}.{LORA_A}.weight"] = tensors[f"{fused}.{LORA_A}.weight"].clone()
        found[f"{PREFIX}{projection}.{LORA_B}.weight"] = tensors[f"{projection}.{LORA_B}.weight"]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({projection for _, projection in _projections(hf, adapters)}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
    (folder / BASE).write_text(json.dumps({"digest": digest}) + "\n")
    write_safetensors(found, folder / WEIGHTS)


def read_adapter_folder(folder: Path, hf: HfConfig, adapters: Adapters, digest: str) -> dict[str, Tensor]:
    """Return the tensors by the names of `hf.adapters.adapter_tensors`.

    Raises: UserError where the folder cannot be read, is of another base or of other adapters
    """
    try:
        config, base = (json.loads((folder / name).read_text()) for name in (CONFIG, BASE))
        tensors = load_file(folder / WEIGHTS)
        rank, alpha, found_digest = int(config["r"]), float(config["lora_alpha"]), str(base["digest"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"{folder} cannot be read as adapters ({error}); the checkpoint is not complete") from None
    if found_digest != digest:
        raise UserError(
            f"{folder} has adapters of another base (digest {found_digest}, policy.model_name has {digest}); set "
            f"policy.model_name to the model on which they were trained ({config.get('base_model_name_or_path')})"
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


def _projections(hf: HfConfig, adapters: Adapters) -> list[tuple[str, str]]:
    """Return (HF name of the fused module, HF name of a projection) for every projection with an adapter."""
    return [
        (name, f"{name.rpartition('.')[0]}.{projection}")
        for module in linear_modules(hf)
        if adapters.adapts(module.name)
        for name in expert_names(hf, module.name)
        for projection in module.projections
    ]
