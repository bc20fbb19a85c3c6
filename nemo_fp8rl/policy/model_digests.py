"""Digests of what decides a run's numbers in a model's folder, beyond the weights in the run's checkpoints."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.hf.adapter_folder import base_digest
from nemo_fp8rl.hf.checkpoint_reader import CheckpointReader
from nemo_fp8rl.hf.hub import checkpoint_folder
from nemo_fp8rl.hf.model_config import HfConfig
from nemo_fp8rl.policy.layers.rope import read_rope


def model_digests(cfg: Config, hf: HfConfig) -> dict[str, str]:
    """Return the digests by which a resumed run checks that its model is the same, in whatever folder.

    model:      the values of config.json that may differ between two models of the same shape
    reference:  with a reference policy and no adapters, the last layer's o_proj, which every training step changes
    base:       with adapters, the base, of which a checkpoint has no copy
    """
    has_reference, has_base = cfg.loss_fn.reference_policy_kl_penalty > 0, cfg.policy.megatron_cfg.peft.enabled
    folder = checkpoint_folder(cfg.policy.model_name, weights=has_reference or has_base)
    rope = read_rope(folder, hf)
    numbers = f"{hf.rms_norm_eps} {sorted(hf.eos_token_ids)} {rope.factor}" + (
        f" {rope.divisor}" if rope.divisor != 1 else ""
    )
    digests = {"model": _digest([numbers.encode(), _bytes(rope.inv_freq)])}
    if has_base:
        digests["base"] = base_digest(folder)
    elif has_reference:
        with CheckpointReader(folder) as reader:
            last = f"model.layers.{hf.num_hidden_layers - 1}.self_attn.o_proj.weight"
            if last in reader.names:  # otherwise the policy reports the missing tensor
                digests["reference"] = _digest([_bytes(reader.get(last))])
    return digests


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _digest(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]
