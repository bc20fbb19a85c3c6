"""MXFP8 and NVFP4 through the whole circle: trainer, refit, engine. test_families.py does the same for FP8."""

import pytest
import torch

from nemo_fp8rl.algorithms.loss import NllLoss
from tests.batches import loss_totals
from tests.conftest import ALIGNED
from tests.generation.pair import tiny_pair

LINE = "nemo_fp8rl.weight_block=line"
CASES = {
    "qwen3-mxfp8_e2e": ("qwen3", "mxfp8_e2e"),
    "qwen3-nvfp4_e2e": ("qwen3", "nvfp4_e2e"),
    "qwen3_moe-nvfp4_a16_e2e": ("qwen3_moe", "nvfp4_a16_e2e"),
    "qwen3_moe-nvfp4_e2e": ("qwen3_moe", "nvfp4_e2e"),
    "qwen3_moe-mxfp8_e2e": ("qwen3_moe", "mxfp8_e2e"),
    "qwen2-nvfp4_e2e-fp32": ("qwen2", "nvfp4_e2e", "nemo_fp8rl.scale_format=fp32"),
    "qwen3-nvfp4_a16_e2e-line": ("qwen3", "nvfp4_a16_e2e", LINE),
    "qwen3-mxfp8_e2e-line": ("qwen3", "mxfp8_e2e", LINE),
    "qwen3-nvfp4_rollout": ("qwen3", "nvfp4_rollout"),
}
LONG = {"qwen3_moe-nvfp4_e2e", "qwen3_moe-mxfp8_e2e", "qwen3-mxfp8_e2e-line", "qwen3-nvfp4_a16_e2e-line"}
WIRE = {"mxfp8": 0.501, "mxfp8_1x32": 0.516, "nvfp4": 0.253, "nvfp4_a16": 0.253, "nvfp4_a16_1x16": 0.283}
"""Bytes on the wire over those of bfloat16, with global scales, which weigh more in small tensors."""


@pytest.fixture(
    scope="module", params=[pytest.param(case, marks=[pytest.mark.long] * (case in LONG)) for case in CASES]
)
def pair(request, tmp_path_factory):
    family, flow, *further = CASES[request.param]
    pair = tiny_pair(tmp_path_factory.mktemp(family) / "tiny", family, f"nemo_fp8rl.flow={flow}", *further)
    yield pair
    pair.close()


def test_the_wire_has_the_bytes_of_the_format(pair):
    choice = pair.cfg.nemo_fp8rl
    report = pair.refit()
    assert report.wire_over_bf16 < WIRE.get(choice.format.name, 1.0)


def test_every_token_has_the_engines_log_prob_before_and_after_refits(pair):
    choice = pair.cfg.nemo_fp8rl
    for steps in (0, 1, 2):
        if steps:
            pair.train(steps)
        pair.refit()
        batch = pair.samples()
        logprobs, sampled = pair.worker.logprobs(batch), batch.token_mask.bool()
        mismatch = pair.mismatch()
        if not choice.quantizes_training:
            assert mismatch > 1.01  # what the same bytes on both sides avoid
            continue
        assert mismatch < ALIGNED
        if ALIGNED < 1.000_01:
            assert torch.equal(logprobs[sampled], batch.generation_logprobs[sampled])


def test_a_weight_that_outgrows_its_global_scale_raises_it_and_both_sides_follow(pair):
    """Sixteen times as large is within the headroom, and more is not."""
    scales = pair.worker.global_scales
    if not scales.matrices or pair.cfg.nemo_fp8rl.scale_format == "fp32":
        pytest.skip("the format has no global scale that stays")
    name = next(iter(scales.matrices))
    matrix = scales.matrices[name]
    before = float(matrix.encode)
    with torch.no_grad():
        matrix.layer.weight.mul_(64.0)
    assert scales.update() == 1
    assert float(matrix.encode) < before
    pair.refit()
    if pair.cfg.nemo_fp8rl.quantizes_training:
        assert pair.mismatch() < ALIGNED


def test_resumed_scales_are_those_that_were_saved(pair, tmp_path):
    scales = pair.worker.global_scales
    if not scales.matrices:
        pytest.skip("the format has no global scale")
    pair.worker.save(str(tmp_path), optimizer=False)
    saved = {name: float(encode) for name, encode in scales.encodes().items()}
    for encode in scales.encodes().values():
        encode.mul_(0.5)
    scales.load(tmp_path)
    assert {name: float(encode) for name, encode in scales.encodes().items()} == saved


def test_training_lowers_the_loss(pair):
    batch = pair.samples()
    totals = loss_totals(64.0, batch.token_mask.sum())
    losses = [pair.worker.train_step(batch, NllLoss(), totals)["loss"] for _ in range(6)]
    assert losses[-1] < losses[0]
