"""The shared attention on the pages of vLLM's backend for CPUs, which is the only one that vLLM chooses there."""

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

import nemo_fp8rl.generation.weights.worker_extension  # noqa: F401, it may register another backend, for FP8 caches
from nemo_fp8rl.generation.fp8_method.shared_ops.attention import PromptLengths, SharedAttention
from nemo_fp8rl.generation.fp8_method.shared_ops.engine_choice import is_aligned_engine

UNALIGNED: Any = AttentionBackendEnum.CPU_ATTN.get_class()


class SharedCpuAttention(SharedAttention, CPUAttentionBackendImpl):
    """On pages [pages, groups, page_size, 2 * d]: of each token key, then value."""

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if self.has_fp8_cache:
            return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        is_token = slot_mapping >= 0
        slots = slot_mapping[is_token]
        page, slot = slots // kv_cache.size(2), slots % kv_cache.size(2)
        for cache, x in zip(self.pages(kv_cache), (key, value), strict=True):
            cache[page, slot] = x[: len(is_token)][is_token]


class PagesMetadataBuilder(PromptLengths, UNALIGNED.get_builder_cls()):  # type: ignore[misc]
    pass


class PagesBackend(CPUAttentionBackend):
    @classmethod
    def supports_rswa(cls) -> bool:
        return True

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return UNALIGNED.customize_spec(spec)

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return SharedCpuAttention if is_aligned_engine() else UNALIGNED.get_impl_cls()

    @staticmethod
    def get_builder_cls() -> Any:
        return PagesMetadataBuilder if is_aligned_engine() else UNALIGNED.get_builder_cls()


def register() -> None:
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{PagesBackend.__qualname__}")
