"""The attention of an aligned engine, with the spec and the prompt lengths of a windowed cache."""

from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder

from nemo_fp8rl.generation.fp8_method.shared_ops.attention import SharedAttentionBackend, SharedTritonAttention
from nemo_fp8rl.generation.kv_window.prompt_lengths import PromptLengths
from nemo_fp8rl.generation.kv_window.spec import WindowImplMixin, WindowSpecMixin


class WindowSharedAttention(WindowImplMixin, SharedTritonAttention):
    """`SharedAttention`, which reads the lengths of prompts."""


class SharedMetadataBuilder(PromptLengths, TritonAttentionMetadataBuilder):
    """vLLM's, which puts the prompts' lengths into memory that CUDA graphs read."""


class WindowSharedBackend(WindowSpecMixin, SharedAttentionBackend):
    """`SharedAttentionBackend` for a vLLM that has windows; with a model without one there is no difference."""

    @classmethod
    def supports_rswa(cls) -> bool:
        return True

    @staticmethod
    def get_impl_cls() -> type[WindowSharedAttention]:
        return WindowSharedAttention

    @staticmethod
    def get_builder_cls() -> type[SharedMetadataBuilder]:
        return SharedMetadataBuilder
