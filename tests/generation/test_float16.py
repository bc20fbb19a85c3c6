"""Trainer and engine in float16, with FP8 and without: log-probs, the dtype of a refit, a refit after an overflow."""

import pytest
import torch

from tests.conftest import ALIGNED
from tests.generation.pair import GREEDY, outputs, tiny_pair
from tests.policy.sent import sent_tensors


@pytest.fixture(scope="module", params=["bf16", "fp8_e2e"])
def pair(request, tmp_path_factory):
    keys = "policy.precision=float16", f"nemo_fp8rl.flow={request.param}"
    pair = tiny_pair(tmp_path_factory.mktemp("half") / "tiny", "qwen3", *keys)
    yield pair
    pair.close()


def test_trainer_and_engine_agree_on_the_engines_samples(pair):
    pair.refit()
    pair.train(1)
    pair.refit()
    assert pair.mismatch() < ALIGNED


def test_weights_outside_fp8_travel_and_stay_in_float16(pair):
    pair.refit()
    (held,) = pair.engine.core.llm.apply_model(lambda model: {n: p.data.clone() for n, p in model.named_parameters()})
    sent = sent_tensors(pair.worker)
    norm, query = "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"
    assert sent[norm].dtype == held[norm].dtype == torch.float16
    assert torch.equal(sent[norm], held[norm])
    assert (sent[query].dtype == torch.float16) == (pair.cfg.nemo_fp8rl.flow == "bf16")


def test_after_an_overflow_a_refit_changes_no_answer_and_training_goes_on(pair):
    pair.refit()
    before = outputs(pair.generate(GREEDY))
    (scaler,) = pair.worker.loss_scale.scalers
    scaler._scale.fill_(2.0**40)
    steps = pair.worker.optimizer_steps
    pair.train(1)
    assert pair.worker.optimizer_steps == steps
    pair.refit()
    assert outputs(pair.generate(GREEDY)) == before
    scaler._scale.fill_(1024.0)
    pair.train(1)
    pair.refit()
    assert outputs(pair.generate(GREEDY)) != before
    assert pair.mismatch() < ALIGNED
