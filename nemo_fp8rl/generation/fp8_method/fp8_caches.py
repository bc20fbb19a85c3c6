"""The layers of a vLLM model with an FP8 cache of keys and values."""

from typing import Any

from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import is_quantized_kv_cache

from nemo_fp8rl.fp8.kv_scales import scale_names


def fp8_caches(model: nn.Module) -> dict[tuple[str, str, str], Any]:
    """Return {names of the scales (k, v, q) that a refit must bring: attention layer} for every FP8 cache."""
    layers = (
        (name.removesuffix(".attn"), module)
        for name, module in model.named_modules()
        if isinstance(module, Attention) and is_quantized_kv_cache(module.kv_cache_dtype)
    )
    return {scale_names(name): module for name, module in layers}
