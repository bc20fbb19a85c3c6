"""A windowed cache in FP8 under refits: a trainer with the same mask agrees with the engine, one without does not."""

import pytest

from tests.generation.pair import tiny_pair


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    keys = (
        "nemo_fp8rl.flow=bf16",
        "nemo_fp8rl.align=none",
        "policy.generation.vllm_cfg.kv_cache_dtype=fp8",
        "policy.generation.vllm_cfg.kv_window=2",
    )
    pair = tiny_pair(tmp_path_factory.mktemp("window") / "tiny", "qwen3", *keys)
    yield pair
    pair.close()


def test_the_trainers_mask_is_what_the_engine_keeps(pair):
    pair.refit()
    pair.train(2)
    pair.refit()
    assert pair.mismatch() < 1.01
    attentions = [module for module in pair.worker.model.modules() if hasattr(module, "kv_window")]
    for attention in attentions:
        attention.kv_window = None
    blind = pair.mismatch()
    for attention in attentions:
        del attention.kv_window
    assert blind > 1.02
