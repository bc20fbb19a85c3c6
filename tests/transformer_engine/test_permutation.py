"""Transformer Engine's kernels that sort tokens by expert and sum the experts' outputs, in Triton's interpreter."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils
from torch import Tensor

from tests.transformer_engine.fake_kernels import fake_hopper

pytestmark = pytest.mark.transformer_engine

TOKENS, EXPERTS, TOP_K, HIDDEN = 9, 6, 4, 136


@pytest.fixture
def kernels(monkeypatch) -> dict[str, Any]:
    """Return the kernels that Megatron calls, by Megatron's names."""
    from transformer_engine.pytorch.triton import permutation

    def empty(*sizes: Any, device: str, **options: Any) -> Tensor:
        return torch.empty(*sizes, **options)

    monkeypatch.setattr(permutation, "torch", SimpleNamespace(**{**vars(torch), "empty": empty}))
    return {name: getattr(moe_utils, name) for name in vars(moe_utils) if name.startswith("fused_")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_expert_outputs_are_summed_in_order_in_float32(kernels, dtype):
    random = torch.Generator().manual_seed(0)
    routing = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool)
    routing.scatter_(1, torch.rand(TOKENS, EXPERTS, generator=random).topk(TOP_K).indices, True)
    tokens, outputs, grad = (
        torch.randn(n, HIDDEN, generator=random).to(dtype) for n in (TOKENS, TOKENS * TOP_K, TOKENS)
    )
    probs = torch.rand(TOKENS, EXPERTS, generator=random) * routing
    grad_of_probs = torch.randn(TOKENS * TOP_K, generator=random)

    def there_and_back() -> list[Tensor]:
        x, p, y = tokens.clone().requires_grad_(), probs.clone().requires_grad_(), outputs.clone().requires_grad_()
        permuted, permuted_probs, order = moe_utils.permute(
            x, routing, probs=p, num_out_tokens=TOKENS * TOP_K, fused=True
        )
        combined = moe_utils.unpermute(y, order, restore_shape=x.shape, fused=True)
        torch.autograd.backward([permuted, permuted_probs, combined], [outputs, grad_of_probs, grad])
        without_probs, _, _ = moe_utils.permute(tokens, routing, num_out_tokens=routing.sum(), fused=True)
        sizes, sort = torch.tensor([5, 0, 31]), torch.tensor([2, 0, 1])
        chunks = moe_utils.sort_chunks_by_idxs(permuted, sizes, sort, probs=permuted_probs, fused=True)
        only_tokens, _ = moe_utils.sort_chunks_by_idxs(permuted, sizes, sort, fused=True)
        return [permuted, permuted_probs, combined, x.grad, p.grad, y.grad, without_probs, *chunks, only_tokens]

    with fake_hopper():
        fakes = there_and_back()
        with pytest.MonkeyPatch.context() as patch:
            for name, kernel in kernels.items():
                patch.setattr(moe_utils, name, kernel)
            interpreted = there_and_back()
    assert [torch.equal(a, b) for a, b in zip(fakes, interpreted, strict=True)] == [True] * len(fakes)
