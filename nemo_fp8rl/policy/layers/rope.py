"""Rotary position embedding as the checkpoint's config.json scales it."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from nemo_fp8rl.hf.model_config import HfConfig


@dataclass(frozen=True, eq=False)
class Rope:
    """inv_freq: float32 [head_dim / 2], radians a position. factor: on cosine and sine (YaRN's attention factor).
    divisor: of positions (the factor of `linear`).
    """

    inv_freq: Tensor
    factor: float = 1.0
    divisor: float = 1.0
    _tables: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def table(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin [length, 1, 1, d / 2] in `dtype`, made once for all layers."""
        kept = self._tables.get((dtype, device))
        if kept is None or len(kept[0]) < length:
            positions = torch.arange(length, dtype=torch.float32) / self.divisor
            angles = torch.outer(positions, self.inv_freq)[:, None, None, :].to(device)
            kept = (angles.cos() * self.factor).to(dtype), (angles.sin() * self.factor).to(dtype)
            self._tables[dtype, device] = kept
        return kept[0][:length], kept[1][:length]

    def apply(self, x: Tensor) -> Tensor:
        """Halves of x [s, b, h, d] rotated by positions 0..s-1, each product and the sum rounded to x's dtype."""
        cos, sin = (torch.cat((part, part), -1) for part in self.table(len(x), x.dtype, x.device))
        x1, x2 = x.chunk(2, -1)
        return x * cos + torch.cat((-x2, x1), -1) * sin


def read_rope(folder: Path, hf: HfConfig) -> Rope:
    """The checkpoint's RoPE. Scaled frequencies are those of HF's own function for the rope_type, but for `linear`: HF
    divides frequencies, vLLM positions (linear_scaling_rope.py), which is another rounding, and vLLM's is ours.
    """
    if hf.rope_type in ("default", "linear"):
        inv_freq = 1.0 / hf.rope_theta ** (torch.arange(0, hf.head_dim, 2, dtype=torch.float32) / hf.head_dim)
        return Rope(inv_freq, divisor=hf.rope_factor)
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.from_pretrained(folder)
    config.head_dim = hf.head_dim  # which may be null there
    inv_freq, factor = ROPE_INIT_FUNCTIONS[hf.rope_type](config, None)
    return Rope(inv_freq.float(), float(factor))
