"""The promise on a GPU, on Triton's interpreter: trainer and aligned engine give each token the same log-prob."""

from dataclasses import replace

import pytest
import torch

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.algorithms.mismatch import mismatch_metrics
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation import vllm_compat
from nemo_fp8rl.ops import alignment
from nemo_fp8rl.policy.layers.attention import CoreAttention
from tests.batches import loss_totals
from tests.conftest import RECIPES, SMALL
from tests.generation.pair import FREE, Pair

FP8_CACHE = "policy.generation.vllm_cfg.kv_cache_dtype=fp8"
PEFT = "policy.megatron_cfg.peft"
ADAPTERS = (f"{PEFT}.enabled=true", f"{PEFT}.dim=8", f"{PEFT}.lora_B_init_method=xavier")
CASES = [(family, flow) for family in ("qwen3", "qwen3_moe") for flow in ("fp8_e2e", "bf16")]
CASES += [("qwen3", "fp8_e2e", FP8_CACHE)]
CASES += [(family, flow, *ADAPTERS) for family, flow in CASES[:4]]
WINDOW = "policy.generation.vllm_cfg.kv_window=2"
LONG = [(family, flow) for family in ("qwen2", "llama") for flow in ("fp8_e2e", "bf16")]
LONG += [("qwen2", "bf16", FP8_CACHE)]
CASES += [("qwen3", "bf16", WINDOW)]
LONG += [("qwen3", "fp8_e2e", WINDOW, FP8_CACHE)]
SAMPLING = replace(FREE, max_new_tokens=5)


def case_name(case: tuple[str, ...]) -> str:
    return "-".join([*case[:2], *(["adapters"] if ADAPTERS[0] in case else case[2:])])


@pytest.fixture(
    scope="module",
    params=[
        *(pytest.param(case, id=case_name(case)) for case in CASES),
        *(pytest.param(case, id=case_name(case), marks=pytest.mark.long) for case in LONG),
    ],
)
def pair(request, tmp_path_factory):
    family, flow, *further = request.param
    if WINDOW in further and not vllm_compat.has_kv_windows():
        pytest.skip("the installed vLLM has no windows")
    folder = tmp_path_factory.mktemp(family) / "tiny"
    make_tiny(folder, "add", 0, family)
    paths = (f"policy.model_name={folder}/model", f"data.train.data_path={folder}/data.jsonl")
    replays = f"policy.router_replay.enabled={str(family == 'qwen3_moe').lower()}"
    keys = (f"nemo_fp8rl.flow={flow}", "nemo_fp8rl.align=vllm", replays, *further)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alignment, "has_gpu", lambda: True)
        pair = Pair(load(RECIPES / "tiny_cpu.yaml", [*SMALL, *paths, *keys]))
        pair.prompts = pair.prompts[:1]
        pair.refit()
        yield pair
        pair.close()


def check(pair, batch) -> None:
    """Every sampled token of the batch has the engine's log-prob, to the bit."""
    logprobs = pair.worker.logprobs(batch)
    metrics = mismatch_metrics(logprobs, batch.generation_logprobs, batch.token_mask)
    sampled = batch.token_mask.bool()
    assert sampled.sum() > 8
    assert torch.equal(logprobs[sampled], batch.generation_logprobs[sampled]), metrics
    assert metrics["token_mult_prob_error"] == 1.0


def sees_all_keys(pair, batch) -> None:
    """A trainer without the window has other log-probs, from the first token that does not see every key before."""
    dense = replace(pair.cfg, nemo_fp8rl=replace(pair.cfg.nemo_fp8rl, kv="rollout"))
    assert dense.trainer_kv_window is None
    with pytest.MonkeyPatch.context() as patch:
        for layer in pair.worker.model.modules():
            if isinstance(layer, CoreAttention):
                patch.setattr(type(layer), "kv_window", None)
        logprobs = pair.worker.logprobs(batch)
    first = int(batch.token_mask[0].nonzero()[0])
    same = logprobs == batch.generation_logprobs
    behind = first + pair.cfg.trainer_kv_window + 1
    assert same[:, first:behind][batch.token_mask[:, first:behind].bool()].all()
    assert not same[:, behind:][batch.token_mask[:, behind:].bool()].all()


def test_both_sides_have_the_same_fingerprint(pair):
    trainer, engines = pair.policy.describe().fingerprint, pair.generation.describe().fingerprint
    assert trainer == engines
    assert len(trainer) > 9


def test_every_token_has_the_engines_log_prob_before_and_after_refits(pair):
    batch = pair.samples(SAMPLING)
    check(pair, batch)
    pair.worker.train_step(batch, NllLoss(), loss_totals(4.0, float(batch.token_mask.sum())))
    pair.refit()
    batch = pair.samples(SAMPLING)
    check(pair, batch)
    if pair.cfg.trainer_kv_window:
        sees_all_keys(pair, batch)
    if pair.worker.hf.family.experts:
        assert batch.routed_experts is not None
        check(pair, replace(batch, routed_experts=None))
    pipeline = pair.worker.pipeline
    packing = replace(pipeline.policy.sequence_packing, enabled=True)
    pipeline.policy, policy = replace(pipeline.policy, sequence_packing=packing), pipeline.policy
    try:
        check(pair, batch)
    finally:
        pipeline.policy = policy


@pytest.mark.long
def test_pages_that_the_engine_frees_do_no_harm(tmp_path, monkeypatch):
    """Blocks of 32 tokens, so that answers of a few of them have some freed; the trainer never had any."""
    if not vllm_compat.has_kv_windows():
        pytest.skip("the installed vLLM has no windows")
    from nemo_fp8rl.generation import engine
    from nemo_fp8rl.generation.kv_window.spec import take_block_counts

    make_tiny(tmp_path / "tiny", "add", 0, "qwen3")
    tokens, folder, real = 100, tmp_path / "tiny", engine.engine_arguments
    monkeypatch.setattr(engine, "engine_arguments", lambda *a: real(*a) | {"block_size": 32})
    monkeypatch.setattr(alignment, "has_gpu", lambda: True)
    paths = (f"policy.model_name={folder}/model", f"data.train.data_path={folder}/data.jsonl")
    keys = ("nemo_fp8rl.flow=bf16", "nemo_fp8rl.align=vllm", "policy.generation.vllm_cfg.kv_window=20")
    lengths = f"policy.max_total_sequence_length={tokens + 10}", f"policy.generation.max_new_tokens={tokens}"
    pair = Pair(load(RECIPES / "tiny_cpu.yaml", [*SMALL, *paths, *keys, *lengths]))
    try:
        pair.prompts = pair.prompts[:1]
        pair.refit()
        take_block_counts()
        batch = pair.samples(replace(SAMPLING, max_new_tokens=tokens))
        peak, kept, dense = take_block_counts()
        assert batch.token_mask.sum(1).max() > 90
        assert peak < -(-(int(batch.input_lengths.max())) // 32)
        assert kept < dense
        check(pair, batch)
    finally:
        pair.close()
