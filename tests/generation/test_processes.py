"""Engines whose core or ranks are processes of their own are refitted to what a fresh engine is, too."""

from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation import engine_checks
from nemo_fp8rl.generation.engine import VllmEngine
from nemo_fp8rl.workers import vllm_sockets
from tests.conftest import RECIPES, SMALL
from tests.generation.pair import FREE, GREEDY, Pair, outputs, tiny_pair

CACHE = "kv_cache_dtype=fp8"
SPREAD = ("async_engine=true", "tensor_parallel_size=2", "expert_parallel_size=2")
CASES = {
    "dense, async": ("qwen3", "fp8_e2e", "auto", ("async_engine=true",)),
    "dense, async, FP8 KV cache": ("qwen3", "fp8_e2e", "auto", ("async_engine=true", CACHE)),
    "dense, bfloat16, async": ("qwen3", "bf16", "auto", ("async_engine=true",)),
    "experts, async": ("qwen3_moe", "fp8_e2e", "auto", ("async_engine=true",)),
    "experts, async, FP8 KV cache": ("qwen3_moe", "fp8_e2e", "auto", ("async_engine=true", CACHE)),
    "experts, async, spread": ("qwen3_moe", "fp8_e2e", "auto", (*SPREAD, CACHE)),
    "experts, bfloat16, async": ("qwen3_moe", "bf16", "auto", ("async_engine=true", CACHE)),
    "dense, tensor parallel": ("qwen3", "fp8_e2e", "collective", ("tensor_parallel_size=2",)),
    "dense, NIXL": ("qwen3", "fp8_e2e", "nixl", ("async_engine=true",)),
}
if find_spec("nixl") is None:  # make test-nixl
    del CASES["dense, NIXL"]

LONG = CASES.keys() - {"experts, async, FP8 KV cache", "dense, tensor parallel", "dense, NIXL"}


@pytest.fixture(
    scope="module", params=[pytest.param(case, marks=[pytest.mark.long] * (case in LONG)) for case in CASES]
)
def pair(request, tmp_path_factory) -> Iterator[Pair]:
    family, flow, transport, layout = CASES[request.param]
    folder = tmp_path_factory.mktemp(family) / "tiny"
    make_tiny(folder, "add", 0, family)
    overrides = (
        f"policy.model_name={folder}/model",
        f"data.train.data_path={folder}/data.jsonl",
        "policy.megatron_cfg.optimizer.lr=0.002",
        "policy.megatron_cfg.scheduler.lr_warmup_iters=0",
        f"policy.router_replay.enabled={str((family, flow) == ('qwen3_moe', 'fp8_e2e')).lower()}",
        f"nemo_fp8rl.flow={flow}",
        f"nemo_fp8rl.refit.transport={transport}",
        "nemo_fp8rl.refit.mode=delta",
        *(f"policy.generation.vllm_cfg.{key}" for key in layout),
    )
    pair = Pair(load(RECIPES / "tiny_cpu.yaml", [*SMALL, *overrides]))
    yield pair
    pair.close()


def test_after_one_and_after_ten_refits_it_is_a_fresh_engine(pair, tmp_path):
    pair.is_fresh_after_refits(tmp_path)
    assert pair.mismatch() < pair.limit


def test_its_batches_are_as_large_as_those_of_vllms_own_llm(pair):
    processes = pair.cfg.policy.generation.vllm_cfg.tensor_parallel_size
    assert pair.engine.core.llm.vllm_config.scheduler_config.max_num_seqs == 256 * processes


def test_an_incomplete_refit_is_refused_by_name_and_the_next_one_counts(pair):
    same_batches = not pair.cfg.policy.generation.vllm_cfg.async_engine
    pair.refit()
    before = outputs(pair.generate(GREEDY), same_batches)
    pair.refit_without("model.layers.1.self_attn.o_proj.weight")
    pair.refit()
    assert outputs(pair.generate(GREEDY), same_batches) == before


@pytest.mark.parametrize(
    ("family", "flow"), [("qwen3_moe", "mxfp8_e2e"), pytest.param("qwen3", "fp8_e2e", marks=pytest.mark.long)]
)
def test_two_ranks_add_adapters_as_the_trainer_does_on_one(tmp_path, family, flow):
    peft = "enabled=true", "dim=8", "lora_B_init_method=xavier"
    overrides = (
        f"nemo_fp8rl.flow={flow}",
        "nemo_fp8rl.refit.transport=collective",
        "policy.generation.vllm_cfg.tensor_parallel_size=2",
        *(f"policy.megatron_cfg.peft.{key}" for key in peft),
    )
    pair = tiny_pair(tmp_path / "tiny", family, *overrides)
    try:
        for _ in range(2):
            pair.refit()
            assert pair.mismatch() < pair.limit
            pair.train(1)
    finally:
        pair.close()


@pytest.mark.parametrize(
    "layout", ["async_engine=true", pytest.param("tensor_parallel_size=2", marks=pytest.mark.long)]
)
def test_what_a_process_of_its_own_refuses_is_said_in_one_sentence(recipe, monkeypatch, layout):
    """By vLLM, where this machine seems to have the memory."""
    here = "policy.generation.vllm_cfg"
    cfg = recipe(f"{here}.{layout}", f"{here}.kv_cache_memory_gib=100000")
    with pytest.raises(UserError, match=rf"{here}.kv_cache_memory_gib=100000 is more than this machine has free"):
        VllmEngine().setup(cfg)
    monkeypatch.setattr(
        engine_checks, "psutil", SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=1 << 60))
    )
    with pytest.raises(UserError, match=r"cannot start the processes of an engine .*; what they wrote says why"):
        VllmEngine().setup(cfg)


def test_experts_come_with_the_answers(pair):
    if not pair.cfg.policy.router_replay.enabled:
        pytest.skip("no experts")
    pair.refit()
    for group, prompt in zip(pair.generate(FREE), pair.prompts, strict=True):
        for completion in group:
            assert completion.routed_experts.shape == (len(prompt.token_ids) + len(completion.token_ids) - 1, 2, 2)
            assert 0 <= completion.routed_experts.min() <= completion.routed_experts.max() < 8


def test_vllms_sockets_go_with_the_engine(pair):
    """The last test of an engine."""
    assert any(path.is_socket() for path in vllm_sockets.folder().iterdir())
    assert vllm_sockets.folder().stat().st_mode & 0o777 == 0o700
    pair.engine.shutdown()
    assert not vllm_sockets.folder().exists()
