"""The shared operations of a mixture of experts on Triton's interpreter."""

import pytest
import torch

from nemo_fp8rl.fp8 import quantize_blockwise
from nemo_fp8rl.ops.experts import choose_experts, combine, experts_linear, tiles_of_experts
from nemo_fp8rl.ops.matmul import BLOCK_M, fp8_linear, linear
from tests.gpu_engine.test_ops import values

EXPERTS, TOKENS, K, N = 5, 70, 256, 200


@pytest.mark.parametrize("renormalize", [True, False])
def test_the_largest_logits_are_chosen_and_of_equal_ones_the_first(renormalize):
    logits = values(9, 6)
    logits[2] = torch.tensor([1.0, 3, 3, 0, 3, -2])
    weights, ids = choose_experts(logits, 2, renormalize)
    expected = logits.float().sort(dim=-1, descending=True, stable=True).indices
    p = logits.float().softmax(-1).gather(-1, expected)
    p = p[:, :2] / p[:, :2].sum(-1, keepdim=True) if renormalize else p[:, :2]
    assert torch.equal(ids.long(), expected[:, :2])
    assert ids[2].tolist() == [1, 2]
    torch.testing.assert_close(weights, p)
    alone = choose_experts(logits[3:4], 2, renormalize)
    assert torch.equal(alone[0][0], weights[3])
    torch.library.opcheck(torch.ops.nemo_fp8rl.choose_experts, (logits, 2, renormalize))


def chosen(tokens: int = TOKENS, k: int = 2) -> torch.Tensor:
    """Expert 3 is never chosen, and expert 1 by more tokens than fit into a tile."""
    generator = torch.Generator().manual_seed(1)
    others = torch.tensor([0, 2, 4])[torch.randint(3, (tokens, k), generator=generator)]
    others[:, 0] = 1
    return others


@pytest.mark.parametrize("is_fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("top_k", [2, 1])
def test_a_row_has_the_product_of_its_expert_alone(is_fp8, top_k):
    ids = chosen()
    x = values(TOKENS * 2 // top_k, K, seed=2)
    blocks = [quantize_blockwise(values(N, K, seed=10 + e)) for e in range(EXPERTS)]
    weight = torch.stack([b.data for b in blocks] if is_fp8 else [values(N, K, seed=10 + e) for e in range(EXPERTS)])
    scale = torch.stack([b.scale_inv for b in blocks]) if is_fp8 else None
    got = experts_linear(x, weight, scale, tiles_of_experts(ids, EXPERTS), top_k, True)
    for e in range(EXPERTS):
        slots = (ids.view(-1) == e).nonzero()[:, 0]
        rows = x[slots // top_k]
        expected = fp8_linear(rows, weight[e], scale[e], True) if is_fp8 else linear(rows, weight[e])
        assert torch.equal(got[slots], expected)


def test_tiles_hold_every_slot_once_and_one_expert_each():
    ids = chosen()
    order, experts = tiles_of_experts(ids, EXPERTS)
    assert sorted(order[order < ids.numel()].tolist()) == [*range(ids.numel())]
    for tile, expert in zip(order.split(BLOCK_M), experts, strict=True):
        slots = tile[tile < ids.numel()].long()
        assert (ids.view(-1)[slots] == expert).all()
        assert len(slots) > 0 or expert == -1
    own = tiles_of_experts(ids, EXPERTS, torch.tensor([-1, 0, -1, -1, 1]))
    assert own.experts[own.experts >= 0].unique().tolist() == [0, 1]


def test_a_token_is_summed_in_the_order_of_its_experts():
    ids, weights = chosen(6, 3), values(6, 3, dtype=torch.float32).abs()
    ids = torch.stack([torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(i))[:3] for i in range(6)])
    y = values(18, N, seed=3)
    got = combine(y, weights, ids)
    exact = (y.view(6, 3, N).float() * weights[..., None]).sum(1)
    torch.testing.assert_close(got.float(), exact, atol=1e-2, rtol=1e-2)
    turned = torch.tensor([2, 0, 1])
    assert torch.equal(combine(y.view(6, 3, N)[:, turned].reshape(18, N), weights[:, turned], ids[:, turned]), got)
    torch.library.opcheck(torch.ops.nemo_fp8rl.combine, (y, weights, ids))
