"""Attention on an FP8 KV cache for CPUs without AVX-512 and AMX, for which vLLM has no kernel.

The cache stores E4M3 in vLLM's blocks, rounded to nearest, as is expected of GPUs. In every forward the tokens that it
reads are dequantized, and vLLM's kernel for a cache in the model's dtype attends to them. So the cache is emulated, and
attention rounds where that kernel rounds. A layer whose cache is not FP8 is left to vLLM.

The backend replaces vLLM's (`register_backend` in v1/attention/backends/registry.py).
"""

from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from nemo_fp8rl.fp8 import from_cache, to_cache

KEY, VALUE = 0, 1


def emulate_fp8_caches() -> None:
    """Replace vLLM's attention backend on a CPU by `EmulatedCacheBackend`, in this process."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{EmulatedCacheBackend.__qualname__}")


class EmulatedCacheMetadataBuilder(CPUAttentionMetadataBuilder):
    """Plans for the kernel of a cache in the model's dtype; for FP8 vLLM's builder would find no kernel."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        dequantized = copy(vllm_config)
        dequantized.cache_config = copy(vllm_config.cache_config)
        dequantized.cache_config.cache_dtype = "auto"
        super().__init__(kv_cache_spec, layer_names, dequantized, device)


class EmulatedCacheAttention(CPUAttentionBackendImpl):
    """Attention on a cache that is uint8 [blocks, groups, tokens of a block, 2 * d]: of each token key, then value."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        shape = num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window
        super().__init__(*shape, "auto", *args, **kwargs)
        self.emulates = is_quantized_kv_cache(kv_cache_dtype)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if not self.emulates:
            return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        is_token = slot_mapping >= 0  # the others are padding
        slots, block_size = slot_mapping[is_token], kv_cache.size(2)
        block, token = slots // block_size, slots % block_size
        codes = kv_cache.view(torch.uint8).unflatten(-1, (2, -1))
        for half, x, scale in ((KEY, key, layer._k_scale_float), (VALUE, value, layer._v_scale_float)):
            rounded = to_cache(x[: len(is_token)][is_token], scale, "nearest")
            codes[block, :, token, half] = rounded.view(torch.uint8)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Any,
        value: Any,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if self.emulates and attn_metadata is not None:
            key = value = None  # they are in the cache; early versions of vLLM would write them again
            kv_cache, block_table = self._dequantize(layer, kv_cache, attn_metadata, query.dtype)
            attn_metadata = replace(attn_metadata, block_table=block_table)
        return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)

    def _dequantize(
        self, layer: Any, kv_cache: Tensor, metadata: CPUAttentionMetadata, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return (the blocks that this forward reads, in the layout of vLLM's kernel for `dtype`; their block table).

        Of a block that several sequences share, the tokens of the longest sequence are dequantized.
        """
        block_size = kv_cache.size(2)
        firsts = torch.arange(metadata.block_table.size(1)) * block_size
        tokens_read = (metadata.seq_lens[:, None] - firsts).clamp(0, block_size)  # of each block of each sequence
        is_read = tokens_read > 0
        blocks, places = metadata.block_table[is_read].unique(return_inverse=True)
        block_table = torch.zeros_like(metadata.block_table)
        block_table[is_read] = places.to(block_table.dtype)
        filled = torch.zeros(len(blocks), dtype=tokens_read.dtype)
        filled.scatter_reduce_(0, places, tokens_read[is_read], "amax")
        block, token = (torch.arange(block_size) < filled[:, None]).nonzero(as_tuple=True)
        codes = kv_cache.view(torch.uint8)[blocks[block], :, token].unflatten(-1, (2, -1)).view(torch.float8_e4m3fn)
        key = from_cache(codes[:, :, KEY], layer._k_scale_float, dtype)
        value = from_cache(codes[:, :, VALUE], layer._v_scale_float, dtype)
        cache = torch.zeros(len(blocks), *kv_cache.shape[1:], dtype=dtype)
        super().do_kv_cache_update(layer, key, value, cache, block * block_size + token)
        return cache, block_table


class EmulatedCacheBackend(CPUAttentionBackend):
    """vLLM's backend with our FP8 cache. It keeps vLLM's name, by which vLLM looks backends up."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return EmulatedCacheAttention

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return EmulatedCacheMetadataBuilder
