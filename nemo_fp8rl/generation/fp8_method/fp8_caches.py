"""Which layers of a vLLM model keep their keys and values in FP8."""

from typing import Any

from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import is_quantized_kv_cache

from nemo_fp8rl.fp8.kv_scales import scale_names


def fp8_caches(model: nn.Module) -> dict[tuple[str, str, str], Any]:
    """{names of the scales (k, v, q) that a refit must bring: attention layer} of every layer whose cache is FP8."""
    layers = (
        (name.removesuffix(".attn"), module)
        for name, module in model.named_modules()
        if isinstance(module, Attention) and is_quantized_kv_cache(module.kv_cache_dtype)
    )
    return {scale_names(name): module for name, module in layers}
