"""Rotary position embedding as the checkpoint's config.json scales it."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nemo_fp8rl.hf.config import HfConfig


@dataclass(frozen=True)
class Rope:
    """inv_freq: float32 [head_dim / 2], radians a position. factor: on cosine and sine (YaRN's attention factor)."""

    inv_freq: Tensor
    factor: float = 1.0

    def table(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [length, 1, 1, d / 2], rounded to `dtype` as the engine's table is, held in float32."""
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self.inv_freq)[:, None, None, :]
        return tuple((f(angles) * self.factor).to(dtype).float() for f in (torch.cos, torch.sin))  # type: ignore[return-value]


def read_rope(folder: Path, hf: HfConfig) -> Rope:
    """The checkpoint's; scaled frequencies are those of HF's own function for the rope_type."""
    if hf.rope_type == "default":
        return Rope(1.0 / hf.rope_theta ** (torch.arange(0, hf.head_dim, 2, dtype=torch.float32) / hf.head_dim))
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inv_freq, factor = ROPE_INIT_FUNCTIONS[hf.rope_type](AutoConfig.from_pretrained(folder), None)
    return Rope(inv_freq.float(), float(factor))
