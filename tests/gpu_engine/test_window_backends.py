"""vLLM's backends for GPUs with the spec of a windowed cache."""

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def spec():
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)


@pytest.fixture
def under_config():
    """A current config of vLLM, with or without a window."""
    from vllm.config import VllmConfig, set_current_vllm_config

    def enter(window):
        config = VllmConfig()
        config.model_config = SimpleNamespace(dtype=torch.bfloat16, rswa_window=window, is_mm_prefix_lm=False)
        return set_current_vllm_config(config)

    return enter


@pytest.mark.parametrize("window", [None, 24])
def test_triton_attention_tells_vllm_which_blocks_to_free(spec, under_config, window):
    from vllm.v1.attention.backends import registry

    from nemo_fp8rl.generation.kv_window.on_gpu import WindowTritonBackend, register_windows
    from nemo_fp8rl.generation.kv_window.spec import WindowManager, WindowSpec

    before = dict(registry._ATTN_OVERRIDES)
    try:
        register_windows()
        assert registry.AttentionBackendEnum.TRITON_ATTN.get_class() is WindowTritonBackend
    finally:
        registry._ATTN_OVERRIDES.clear()
        registry._ATTN_OVERRIDES.update(before)
    with under_config(window):
        WindowTritonBackend.get_impl_cls()(4, 64, 0.125, 2, None, None, "auto")
    told = WindowTritonBackend.customize_spec(spec)
    if window is None:
        assert told is spec
        return
    assert type(told) is WindowSpec and told.rswa_window == window
    assert registry_manager(told) is WindowManager
    assert {name: getattr(told, name) for name in vars(spec)} == vars(spec)


def registry_manager(spec):
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    return KVCacheSpecRegistry.get_manager_class(spec)


@pytest.mark.parametrize(("version", "refused"), [(3, True), (4, False)])
def test_flash_attention_without_the_mask_is_refused(spec, under_config, monkeypatch, version, refused):
    from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

    from nemo_fp8rl.generation.kv_window.on_gpu import WindowFlashBackend

    def constructed(self, *args):
        self.vllm_flash_attn_version = version

    monkeypatch.setattr(FlashAttentionImpl, "__init__", constructed)  # it asks for a GPU
    with under_config(24):
        if refused:
            with pytest.raises(ValueError, match=r"FlashAttention 3 .*kv_window needs FlashAttention 4: .*TRITON_ATTN"):
                WindowFlashBackend.get_impl_cls()()
            return
        WindowFlashBackend.get_impl_cls()()
    assert WindowFlashBackend.customize_spec(spec).rswa_window == 24
    with under_config(None):
        WindowFlashBackend.get_impl_cls()()
    assert WindowFlashBackend.customize_spec(spec) is spec
