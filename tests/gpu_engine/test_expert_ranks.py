"""Experts of a mixture on several ranks, by the shared operations: each token has the bits of one rank."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.fp8 import quantize_blockwise
from nemo_fp8rl.generation.fp8_method.shared_ops import experts as engine_experts
from nemo_fp8rl.generation.fp8_method.shared_ops.experts import SharedFp8MoEMethod, SharedMoEMethod
from nemo_fp8rl.ops import alignment
from nemo_fp8rl.ops.experts import choose_experts
from nemo_fp8rl.policy.layers.shared_ops import dense_layers
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from tests.conftest import RECIPES, SMALL
from tests.gpu_engine.test_aligned_ranks import in_parts, interpret_kernels
from tests.gpu_engine.test_aligned_trainer import make_batch
from tests.gpu_engine.test_ops import values
from tests.policy.ranks import Ranks, logprobs_and_norm

EP = ("expert_model_parallel_size=2",)
SP = ("tensor_model_parallel_size=2", "sequence_parallel=true", "expert_tensor_parallel_size=1")
LAYOUTS = {"ep": EP, "sp": SP, "sp-ep": (*SP, *EP)}
CASES = [("fp8_e2e", "bfloat16", "ep", False)]
LONG = [
    ("bf16", "float32", "sp-ep", True),
    *(("fp8_e2e", "bfloat16", "sp", False), ("fp8_e2e", "bfloat16", "sp-ep", False)),
    *(("bf16", "float32", "ep", True), ("bf16", "float32", "sp", False), ("bf16", "float32", "sp-ep", False)),
]


@pytest.fixture(scope="module")
def ranks():
    pool = Ranks(2, [interpret_kernels] * 2)
    yield pool
    pool.close()


def one_rank(cfg, batch, halves: bool):
    """Return (log-probs, gradient norm) of one rank; `halves` multiplies attention's outputs as two ranks do."""
    worker = MegatronWorker()
    worker.setup(cfg, 0, 1, None)
    plain, fp8 = dense_layers.linears()[1], dense_layers.fp8_linears("pow2", ())[1]

    def of_attention(matmul):
        split = in_parts(matmul, 2)
        return lambda layer, *operands: (split if halves and not layer.is_expert else matmul)(layer, *operands)

    from tests.policy import ranks as this_process

    with (
        mock.patch.object(plain, "matmul", of_attention(plain.matmul)),
        mock.patch.object(fp8, "matmul", of_attention(fp8.matmul)),
        mock.patch.object(this_process, "worker", worker),
    ):
        tokens = float(batch.token_mask[:, 1:].sum())
        result = this_process._logprobs_and_norm(batch, float(batch.num_rows), tokens)
    worker.shutdown()
    return result


@pytest.mark.parametrize(
    ("flow", "precision", "name", "crowded"), CASES + [pytest.param(*case, marks=pytest.mark.long) for case in LONG]
)
def test_two_ranks_have_the_bits_of_one(ranks, tmp_path, flow, precision, name, crowded):
    """Gradients are compared in float32: those of FP8 layers depend on the tokens that share a scale.

    crowded:  the batch names experts of the first rank alone, and the second rank gets no token
    """
    make_tiny(tmp_path / "tiny", "add", 0, "qwen3_moe")
    paths = (f"policy.model_name={tmp_path}/tiny/model", f"data.train.data_path={tmp_path}/tiny/data.jsonl")
    numerics = (f"nemo_fp8rl.flow={flow}", f"policy.precision={precision}", "nemo_fp8rl.align=vllm")
    base, layout = (
        [*SMALL, "policy.train_micro_batch_size=32", *paths, *numerics],
        [f"policy.megatron_cfg.{key}" for key in LAYOUTS[name]],
    )
    batch = make_batch()
    if crowded:
        routes = torch.tensor([2, 1], dtype=torch.int16).expand(*batch.input_ids.shape, 2, 2)
        batch = replace(batch, routed_experts=routes)
    inside = torch.arange(batch.input_ids.size(1)) < batch.input_lengths[:, None]
    with mock.patch.object(alignment, "has_gpu", lambda: True):
        expected, norm = one_rank(load(RECIPES / "tiny_cpu.yaml", base), batch, halves="sp" in name)
    cfg = load(RECIPES / "tiny_cpu.yaml", [*base, "cluster.backend=ray", "cluster.train_ranks=2", *layout])
    logprobs, norm_of_two = logprobs_and_norm(ranks, cfg, batch)
    assert torch.equal(logprobs[inside], expected[inside])
    assert norm_of_two == pytest.approx(norm, rel=1e-5 if precision == "float32" else 0.1)


@pytest.mark.parametrize("is_fp8", [True, False], ids=["fp8", "bf16"])
def test_an_engines_ranks_sum_the_experts_of_all(monkeypatch, is_fp8):
    """The sum over ranks is fake: one process stands for a rank after the other."""
    experts, tokens, h, i = 6, 9, 128, 128
    x, logits = values(tokens, h, seed=1), values(tokens, experts, seed=2)
    weights, ids = choose_experts(logits, 2, True)
    whole = {"w13_weight": values(experts, 2 * i, h, seed=3), "w2_weight": values(experts, h, i, seed=4)}
    method = SharedFp8MoEMethod if is_fp8 else SharedMoEMethod
    if is_fp8:
        blocks = {name: quantize_blockwise(weight) for name, weight in whole.items()}
        whole = {name: of_name.data for name, of_name in blocks.items()}
        whole |= {f"{name}_scale_inv": of_name.scale_inv for name, of_name in blocks.items()}
    self = object.__new__(method)  # without the config of vLLM that its constructor takes
    self.scale_format = "pow2"

    def multiply(chosen: list[int]) -> torch.Tensor:
        expert_map = torch.full((experts,), -1)
        expert_map[chosen] = torch.arange(len(chosen))
        layer = SimpleNamespace(**{name: tensor[chosen] for name, tensor in whole.items()})
        layer.global_num_experts = experts
        layer.expert_map = None if len(chosen) == experts else expert_map.int()
        return method.multiply(self, layer, x, weights, ids)

    expected, parts = multiply([*range(experts)]), []
    monkeypatch.setattr(engine_experts, "tensor_model_parallel_all_reduce", lambda y: parts.append(y) or y)
    placed = [0, 3, 5], [1, 2, 4]
    partial = [multiply(of_rank) for of_rank in placed]
    assert not torch.equal(partial[0], expected)
    assert ((parts[0] == 0) | (parts[1] == 0)).all()
    monkeypatch.setattr(engine_experts, "tensor_model_parallel_all_reduce", lambda y: parts[1] + parts[0])
    assert all(torch.equal(multiply(of_rank), expected) for of_rank in placed)
