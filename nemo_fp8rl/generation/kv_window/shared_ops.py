"""The attention of an aligned engine, with the spec and the prompt lengths of a windowed cache."""

from typing import Any

from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder

from nemo_fp8rl.generation.fp8_method.shared_ops.attention import SharedAttentionBackend, SharedTritonAttention
from nemo_fp8rl.generation.kv_window.prompt_lengths import PromptLengths
from nemo_fp8rl.generation.kv_window.spec import ModelInConstruction, windowed


class WindowSharedAttention(SharedTritonAttention):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ModelInConstruction.note()


class SharedMetadataBuilder(PromptLengths, TritonAttentionMetadataBuilder):
    """vLLM's, which puts the prompts' lengths into memory that CUDA graphs read."""


class WindowSharedBackend(SharedAttentionBackend):
    """`SharedAttentionBackend` for a vLLM that has windows; with a model without one there is no difference."""

    @classmethod
    def supports_rswa(cls) -> bool:
        return True

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return windowed(super().customize_spec(spec))

    @staticmethod
    def get_impl_cls() -> type[WindowSharedAttention]:
        return WindowSharedAttention

    @staticmethod
    def get_builder_cls() -> type[SharedMetadataBuilder]:
        return SharedMetadataBuilder
