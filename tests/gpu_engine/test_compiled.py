"""The engine's methods in a graph: torch traces vLLM's model whole, as it does on a GPU, and a refit changes what it
computes. Nothing is compiled: vLLM's backend for tests on CPUs runs the graph as it was traced.
"""

from dataclasses import replace

import pytest
import torch._dynamo
from torch._dynamo.utils import counters

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.algorithms.mismatch import mismatch_metrics
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from tests.batches import loss_totals
from tests.conftest import RECIPES, SMALL
from tests.generation.pair import Pair, outputs
from tests.gpu_engine.test_engine import SHORT, addresses
from tests.policy.sent import sent_tensors

SAMPLES = replace(SHORT, num_generations=4, temperature=1.0)


@pytest.fixture
def pair(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    counters.clear()
    make_tiny(tmp_path / "tiny", "add")
    paths = (f"policy.model_name={tmp_path}/tiny/model", f"data.train.data_path={tmp_path}/tiny/data.jsonl")
    compiled = ("nemo_fp8rl.flow=fp8_e2e", "policy.generation.vllm_cfg.enforce_eager=false")
    pair = Pair(load(RECIPES / "tiny_cpu.yaml", [*SMALL, *paths, *compiled]))
    pair.prompts = pair.prompts[:3]
    with torch._dynamo.config.patch(disable=False):  # as it was set when torch._dynamo was imported
        yield pair
    pair.close()


def test_a_refit_of_a_traced_engine_gives_a_fresh_one(pair, tmp_path):
    pair.refit()
    before, held = outputs(pair.generate(SHORT)), addresses(pair)
    assert counters["stats"]["unique_graphs"] == 1
    batch = pair.samples(SAMPLES)
    unaligned = MegatronWorker()
    unaligned.setup(replace(pair.cfg, nemo_fp8rl=replace(pair.cfg.nemo_fp8rl, align="none")), 0, 1, None)
    logprobs = unaligned.logprobs(batch)
    error = mismatch_metrics(logprobs, batch.generation_logprobs, batch.token_mask)["token_mult_prob_error"]
    print(f"traced, without alignment: token_mult_prob_error {error:.4f}")
    assert 1.001 < error < 1.05
    pair.worker.train_step(batch, NllLoss(), loss_totals(12.0, batch.token_mask.sum()))
    pair.refit()
    assert addresses(pair) == held
    after = outputs(pair.generate(SHORT))
    assert after != before
    fresh = pair.fresh_engine(sent_tensors(pair.worker), tmp_path / "fresh", enforce_eager=False)
    assert after == outputs(pair.generate(SHORT, fresh))
