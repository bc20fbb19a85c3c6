"""vLLM's attention backends for GPUs that know windows, with the spec of a windowed cache; their masks are vLLM's.

Without this spec vLLM's engine would hide the tokens between prompt and window and keep their blocks.
"""

from typing import Any

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from nemo_fp8rl.generation.kv_window.prompt_lengths import PromptLengths
from nemo_fp8rl.generation.kv_window.spec import ModelInConstruction, WindowImplMixin, WindowSpecMixin

FLASH_ATTENTION_WITH_MASKS = 4
"""The version of FlashAttention that takes the mask; with others vLLM 0.32 hides nothing, and does not say so."""


def register_windows() -> None:
    """Replace vLLM's backends for Triton and FlashAttention, in this process."""
    register_backend(AttentionBackendEnum.TRITON_ATTN, f"{__name__}.{WindowTritonBackend.__qualname__}")
    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.{WindowFlashBackend.__qualname__}")


class WindowTritonAttention(WindowImplMixin, TritonAttentionImpl):
    """vLLM's."""


class WindowTritonMetadataBuilder(PromptLengths, TritonAttentionMetadataBuilder):
    """vLLM's, which gets the lengths of all prompts."""


class WindowTritonBackend(WindowSpecMixin, TritonAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return WindowTritonAttention

    @staticmethod
    def get_builder_cls() -> type[TritonAttentionMetadataBuilder]:
        return WindowTritonMetadataBuilder


class WindowFlashAttention(WindowImplMixin, FlashAttentionImpl):
    """Raises ValueError with a window and a version of FlashAttention that has no mask for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        version = self.vllm_flash_attn_version
        if ModelInConstruction.window is not None and version != FLASH_ATTENTION_WITH_MASKS:
            raise ValueError(
                f"policy.generation.vllm_cfg.attention_backend=FLASH_ATTN is FlashAttention {version} on this GPU, and "
                f"kv_window needs FlashAttention {FLASH_ATTENTION_WITH_MASKS}: set attention_backend=TRITON_ATTN"
            )


class WindowFlashMetadataBuilder(PromptLengths, FlashAttentionMetadataBuilder):
    """vLLM's, which gets the lengths of all prompts."""


class WindowFlashBackend(WindowSpecMixin, FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return WindowFlashAttention

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return WindowFlashMetadataBuilder
