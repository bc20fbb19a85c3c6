"""A trainer that sees the window of its engine: equal log-probs in answers of hundreds of tokens."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_fp8rl.algorithms.mismatch import MismatchSums
from nemo_fp8rl.batch import RolloutBatch
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation.interface import Sampling
from nemo_fp8rl.policy.layers.attention import CoreAttention
from tests.conftest import BATCH_INVARIANT, RECIPES, SMALL
from tests.generation.pair import Pair, outputs
from tests.policy.sent import sent_tensors

TOKENS, WINDOW = 320, 32
LONG = Sampling(num_generations=4, max_new_tokens=TOKENS, temperature=1.0, stop_token_ids=())
KEYS = (
    f"policy.generation.vllm_cfg.kv_window={WINDOW}",
    f"policy.generation.max_new_tokens={TOKENS}",
    "policy.max_total_sequence_length=384",
)
CASES = [
    ("qwen3", "fp8_e2e", "auto"),
    ("qwen3", "bf16", "fp8"),
    ("qwen3_moe", "bf16", "auto"),
    pytest.param(("qwen3", "bf16", "auto"), marks=pytest.mark.long),
    pytest.param(("qwen3", "fp8_e2e", "fp8"), marks=pytest.mark.long),
    pytest.param(("qwen3_moe", "fp8_e2e", "auto"), marks=pytest.mark.long),
    pytest.param(("qwen3_moe", "fp8_e2e", "fp8"), marks=pytest.mark.long),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def pair(request, tmp_path_factory):
    family, flow, cache = request.param
    folder = tmp_path_factory.mktemp(family) / "tiny"
    make_tiny(folder, "add", 0, family, max_position_embeddings=512)
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps(config | {"eos_token_id": None}))  # no answer ends early
    overrides = *KEYS, f"nemo_fp8rl.flow={flow}", f"policy.generation.vllm_cfg.kv_cache_dtype={cache}"
    paths = f"policy.model_name={folder}/model", f"data.train.data_path={folder}/data.jsonl"
    step = "policy.megatron_cfg.optimizer.lr=0.002", "policy.megatron_cfg.scheduler.lr_warmup_iters=0"
    pair = Pair(load(RECIPES / "tiny_cpu.yaml", [*SMALL, *paths, *step, *overrides]))
    pair.prompts = [replace(p, token_ids=p.token_ids[: 2 + i]) for i, p in enumerate(pair.prompts[:4])]
    pair.refit()
    pair.train(2)
    pair.refit()
    yield pair
    pair.close()


def compare(pair: Pair, batch: RolloutBatch) -> dict[str, float]:
    sums = MismatchSums()
    sums.observe(pair.worker.logprobs(batch), batch.generation_logprobs, batch.token_mask)
    return sums.metrics() | sums.by_position()


def by_position(metrics: dict[str, float]) -> dict[str, float]:
    return {name.split("position_")[1]: value for name, value in metrics.items() if "gen_kl_error/position" in name}


def test_trainer_and_engine_agree_beyond_the_window(pair):
    batch = pair.samples(LONG)
    assert batch.token_mask.sum() == 16 * TOKENS
    metrics = compare(pair, batch)
    assert metrics["token_mult_prob_error"] < pair.limit
    if BATCH_INVARIANT and pair.limit < 1.001:
        assert metrics["exact_logprob_fraction"] == 1.0
        assert set(by_position(metrics).values()) == {0.0}


def test_a_dense_trainer_is_off_from_the_first_token_beyond_the_window(pair, monkeypatch):
    """That is `nemo_fp8rl.kv: rollout`."""
    batch = pair.samples(LONG)
    for module in pair.worker.model.modules():
        if isinstance(module, CoreAttention):
            monkeypatch.setattr(type(module), "kv_window", None)
    metrics = compare(pair, batch)
    assert metrics["token_mult_prob_error"] > 1.02
    errors = by_position(metrics)
    within = [value for name, value in errors.items() if int(name.split("_")[-1]) < WINDOW]
    beyond = [value for name, value in errors.items() if int(name.split("_")[0]) > WINDOW]
    assert len(within) == 6
    assert len(beyond) == 3
    assert max(within) < 1e-6
    assert min(beyond) > 1e-3


def test_a_window_above_the_length_is_a_dense_engine_to_the_bit(pair, tmp_path: Path):
    if pair.cfg.nemo_fp8rl.flow == "bf16" and not pair.cfg.fp8_kv_cache:
        pytest.skip("one engine of each kind of cache will do")
    tensors = sent_tensors(pair.worker)
    dense, wide = (
        outputs(pair.generate(LONG, pair.fresh_engine(tensors, tmp_path / str(window), kv_window=window)))
        for window in (None, TOKENS)
    )
    assert dense == wide
    assert dense != outputs(pair.generate(LONG))
