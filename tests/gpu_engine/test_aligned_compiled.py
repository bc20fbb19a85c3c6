"""An aligned engine in a graph, as torch traces the model on a GPU: no compiler gets a sum or a rounding to change."""

from dataclasses import replace

import pytest
import torch._dynamo
from torch._dynamo.backends import registry

from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation.engine import VllmEngine
from nemo_fp8rl.ops import alignment
from tests.conftest import RECIPES, SMALL
from tests.generation.pair import GREEDY, outputs

OPERATION_TYPES = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
OPERATIONS = {
    *(f"nemo_fp8rl.{name}.default" for name in ("linear", "rms_norm", "add_rms_norm", "rotate", "silu_mul")),
    *(f"vllm.{name}" for name in ("unified_attention_with_output", "unified_kv_cache_update")),
}
MOVES = {"Size", "embedding", "empty", "flatten", "getitem", "long", "size", "split", "view"}
"""What changes no value."""
PROMPTS = [(5, 6, 7, 8), (9, 10, 11)]


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts engines from one checkpoint, of the keys given."""
    make_tiny(tmp_path / "tiny", "add")
    paths = (f"policy.model_name={tmp_path}/tiny/model", f"data.train.data_path={tmp_path}/tiny/data.jsonl")
    keys = ("nemo_fp8rl.flow=bf16", "nemo_fp8rl.align=vllm")
    monkeypatch.setattr(alignment, "has_gpu", lambda: True)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # vLLM reads it once, at the first engine
    engines = []

    def start(*more: str) -> VllmEngine:
        engine = VllmEngine()
        engine.setup(load(RECIPES / "tiny_cpu.yaml", [*SMALL, *paths, *keys, *more]), load_format="auto")
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.shutdown()


def test_a_traced_engine_answers_as_an_eager_one(start, monkeypatch):
    answer = replace(GREEDY, max_new_tokens=3)
    eager = outputs(start().generate(PROMPTS, [0, 1], answer))
    graphs = []

    def keep(graph, inputs, **options):
        graphs.append(graph)
        return graph.forward

    keep._tags = ()
    monkeypatch.setitem(registry._COMPILER_FNS, "eager", keep)
    with torch._dynamo.config.patch(disable=False):
        traced = start("policy.generation.vllm_cfg.enforce_eager=false")
        assert outputs(traced.generate(PROMPTS, [0, 1], answer)) == eager
    (graph,) = graphs
    called = {node.target for node in graph.graph.nodes if node.op.startswith("call")}
    operations = {str(call) for call in called if isinstance(call, OPERATION_TYPES)}
    assert operations == OPERATIONS
    assert {getattr(call, "__name__", call) for call in called if not isinstance(call, OPERATION_TYPES)} == MOVES
