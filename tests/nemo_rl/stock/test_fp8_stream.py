"""The trainer's half of FP8 on the wire, with a fake in place of NeMo RL's Megatron worker."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.fp8 import NonFiniteError, quantize_blockwise
from nemo_fp8rl.nemo_rl.stock.worker_choice import (
    choose_workers,
    declare_kv_cache,
)
from tests.nemo_rl.stock.fake_trainer import KV_SCALES, WEIGHT, StreamingWorker, policy, weights


def test_fp8_layers_stream_as_the_contracts_bytes():
    cfg = policy()
    choose_workers(cfg, num_hidden_layers=2, survives_refit=True)
    held = weights()
    streamed = dict(StreamingWorker(cfg, held)._iter_params_with_optional_kv_scales(conversion_tasks=None))
    expected = quantize_blockwise(held[WEIGHT], scale_format="pow2")
    assert torch.equal(streamed[WEIGHT].view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(streamed[f"{WEIGHT}_scale_inv"], expected.scale_inv)
    assert all(streamed[name] is held[name] for name in held.keys() - {WEIGHT})
    assert len(streamed) == len(held) + 1


def test_without_fp8_in_the_recipe_nothing_changes():
    cfg = policy(precision="bfloat16") | {"megatron_cfg": {"enabled": True}}
    before = repr(cfg)
    choose_workers(cfg, num_hidden_layers=2, survives_refit=True)
    held = weights()
    assert repr(cfg) == before
    assert dict(StreamingWorker(cfg, held)._iter_params_with_optional_kv_scales()) == held


@pytest.mark.parametrize(("name", "value"), [(WEIGHT, torch.nan), ("model.norm.weight", torch.inf)])
def test_a_weight_that_is_not_finite_is_named(name, value):
    cfg = policy()
    choose_workers(cfg, num_hidden_layers=2, survives_refit=True)
    held = weights()
    held[name].view(-1)[5] = value
    with pytest.raises(NonFiniteError, match=name):
        list(StreamingWorker(cfg, held)._iter_params_with_optional_kv_scales())


def fp8_export(scale_format: str) -> dict[str, Tensor]:
    """As a worker with `fp8_param` streams it."""
    quantized = quantize_blockwise(weights()[WEIGHT], scale_format=scale_format)
    return {WEIGHT: quantized.data, f"{WEIGHT}_scale_inv": quantized.scale_inv, "model.norm.weight": torch.ones(384)}


def test_weights_stored_in_fp8_stream_unchanged():
    cfg = policy()
    choose_workers(cfg, num_hidden_layers=2, survives_refit=True)
    held = fp8_export("pow2")
    streamed = dict(StreamingWorker(cfg, held)._iter_params_with_optional_kv_scales())
    assert list(streamed) == list(held)
    assert all(streamed[name] is held[name] for name in held)


@pytest.mark.parametrize(
    ("tensor", "place", "value", "message"),
    [
        (WEIGHT, (3, 5), 0x7F, f"{WEIGHT}: 1 of 98304 FP8 values are NaN"),
        (WEIGHT, (3, 5), 0xFF, f"{WEIGHT}: 1 of 98304 FP8 values are NaN"),
        (f"{WEIGHT}_scale_inv", (1, 2), torch.nan, r"_scale_inv: 1 of 6 values are not finite, the first at \[1, 2\]"),
    ],
)
def test_fp8_that_is_not_finite_is_named(tensor, place, value, message):
    cfg = policy()
    choose_workers(cfg, num_hidden_layers=2, survives_refit=True)
    held = fp8_export("pow2")
    memory = held[tensor].view(torch.uint8) if tensor == WEIGHT else held[tensor]
    memory[place] = value
    with pytest.raises(NonFiniteError, match=message):
        list(StreamingWorker(cfg, held)._iter_params_with_optional_kv_scales())


def test_scales_of_another_format_than_the_recipes_are_refused():
    cfg = policy()
    choose_workers(cfg, num_hidden_layers=2, survives_refit=True)
    message = rf"{WEIGHT}_scale_inv: the trainer's scales are no powers of two.* set .*FP32_SCALES='0'"
    with pytest.raises(RuntimeError, match=message):
        list(StreamingWorker(cfg, fp8_export("fp32"))._iter_params_with_optional_kv_scales())


def streaming_kv_scales() -> StreamingWorker:
    cfg = policy(kv_cache_dtype="fp8")
    choose_workers(cfg, num_hidden_layers=2, survives_refit=True)
    engine = SimpleNamespace(cfg=cfg["generation"])
    declare_kv_cache(engine, cfg)
    return StreamingWorker({**cfg, "generation": engine.cfg}, weights())


def test_calibrated_kv_scales_follow_the_weights():
    worker = streaming_kv_scales()
    scales = {name: 0.01 * (i + 1) for i, name in enumerate(KV_SCALES)}
    streamed = dict(worker._iter_params_with_optional_kv_scales(kv_scales=scales))
    assert list(streamed)[-len(KV_SCALES) :] == KV_SCALES
    assert {name: streamed[name].item() for name in KV_SCALES} == pytest.approx(scales)


def test_kv_scales_are_announced_before_the_first_calibration():
    info = streaming_kv_scales().prepare_refit_info()
    assert all(info[name] == ((1,), torch.float32) for name in KV_SCALES)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (None, "model.layers.0.self_attn.attn.q_scale: this refit came without it"),
        (dict.fromkeys(KV_SCALES[:-1], 0.5), "model.layers.1.self_attn.v_scale: this refit came without it"),
        (dict.fromkeys(KV_SCALES, 0.0), r"q_scale=0\.0 is no valid scale"),
        (dict.fromkeys(KV_SCALES, float("nan")), "q_scale=nan is no valid scale"),
    ],
)
def test_a_refit_without_calibrated_kv_scales_is_refused(scales, message):
    worker = streaming_kv_scales()
    worker.prepare_refit_info()
    with pytest.raises(RuntimeError, match=message):
        list(worker._iter_params_with_optional_kv_scales(kv_scales=scales))
