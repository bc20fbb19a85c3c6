"""The engine's adapters on a GPU: of experts beside every method, and of a row-parallel layer on ranks."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from vllm.distributed import communication_op, parallel_state
from vllm.model_executor.layers.linear import RowParallelLinear

from nemo_fp8rl.fp8 import quantize_blockwise
from nemo_fp8rl.fp8.low_rank import add_low_rank
from nemo_fp8rl.generation.fp8_method.gpu_experts import Bf16GroupedMoEMethod, NativeFp8MoEMethod
from nemo_fp8rl.generation.fp8_method.low_rank import add_adapter, expand_adapter, with_adapter, with_expert_adapters
from nemo_fp8rl.generation.fp8_method.shared_ops.experts import SharedFp8MoEMethod, SharedMoEMethod
from nemo_fp8rl.generation.fp8_method.shared_ops.linears import SharedLinearMethod
from nemo_fp8rl.hf.adapters import Adapters
from nemo_fp8rl.ops.matmul import linear
from tests.gpu_engine.test_aligned_layers import build
from tests.gpu_engine.test_ops import values

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, TOKENS, RANK = 4, 256, 128, 2, 7, 24
EXPERT_MODULES = frozenset({"mlp.experts.gate_up_proj", "mlp.experts.down_proj"})
EXPERT_MODULE_STACKS = {"mlp.experts.gate_up_proj": "w13", "mlp.experts.down_proj": "w2"}


def expert_layer(is_fp8: bool) -> SimpleNamespace:
    layer = SimpleNamespace(global_num_experts=EXPERTS, expert_map=None)
    for i, (name, rows, columns) in enumerate((("w13", 2 * INTERMEDIATE, HIDDEN), ("w2", HIDDEN, INTERMEDIATE))):
        weight = values(EXPERTS, rows, columns, seed=3 + i)
        if is_fp8:
            stored = quantize_blockwise(weight)
            weight = stored.data
            setattr(layer, f"{name}_weight_scale_inv", stored.scale_inv)
        setattr(layer, f"{name}_weight", weight)
        setattr(layer, f"{name}_lora_A", values(EXPERTS, RANK, columns, seed=13 + i) / 8)
        setattr(layer, f"{name}_lora_B", values(EXPERTS, rows, RANK, seed=23 + i) / 8)
    return layer


def parts_of(layer: SimpleNamespace, own: list[int], expert_map: Tensor) -> SimpleNamespace:
    stacks = {k: v[own] for k, v in vars(layer).items() if isinstance(v, Tensor)}
    return SimpleNamespace(**stacks, global_num_experts=EXPERTS, expert_map=expert_map)


@pytest.mark.parametrize("kind", [NativeFp8MoEMethod, Bf16GroupedMoEMethod, SharedFp8MoEMethod, SharedMoEMethod])
@pytest.mark.parametrize("modules", [EXPERT_MODULES, frozenset({"mlp.experts.down_proj"})], ids=["both", "down"])
def test_each_expert_adds_its_adapter(kind, modules):
    method, layer = object.__new__(kind), expert_layer("Fp8" in kind.__name__)
    method.scale_format = "pow2"
    adapters = Adapters(RANK, 2 * RANK, modules)
    adapted = with_expert_adapters(method, adapters, "mlp.experts")
    assert type(adapted).__name__ == kind.__name__
    x = values(TOKENS, HIDDEN, seed=5)
    ids = torch.rand((TOKENS, EXPERTS), generator=torch.Generator().manual_seed(7)).topk(TOP_K).indices.int()
    weights = torch.rand((TOKENS, TOP_K), generator=torch.Generator().manual_seed(6))
    calls = []

    def adapt_one_by_one(layer, name, y, x, topk_ids):
        """The contract, expert by expert."""
        calls.append(name)
        if name not in {EXPERT_MODULE_STACKS[module] for module in modules}:
            return y
        rows = y.reshape(TOKENS * TOP_K, -1).clone()
        for slot, expert in enumerate(topk_ids.view(-1).tolist()):
            a, b = (getattr(layer, f"{name}_lora_{part}")[expert] for part in "AB")
            token = x[slot // TOP_K if name == "w13" else slot]
            rows[slot] = add_low_rank(rows[slot], token, a, b, adapters.scale, linear)
        return rows.view_as(y)

    with mock.patch.object(method, "adapt", adapt_one_by_one, create=True):
        expected = method.multiply(layer, x, weights, ids)
    base = method.multiply(layer, x, weights, ids)
    assert calls == ["w13", "w2"]
    assert torch.equal(adapted.multiply(layer, x, weights, ids), expected)
    assert not torch.equal(base, expected)
    if kind is not SharedFp8MoEMethod and kind is not SharedMoEMethod:  # these sum over ranks by themselves
        maps = ([0, 2], torch.tensor([0, -1, 1, -1])), ([1, 3], torch.tensor([-1, 0, -1, 1]))
        parts = [adapted.multiply(parts_of(layer, *rank), x, weights, ids).float() for rank in maps]
        assert (sum(parts) - expected.float()).abs().max() < 0.01 * expected.abs().max()


def row_parallel(rank: int, ranks: int, is_aligned: bool) -> tuple[Tensor, Tensor, list[str]]:
    """Return (the layer's output on this rank, what the contract says, names of the collectives, which are fake)."""
    k, n, scale, collectives = 384, 96, 0.5, []
    x, weight, a, b = values(5, k), values(n, k, seed=1), values(RANK, k, seed=2), values(n, RANK, seed=3)
    xs, weights, a_parts = x.chunk(ranks, -1), weight.chunk(ranks, -1), a.chunk(ranks, -1)
    of_ranks = {
        torch.bfloat16: [linear(*pair) for pair in zip(xs, weights, strict=True)],
        torch.float32: [linear(part.float(), of_a.float()) for part, of_a in zip(xs, a_parts, strict=True)],
    }
    sums = {dtype: sum(part.float() for part in parts).to(dtype) for dtype, parts in of_ranks.items()}

    class FakeGroup:
        rank_in_group, world_size = rank, ranks

        def all_gather(self, part, dim):
            collectives.append("gather")
            if not is_aligned:  # on a CPU, which this is, h is a float64 sum whose bits travel
                exact = (part.double() @ of_a.double().t() for part, of_a in zip(xs, a_parts, strict=True))
                return torch.cat([h.contiguous().view(torch.float32) for h in exact])
            return torch.cat(of_ranks[part.dtype])

        def all_reduce(self, part):
            collectives.append("reduce")
            return sums[part.dtype]

    method = with_adapter(SharedLinearMethod(), Adapters(RANK, RANK // 2), is_aligned)
    with (
        build(is_aligned),
        mock.patch.object(parallel_state, "get_tp_group", FakeGroup),
        mock.patch.object(communication_op, "get_tp_group", FakeGroup),
    ):
        quantization: Any = SimpleNamespace(
            get_quant_method=lambda layer, prefix: method, online_quantization_config=None
        )
        layer = RowParallelLinear(
            k, n, bias=False, return_bias=False, params_dtype=torch.bfloat16, quant_config=quantization
        )
        for stored, value in ((layer.weight.data, weights[rank]), (layer.lora_A, a_parts[rank]), (layer.lora_B, b)):
            stored.copy_(value)
        y = layer(xs[rank].contiguous())
    h = sums[torch.float32].bfloat16()
    return y, sums[torch.bfloat16] + linear(h, b) * scale, collectives


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("is_aligned", [True, False])
def test_ranks_add_an_adapter_to_their_rounded_sum(ranks, is_aligned):
    for rank in range(ranks):
        y, expected, collectives = row_parallel(rank, ranks, is_aligned)
        of_h = "gather" if ranks > 2 or not is_aligned else "reduce"
        assert collectives == ["gather" if is_aligned and ranks > 2 else "reduce", of_h]
        if is_aligned:
            assert torch.equal(y, expected)
        else:
            torch.testing.assert_close(y, expected, atol=0.02 * expected.abs().max().item(), rtol=0.02)


@pytest.mark.parametrize("is_aligned", [True, False])
def test_torch_compile_sees_an_adapter_whole(is_aligned):
    y, x, a, b = values(5, 96), values(5, 64, seed=1), values(RANK, 64, seed=2), values(96, RANK, seed=3)
    torch.library.opcheck(add_adapter, (y, x, a, b, 0.5, is_aligned))
    torch.library.opcheck(expand_adapter, (y, x[:, :RANK].contiguous(), b, 0.5, is_aligned))
    with torch._dynamo.config.patch(disable=False):
        compiled = torch.compile(lambda: add_adapter(y, x, a, b, 0.5, is_aligned), backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(), add_adapter(y, x, a, b, 0.5, is_aligned))
