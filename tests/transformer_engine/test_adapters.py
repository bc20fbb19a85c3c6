"""Adapters beside Transformer Engine's layers, whose frozen weights exist only in FP8, equal those beside emulation."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.hf.adapters import is_adapter
from nemo_fp8rl.policy.weights.fp8_params import is_fp8, row_tensors
from tests.policy.sent import sent_tensors
from tests.transformer_engine.test_worker import batch, give, rank, step

pytestmark = pytest.mark.transformer_engine
PEFT = "policy.megatron_cfg.peft"


@pytest.fixture(params=["qwen3-fp8_e2e", "qwen2-fp8_e2e", "qwen3_moe-fp8_e2e", "qwen3_moe-bf16"])
def cfg(recipe, tmp_path, request):
    family, _, flow = request.param.partition("-")
    write_model(tmp_path / "model", seed=3, family=family)
    return recipe(
        f"policy.model_name={tmp_path}/model",
        f"nemo_fp8rl.flow={flow}",
        "nemo_fp8rl.align=none",
        f"{PEFT}.enabled=true",
        f"{PEFT}.dim=8",
        f"{PEFT}.lora_B_init_method=xavier",
    )


def test_a_step_is_that_of_the_emulation(cfg):
    with rank(cfg, gpu=False) as worker:
        expected_logprobs, expected, bytes_ = worker.logprobs(batch(0)), step(worker, 0), sent_tensors(worker)
    with rank(cfg, gpu=True) as worker:
        parameters = dict(worker.model.named_parameters())
        held = {name for name, parameter in parameters.items() if is_fp8(parameter)}
        assert bool(held) == cfg.nemo_fp8rl.quantizes_training
        assert not any(getattr(parameters[name], "get_high_precision_init_val", lambda: None)() for name in held)
        assert not any(parameter.requires_grad != is_adapter(name) for name, parameter in parameters.items())
        before = sent_tensors(worker)
        logprobs, metrics, sent = worker.logprobs(batch(0)), step(worker, 0), sent_tensors(worker)
        second = step(worker, 0)["loss"]
    assert torch.equal(logprobs, expected_logprobs)
    assert metrics["loss"] == expected["loss"]
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
    assert second != metrics["loss"]
    assert sent.keys() == bytes_.keys()
    moved = {name for name in sent if not torch.equal(sent[name].view(torch.uint8), before[name].view(torch.uint8))}
    assert moved and all(map(is_adapter, moved))
    for name in sent:
        if not is_adapter(name):
            assert torch.equal(sent[name].view(torch.uint8), bytes_[name].view(torch.uint8)), name


def test_offloaded_with_the_base_as_reference(cfg, tmp_path: Path):
    cfg = replace(cfg, loss_fn=replace(cfg.loss_fn, reference_policy_kl_penalty=0.1))
    with rank(cfg, gpu=True) as worker:
        base, policy = worker.reference_logprobs(batch(0)), worker.logprobs(batch(0))
        assert not torch.equal(base, policy)
        for _ in range(2):
            give(worker, gpu=True)
            frozen = [row for p in worker.model.parameters() if not p.requires_grad for row in row_tensors(p)]
            assert not any(row.untyped_storage().nbytes() for row in frozen)
            assert torch.equal(worker.reference_logprobs(batch(0)), base)
            assert torch.equal(worker.logprobs(batch(0)), policy)
        worker.prepare_for_training()
        step(worker, 0)
        worker.save(str(tmp_path / "saved"))
        expected = step(worker, 1)
        assert torch.equal(worker.reference_logprobs(batch(0)), base)
    with rank(cfg, gpu=True) as worker:
        worker.load(str(tmp_path / "saved"))
        assert step(worker, 1) == expected
