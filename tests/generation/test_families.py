"""Every family through the whole circle: trainer, refit, engine. test_engine.py goes deeper, on Qwen3."""

import pytest
import torch

from tests.conftest import HALF_HEADS, LLAMA3_ROPE, YARN
from tests.generation.pair import tiny_pair
from tests.policy.sent import sent_tensors

CASES = [
    ("llama", "fp8_e2e", {**HALF_HEADS, "rope_parameters": LLAMA3_ROPE}),
    ("llama", "fp8_rollout", HALF_HEADS),
    ("llama", "bf16", {"tie_word_embeddings": True}),
    ("qwen3", "fp8_e2e", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    ("qwen2", "fp8_e2e", {}),
    ("qwen2", "bf16", {}),
    ("qwen3_moe", "fp8_e2e", {}),
    ("qwen3_moe", "bf16", {}),
]


LONG = {("llama", "fp8_rollout"), ("llama", "bf16"), ("qwen2", "bf16")}


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=[pytest.mark.long] * (case[:2] in LONG)) for case in CASES],
    ids=lambda case: "-".join(case[:2]),
)
def pair(request, tmp_path_factory):
    family, flow, sizes = request.param
    pair = tiny_pair(tmp_path_factory.mktemp(family) / "tiny", family, f"nemo_fp8rl.flow={flow}", **sizes)
    yield pair
    pair.close()


def test_after_one_and_after_ten_refits_it_is_a_fresh_engine(pair, tmp_path):
    pair.is_fresh_after_refits(tmp_path)


def test_the_engine_holds_the_experts_bytes(pair):
    """Stacked as vLLM stacks them, [experts, gate above up] and [experts, down], bytes and scales."""
    pair.refit()
    sent = sent_tensors(pair.worker)
    gate = ".gate_proj.weight"
    experts = [name.removesuffix(gate) for name in sent if ".experts." in name and name.endswith(gate)]
    if not experts or not pair.cfg.nemo_fp8rl.quantizes_rollout:
        pytest.skip("no FP8 experts")
    (held,) = pair.engine.core.llm.apply_model(lambda model: {n: p.data.clone() for n, p in model.named_parameters()})
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        own = [name for name in experts if name.startswith(prefix)]
        assert len(own) == 8
        for leaf in ("weight", "weight_scale_inv"):
            gate_up = [torch.cat([_bytes(sent[f"{e}.{x}_proj.{leaf}"]) for x in ("gate", "up")]) for e in own]
            assert torch.equal(_bytes(held[f"{prefix}routed_experts.w13_{leaf}"]), torch.stack(gate_up))
            down = [_bytes(sent[f"{e}.down_proj.{leaf}"]) for e in own]
            assert torch.equal(_bytes(held[f"{prefix}routed_experts.w2_{leaf}"]), torch.stack(down))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_trainer_and_engine_agree_on_the_engines_samples(pair):
    pair.refit()
    pair.train(1)
    pair.refit()
    choice = pair.cfg.nemo_fp8rl
    assert (pair.mismatch() < pair.limit) == (choice.quantizes_training == choice.quantizes_rollout)
