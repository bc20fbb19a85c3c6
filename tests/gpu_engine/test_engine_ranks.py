"""A real engine of several tensor-parallel ranks, and as many trainer ranks, give each token the same log-prob."""

import os
from pathlib import Path

import pytest
import torch
import torch._dynamo

from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation import engine_checks
from nemo_fp8rl.ops import alignment
from tests.conftest import RECIPES, SMALL
from tests.generation.pair import Pair
from tests.gpu_engine import engine_ranks
from tests.gpu_engine.test_aligned_ranks import interpret_kernels
from tests.gpu_engine.test_zero_mismatch import SAMPLING
from tests.policy.ranks import Ranks

ENGINE, TRAINER = "policy.generation.vllm_cfg.", "policy.megatron_cfg."
EXPERT_RANKS = (
    f"{ENGINE}expert_parallel_size=2",
    f"{TRAINER}expert_model_parallel_size=2",
    f"{TRAINER}expert_tensor_parallel_size=1",
)
CASES = [
    pytest.param("qwen3", 2, (), id="qwen3"),
    pytest.param("qwen3_moe", 2, EXPERT_RANKS, id="qwen3_moe", marks=pytest.mark.long),
    pytest.param("qwen3", 4, (f"{ENGINE}enforce_eager=false",), id="qwen3-four-traced", marks=pytest.mark.long),
]


def is_traced(worker) -> bool:
    """Return whether torch has traced a graph in the process of an engine's rank."""
    return bool(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize(("family", "count", "keys"), CASES)
def test_ranks_of_both_sides_agree_in_every_token(tmp_path, monkeypatch, family, count, keys):
    """The weights come from a further process, which is a trainer of one rank."""
    make_tiny(tmp_path / "tiny", "add", 0, family, num_key_value_heads=count)
    paths = (f"policy.model_name={tmp_path}/tiny/model", f"data.train.data_path={tmp_path}/tiny/data.jsonl")
    base = [*SMALL, *paths, "nemo_fp8rl.flow=fp8_e2e", "nemo_fp8rl.align=vllm"]
    base += [f"{ENGINE}tensor_parallel_size={count}", *(key for key in keys if key.startswith(ENGINE))]
    split = (f"{TRAINER}tensor_model_parallel_size={count}", f"{TRAINER}sequence_parallel=true")
    several = ("cluster.backend=ray", f"cluster.train_ranks={count}", "policy.train_micro_batch_size=16", *split)
    trainer = load(RECIPES / "tiny_cpu.yaml", [*base, *several, *(key for key in keys if key.startswith(TRAINER))])
    ranks = Ranks(count, [interpret_kernels] * count)
    monkeypatch.setattr(alignment, "has_gpu", lambda: True)
    monkeypatch.setattr(engine_checks, "check_shared_operations", lambda hf, cfg: None)  # the sender has one rank
    (folder,) = engine_ranks.__path__
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((folder, str(Path(__file__).parents[2]))))
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # of `is_traced`
    traces = f"{ENGINE}enforce_eager=false" in keys
    if traces:
        monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
        monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # a graph is called as torch traced it
    pair = Pair(load(RECIPES / "tiny_cpu.yaml", base))
    try:
        pair.prompts = pair.prompts[:1]
        pair.refit()
        batch = pair.samples(SAMPLING)
        assert pair.engine.core.llm.collective_rpc(is_traced) == [traces] * count
        sampled = batch.token_mask.bool()
        assert sampled.sum() > 8
        ranks.setup(trainer)
        for logprobs in ranks.call("logprobs", batch):
            assert torch.equal(logprobs[sampled], batch.generation_logprobs[sampled])
        assert not torch.equal(pair.worker.logprobs(batch)[sampled], batch.generation_logprobs[sampled])
    finally:
        pair.close()
        ranks.close()
