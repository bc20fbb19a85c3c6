"""The question whether the engine under construction is aligned."""

from vllm.config import get_current_vllm_config_or_none


def is_aligned_engine() -> bool:
    """True while vLLM builds, or loads, a model whose recipe is aligned by shared operations."""
    config = get_current_vllm_config_or_none()
    return getattr(config and config.quant_config, "is_aligned", False)
