"""The shared attention on the pages of vLLM's backend for CPUs, which is the only one that vLLM chooses there."""

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

import nemo_fp8rl.generation.weights.worker_extension  # noqa: F401, it may register another backend, for FP8 caches
from nemo_fp8rl.generation import vllm_compat
from nemo_fp8rl.generation.fp8_method.shared_ops.attention import SharedAttention
from nemo_fp8rl.generation.fp8_method.shared_ops.engine_choice import is_aligned_engine
from nemo_fp8rl.generation.kv_window.prompt_lengths import PromptLengths

UNALIGNED: Any = AttentionBackendEnum.CPU_ATTN.get_class()


class SharedCpuAttention(SharedAttention, CPUAttentionBackendImpl):
    """On pages [pages, groups, page_size, 2 * d]: of each token key, then value."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if vllm_compat.has_kv_windows():
            from nemo_fp8rl.generation.kv_window.spec import ModelInConstruction

            ModelInConstruction.note()

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


class PagesMetadataBuilder(UNALIGNED.get_builder_cls()):  # type: ignore[misc]
    """The prompts' lengths are left in the metadata, as vLLM's builder for Triton leaves them."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common = common_attn_metadata
        if getattr(common, "rswa_prefix_lens", None) is None:
            return super().build(common_prefix_len, common, fast_build)
        metadata = super().build(common_prefix_len, common.replace(rswa_prefix_lens=None), fast_build)
        metadata.rswa_prefix_lens = common.rswa_prefix_lens
        return metadata


class SharedPagesMetadataBuilder(PromptLengths, PagesMetadataBuilder):
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
        return SharedPagesMetadataBuilder if is_aligned_engine() else UNALIGNED.get_builder_cls()


def register() -> None:
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{PagesBackend.__qualname__}")
