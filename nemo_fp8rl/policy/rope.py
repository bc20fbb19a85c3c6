"""The frequencies of rotary position embedding."""

import torch
from torch import Tensor

from nemo_fp8rl.hf.config import HfConfig


def inverse_frequencies(model_path: str, hf: HfConfig) -> Tensor:
    """float32 [head_dim / 2], radians a position; scaled ones as HF's own function for the rope_type has them."""
    if hf.rope_type == "default":
        return 1.0 / hf.rope_theta ** (torch.arange(0, hf.head_dim, 2, dtype=torch.float32) / hf.head_dim)
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[hf.rope_type](AutoConfig.from_pretrained(model_path), None)
    assert attention_factor == 1.0
    return inv_freq.float()
