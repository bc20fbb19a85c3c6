"""Rotary position embedding with the scaling of the checkpoint's config.json."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from nemo_fp8rl.hf.model_config import HfConfig


@dataclass(frozen=True, eq=False)
class Rope:
    """The rotation of a model.

    inv_freq:  float32 [head_dim / 2], radians per position
    factor:    multiplies cosine and sine (YaRN's attention factor)
    divisor:   divides positions (the factor of `linear` scaling)
    """

    inv_freq: Tensor
    factor: float = 1.0
    divisor: float = 1.0
    _tables: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def table(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cos and sin, [length, 1, 1, d / 2] in `dtype`; they are computed once for all layers."""
        table = self._tables.get((dtype, device))
        if table is None or len(table[0]) < length:
            positions = torch.arange(length, dtype=torch.float32) / self.divisor
            angles = torch.outer(positions, self.inv_freq)[:, None, None, :]
            # on the host, as an aligned engine's: the cosines of a GPU have other last bits
            table = (angles.cos() * self.factor).to(device, dtype), (angles.sin() * self.factor).to(device, dtype)
            self._tables[dtype, device] = table
        return table[0][:length], table[1][:length]

    def apply(self, x: Tensor) -> Tensor:
        """Rotate the halves of x [s, b, h, d] by positions 0..s-1; each product and the sum round to x's dtype."""
        cos, sin = (torch.cat((part, part), -1) for part in self.table(len(x), x.dtype, x.device))
        x1, x2 = x.chunk(2, -1)
        return x * cos + torch.cat((-x2, x1), -1) * sin


def read_rope(folder: Path, hf: HfConfig) -> Rope:
    """Read the checkpoint's RoPE.

    HF's own function for the rope_type scales the frequencies, except for `linear`: there HF divides frequencies and
    vLLM positions (linear_scaling_rope.py), which rounds differently, and this class follows vLLM.
    """
    if hf.rope_type in ("default", "linear"):
        inv_freq = 1.0 / hf.rope_theta ** (torch.arange(0, hf.head_dim, 2, dtype=torch.float32) / hf.head_dim)
        return Rope(inv_freq, divisor=hf.rope_factor)
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.from_pretrained(folder)
    config.head_dim = hf.head_dim  # it may be null in config.json
    inv_freq, factor = ROPE_INIT_FUNCTIONS[hf.rope_type](config, None)
    return Rope(inv_freq.float(), float(factor))
