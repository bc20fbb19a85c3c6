"""An FP8 KV cache that the trainer reads too: mismatch as without one, scales that belong to their version."""

from dataclasses import replace

import pytest
import torch

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.fp8 import KvScales, can_vllm_read_fp8_cache
from nemo_fp8rl.generation.engine import VllmEngine
from nemo_fp8rl.refit.manifest import RefitError
from tests.generation.pair import GREEDY, Pair, outputs, tiny_pair

CASES = [
    ("qwen3", "fp8_e2e", "vllm"),
    pytest.param(("qwen3", "bf16", "vllm"), marks=pytest.mark.long),
    ("qwen3_moe", "fp8_e2e", "vllm"),
    pytest.param(("qwen3_moe", "bf16", "vllm"), marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def pair(request, tmp_path_factory):
    family, flow, align = request.param
    overrides = f"nemo_fp8rl.flow={flow}", f"nemo_fp8rl.align={align}", "policy.generation.vllm_cfg.kv_cache_dtype=fp8"
    pair = tiny_pair(tmp_path_factory.mktemp(family) / "tiny", family, *overrides)
    yield pair
    pair.close()


def stored_scales(pair: Pair) -> list[tuple[float, ...]]:
    """(k, v, q) of every layer in the engine: the numbers that the CPU's kernel takes, and the buffers."""

    def read(model):
        layers = [m for m in model.modules() if hasattr(m, "_k_scale_float")]
        names = [f"_{x}_scale{end}" for end in ("_float", "") for x in "kvq"]
        return [tuple(float(getattr(m, name)) for name in names) for m in layers]

    (held,) = pair.engine.core.llm.apply_model(read)
    return held


def test_trainer_and_engine_agree_though_the_cache_is_fp8(pair):
    pair.refit()
    pair.train(2)
    pair.refit()
    assert pair.mismatch() < pair.limit
    scales = pair.worker.kv_cache.scales
    of_layers = zip(scales.k_scale, scales.v_scale, scales.q_scale, strict=True)
    assert stored_scales(pair) == [2 * of_layer for of_layer in of_layers]
    rounding, pair.worker.kv_cache.rounding = pair.worker.kv_cache.rounding, None
    blind = pair.mismatch()
    pair.worker.kv_cache.rounding = rounding
    assert ("FP8 KV cache: emulated" in pair.engine.describe().kernels) == (not can_vllm_read_fp8_cache())
    assert blind > 1.002  # what a trainer that does not read the cache is off by


def test_after_one_and_after_ten_refits_it_is_a_fresh_engine(pair, tmp_path):
    pair.is_fresh_after_refits(tmp_path)


@pytest.mark.long
def test_a_checkpoint_without_scales_starts_no_engine(pair):
    if pair.cfg.nemo_fp8rl.flow == "bf16" or pair.worker.hf.family.experts:
        pytest.skip("one engine will do")
    generation = pair.cfg.policy.generation
    apart = replace(generation, vllm_cfg=replace(generation.vllm_cfg, async_engine=True))  # its end ends no groups here
    engine = VllmEngine()
    with pytest.raises(UserError, match=r"lacks model\.layers\.0\.self_attn\.k_scale, a scale of the FP8 KV cache"):
        engine.setup(replace(pair.cfg, policy=replace(pair.cfg.policy, generation=apart)), load_format="auto")
    assert not hasattr(engine, "core")


def test_scales_follow_the_weights(pair):
    pair.refit()
    before = stored_scales(pair)
    with torch.no_grad():
        for name, parameter in pair.worker.model.named_parameters():
            if "linear_qkv.weight" in name:
                parameter.mul_(8.0)
    pair.refit()
    after = stored_scales(pair)
    assert all(b[1] == 8 * a[1] for a, b in zip(before, after, strict=True))
    with torch.no_grad():
        for name, parameter in pair.worker.model.named_parameters():
            if "linear_qkv.weight" in name:
                parameter.div_(8.0)


def test_an_update_without_its_scales_is_refused_and_the_last_version_stays(pair):
    pair.refit()
    expected = outputs(pair.generate(GREEDY))
    pair.refit_without("model.layers.1.self_attn.v_scale")
    pair.refit()
    assert outputs(pair.generate(GREEDY)) == expected


def test_a_saturating_scale_ruins_the_answers_alike_on_both_sides(pair):
    pair.refit()
    scales = pair.worker.kv_cache.scales
    tiny = tuple(2.0**-12 for _ in scales.k_scale)
    pair.worker.kv_cache.scales = KvScales(tiny, tiny, scales.q_scale)
    pair.bridge.refit()
    assert pair.mismatch() < pair.limit
    pair.worker.kv_cache.scales = scales


def test_a_refit_before_calibration_is_refused(pair):
    scales, pair.worker.kv_cache.scales = pair.worker.kv_cache.scales, None
    with pytest.raises(RefitError, match="calibrate first"):
        pair.bridge.refit()
    pair.worker.kv_cache.scales = scales


def test_scales_of_earlier_weights_are_refused(pair):
    pair.refit()
    pair.train(1)
    with pytest.raises(RefitError, match="of earlier weights: calibrate first"):
        pair.bridge.refit()
    pair.refit()
    assert pair.mismatch() < pair.limit
