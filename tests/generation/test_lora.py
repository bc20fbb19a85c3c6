"""Low-rank adapters over frozen bases through the whole circle: trainer, refit, engine."""

import math

import pytest
import torch

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.hf.adapters import adapter_tensors, is_adapter
from tests.batches import loss_totals
from tests.generation.pair import Pair, tiny_pair

CASES = {
    "qwen3-bf16": ("qwen3", "bf16"),
    "qwen3-fp8_e2e": ("qwen3", "fp8_e2e"),
    "qwen3-nvfp4_a16_e2e": ("qwen3", "nvfp4_a16_e2e"),
    "qwen3_moe-fp8_e2e": ("qwen3_moe", "fp8_e2e"),
    "qwen3_moe-bf16": ("qwen3_moe", "bf16"),
    "qwen3_moe-nvfp4_e2e": ("qwen3_moe", "nvfp4_e2e"),
}
LONG = {"qwen3_moe-bf16", "qwen3_moe-nvfp4_e2e"}


@pytest.fixture(
    scope="module", params=[pytest.param(case, marks=[pytest.mark.long] * (case in LONG)) for case in CASES]
)
def pair(request, tmp_path_factory):
    family, flow = CASES[request.param]
    peft = "enabled=true", "lora_B_init_method=kaiming"
    overrides = f"nemo_fp8rl.flow={flow}", *(f"policy.megatron_cfg.peft.{key}" for key in peft)
    rate = "policy.megatron_cfg.optimizer.lr=0.01"
    pair = tiny_pair(tmp_path_factory.mktemp(family) / "tiny", family, *overrides, rate)
    yield pair
    pair.close()


def test_every_token_has_the_engines_log_prob_and_later_refits_bring_adapters_alone(pair, request):
    tensors = adapter_tensors(pair.worker.hf, pair.worker.layout.adapters)
    adapter_bytes = sum(2 * math.prod(shape) for shape in tensors.values())
    assert pair.refit().nbytes > adapter_bytes
    frozen, earlier = engine_memory(pair, adapters=False), engine_memory(pair, adapters=True)
    for steps in (0, 1, 2):
        if steps:
            pair.train(steps)
            assert pair.refit().nbytes == adapter_bytes
            present = engine_memory(pair, adapters=True)
            assert present.keys() == tensors.keys()
            assert all(present[name] != earlier[name] for name in tensors)
            earlier = present
        batch = pair.samples()
        sampled = batch.token_mask.bool()
        assert pair.mismatch() < pair.limit
        if pair.limit < 1.000_01:
            assert torch.equal(pair.worker.logprobs(batch)[sampled], batch.generation_logprobs[sampled])
    assert len(frozen) > (20 if pair.cfg.nemo_fp8rl.quantizes_rollout else 10)  # vLLM repacks matrices of bfloat16
    assert engine_memory(pair, adapters=False) == frozen


def test_the_reference_policy_is_the_base_and_adapters_act_again_after_it(pair):
    batch = pair.samples()
    before = pair.worker.logprobs(batch)
    reference = pair.worker.reference_logprobs(batch)
    assert torch.equal(pair.worker.logprobs(batch), before)
    rows = [p for name, p in pair.worker.model.named_parameters() if ".lora_B" in name]
    values = [p.detach().clone() for p in rows]
    for p in rows:
        p.data.zero_()
    without = pair.worker.logprobs(batch)
    for p, value in zip(rows, values, strict=True):
        p.data.copy_(value)
    assert torch.equal(reference, without)
    assert not torch.equal(reference, before)


def test_training_lowers_the_loss(pair):
    batch = pair.samples()
    totals = loss_totals(64.0, batch.token_mask.sum())
    losses = [pair.worker.train_step(batch, NllLoss(), totals)["loss"] for _ in range(6)]
    assert losses[-1] < losses[0]


def engine_memory(pair: Pair, adapters: bool) -> dict[str, str]:
    """The digest of each tensor in the engine's memory, by name: of the adapters, or of the base."""
    (digests,) = pair.engine.core.llm.collective_rpc(_digests)
    return {name: digest for name, digest in digests.items() if is_adapter(name) == adapters}


def _digests(engine_worker) -> dict[str, str]:
    contents = {name: slot.content() for name, slot in engine_worker.weight_store.all_slots.items()}
    return {name: content.digest for name, content in contents.items() if content is not None}
