"""The row-parallel layer of an aligned engine: its ranks' products are summed in rank order, where the order matters.

The collectives are fake: one process stands for a rank, and knows the products of the others.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch._dynamo
from vllm.distributed import communication_op, parallel_state
from vllm.model_executor.layers.linear import RowParallelLinear

from nemo_fp8rl.generation.fp8_method.shared_ops.linears import SharedLinearMethod
from nemo_fp8rl.ops.matmul import linear
from nemo_fp8rl.ops.rank_sum import sum_in_rank_order
from tests.gpu_engine.test_aligned_layers import build
from tests.gpu_engine.test_ops import values

TOKENS, K, N = 5, 256, 96


def sum_on_rank(rank: int, ranks: int, is_aligned: bool, return_bias: bool = True):
    """Return (the layer's output on this rank, what the sum in rank order is, names of the collectives)."""
    x, weight, collectives = values(TOKENS, K), values(N, K, seed=1), []
    shares = zip(x.chunk(ranks, -1), weight.chunk(ranks, -1), strict=True)
    products = [linear(part, of_weight) for part, of_weight in shares]
    total = products[0].float()
    for product in products[1:]:
        total = total + product

    class FakeGroup:
        rank_in_group, world_size = rank, ranks

        def all_gather(self, product, dim):
            collectives.append("gather")
            assert dim == 0
            assert torch.equal(product, products[rank])
            return torch.cat(products)

        def all_reduce(self, product):
            collectives.append("reduce")
            assert torch.equal(product, products[rank])
            return torch.stack(products).sum(0)

    with (
        build(is_aligned),
        mock.patch.object(parallel_state, "get_tp_group", FakeGroup),
        mock.patch.object(communication_op, "get_tp_group", FakeGroup),
    ):
        layer = RowParallelLinear(K, N, bias=False, return_bias=return_bias, params_dtype=torch.bfloat16)
        layer.quant_method = SharedLinearMethod()
        layer.weight.data.copy_(weight.chunk(ranks, -1)[rank])
        result = layer(x.chunk(ranks, -1)[rank].contiguous())
    output, *bias = result if return_bias else (result,)
    assert bias == [None] * return_bias
    return output, total.bfloat16(), collectives


@pytest.mark.parametrize("return_bias", [True, False])
def test_four_ranks_sum_in_rank_order(return_bias):
    for rank in range(4):
        output, expected, collectives = sum_on_rank(rank, 4, True, return_bias)
        assert torch.equal(output, expected)
        assert collectives == ["gather"]


def test_two_ranks_and_other_engines_keep_vllms_collective():
    output, expected, collectives = sum_on_rank(1, 2, True)
    assert torch.equal(output, expected)
    assert collectives == ["reduce"]
    assert sum_on_rank(1, 4, False)[2] == ["reduce"]


def test_the_sum_is_one_operation_of_a_graph(monkeypatch):
    """No compiler gets its order or its rounding to change."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    group = SimpleNamespace(rank_in_group=0, world_size=4, all_gather=lambda product, dim: torch.cat([product] * 4))
    x = values(TOKENS, K // 4)
    with (
        build(True),
        mock.patch.object(parallel_state, "get_tp_group", lambda: group),
        mock.patch.object(communication_op, "get_tp_group", lambda: group),
        torch._dynamo.config.patch(disable=False),
    ):
        layer = RowParallelLinear(K, N, bias=False, return_bias=False, params_dtype=torch.bfloat16)
        layer.quant_method = SharedLinearMethod()
        layer.weight.data.copy_(values(N, K // 4, seed=1))
        traced = torch.compile(layer, backend=keep, fullgraph=True)(x)
        assert torch.equal(traced, layer(x))
    assert torch.equal(traced, sum_in_rank_order(torch.stack([linear(x, layer.weight)] * 4)))
    (graph,) = graphs
    called = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert {"nemo_fp8rl.linear.default", "nemo_fp8rl.sum_in_rank_order.default"} <= called
    assert not any("add" in name or "sum" in name for name in called - {"nemo_fp8rl.sum_in_rank_order.default"})
