"""An engine that computes by the operations which the trainer shares: its bits, its layers, and its refits."""

from dataclasses import replace

import pytest
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation.fp8_method.shared_ops.layers import LAYERS, SharedRMSNorm
from nemo_fp8rl.ops import alignment
from tests.batches import loss_totals
from tests.conftest import RECIPES, SMALL
from tests.generation.pair import GREEDY, Pair, outputs
from tests.gpu_engine.pages_on_cpu import SharedCpuAttention
from tests.gpu_engine.test_engine import addresses
from tests.policy.sent import sent_tensors

CASES = [("qwen3", "fp8_e2e"), ("qwen3_moe", "fp8_e2e"), ("qwen2", "bf16"), ("qwen3_moe", "bf16")]
LONG = CASES[1:]
PARAMETERS = [pytest.param(case, marks=[pytest.mark.long] * (case in LONG), id="-".join(case)) for case in CASES]
ANSWER = replace(GREEDY, max_new_tokens=4)


@pytest.fixture(scope="module", params=PARAMETERS)
def pair(request, tmp_path_factory):
    family, flow = request.param
    folder = tmp_path_factory.mktemp(family) / "tiny"
    make_tiny(folder, "add", 0, family)
    paths = (f"policy.model_name={folder}/model", f"data.train.data_path={folder}/data.jsonl")
    keys = (f"nemo_fp8rl.flow={flow}", "nemo_fp8rl.refit.mode=delta", "nemo_fp8rl.align=vllm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alignment, "has_gpu", lambda: True)
        pair = Pair(load(RECIPES / "tiny_cpu.yaml", [*SMALL, *paths, *keys]))
        pair.prompts = pair.prompts[:3]
        pair.refit()
        yield pair
        pair.close()


def layers(of_engine):
    (modules,) = of_engine.core.llm.apply_model(lambda model: list(model.modules()))
    return modules


def test_its_layers_are_the_shared_ones(pair):
    modules = layers(pair.engine)
    names = {type(module).__name__ for module in modules}
    is_fp8, has_experts = pair.cfg.nemo_fp8rl.quantizes_rollout, bool(pair.worker.hf.family.experts)
    mlp = "SharedMoERunner" if has_experts else "SharedSiluAndMul"
    assert {"SharedRMSNorm", "SharedRotaryEmbedding", mlp} <= names
    assert not names & LAYERS.keys()
    attention = [module for module in modules if isinstance(module, Attention)]
    assert attention
    assert all(isinstance(module.impl, SharedCpuAttention) for module in attention)
    methods = {type(m.quant_method).__name__ for m in modules if hasattr(m, "quant_method")}
    linears = {"SharedFp8LinearMethod"} if is_fp8 else {"SharedLinearMethod"}
    experts = {"SharedLinearMethod", "SharedFp8MoEMethod" if is_fp8 else "SharedMoEMethod"} if has_experts else set()
    assert methods - {"Fp8KVCacheMethod", "NoneType"} == {"SharedEmbeddingMethod", *linears, *experts}
    assert "operations shared with the trainer (nemo_fp8rl.ops)" in pair.generation.describe().kernels


def test_a_log_prob_does_not_depend_on_how_its_token_was_reached(pair):
    """Decoded, or prefilled as the end of a longer prompt, and in other batches."""
    whole = [tokens for ((tokens, _),) in outputs(pair.generate(ANSWER))]
    expected = {p.index: group[0].logprobs for p, group in zip(pair.prompts, pair.generate(ANSWER), strict=True)}
    for known in (1, 3):
        longer = [
            replace(p, token_ids=(*p.token_ids, *tokens[:known])) for p, tokens in zip(pair.prompts, whole, strict=True)
        ]
        for batch in (longer, longer[:1]):
            rest = replace(ANSWER, max_new_tokens=ANSWER.max_new_tokens - known)
            for prompt, tokens, (answer,) in zip(batch, whole, pair.generate(rest, prompts=batch), strict=False):
                assert answer.token_ids == tokens[known:]
                assert answer.logprobs == expected[prompt.index][known:]


def test_deltas_in_place_give_a_fresh_engine(pair, tmp_path):
    before, held = outputs(pair.generate(ANSWER)), addresses(pair)
    batch = pair.samples(replace(ANSWER, num_generations=4, temperature=1.0))
    for _ in range(2):
        pair.worker.train_step(batch, NllLoss(), loss_totals(12.0, batch.token_mask.sum()))
        report = pair.refit()
    assert report.delta
    assert addresses(pair) == held
    store = pair.engine.core.llm.model_executor.driver_worker.worker.weight_store
    assert store.direct_names == store.slots.keys()
    got = outputs(pair.generate(ANSWER))
    assert got != before
    fresh = pair.fresh_engine(sent_tensors(pair.worker), tmp_path / "fresh")
    assert got == outputs(pair.generate(ANSWER, fresh))


def test_an_engine_beside_it_keeps_vllms_layers(pair, tmp_path):
    aligned = outputs(pair.generate(ANSWER))
    tensors = sent_tensors(pair.worker)
    pair.cfg, cfg = replace(pair.cfg, nemo_fp8rl=replace(pair.cfg.nemo_fp8rl, align="none")), pair.cfg
    try:
        other = pair.fresh_engine(tensors, tmp_path / "other")
    finally:
        pair.cfg = cfg
    modules = layers(other)
    assert not any(isinstance(module.impl, SharedCpuAttention) for module in modules if isinstance(module, Attention))
    norms = [module for module in modules if isinstance(module, RMSNorm)]
    assert all(norm._forward_method.__name__ != SharedRMSNorm.shared_forward.__name__ for norm in norms)
    assert outputs(pair.generate(ANSWER, other)) != aligned
    assert outputs(pair.generate(ANSWER)) == aligned
