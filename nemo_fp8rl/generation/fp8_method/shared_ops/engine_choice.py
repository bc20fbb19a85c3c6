"""Properties of the engine under construction: its alignment, its attention, and its window."""

from vllm.config import get_current_vllm_config_or_none


def is_aligned_engine() -> bool:
    """True while vLLM builds, or loads, a model whose recipe is aligned by shared operations."""
    config = get_current_vllm_config_or_none()
    return getattr(config and config.quant_config, "is_aligned", False)


def uses_flash_attention_3() -> bool:
    """True while vLLM builds such a model whose attention is FlashAttention 3."""
    config = get_current_vllm_config_or_none()
    return getattr(config and config.quant_config, "uses_flash_attention_3", False)


def kv_window() -> int | None:
    """Return the window of the model that vLLM builds, as it reads it from the config; None: a token sees all."""
    config = get_current_vllm_config_or_none()
    return getattr(config and config.model_config, "rswa_window", None)
