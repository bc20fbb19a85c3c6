"""Products in float32, for CPUs without AVX-512, equal products in bfloat16, except for the order of sums."""

import pytest
import torch
import torch.nn.functional as F

from nemo_fp8rl.fp8 import LinearRecipe, quantized_linear
from nemo_fp8rl.fp8 import linear as fp8_linear
from nemo_fp8rl.policy.layers.linears import Float32Backward

TOKENS, K, N = 5, 256, 384


def bf16(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def of(multiply, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the output and the gradients."""
    inputs = [tensor.clone().requires_grad_() for tensor in tensors]
    out = multiply(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, bf16(*out.shape, seed=9))]


@pytest.mark.parametrize("has_bias", [True, False])
def test_float32_gradients_equal_the_product_rounded_once(has_bias):
    inputs = [bf16(2, TOKENS, K, seed=1), bf16(N, K, seed=2), *([bf16(N, seed=3)] if has_bias else [])]
    out, *gradients = of(lambda x, w, b=None: Float32Backward.apply(x, w, b), *inputs)
    assert torch.equal(out, F.linear(*inputs))
    exact = of(F.linear, *(tensor.double() for tensor in inputs))[1:]
    for got, expected in zip(gradients, exact, strict=True):
        assert got.dtype is torch.bfloat16
        assert (got != expected.bfloat16()).double().mean() < 2e-3


def test_fp8_layers_multiply_alike_in_float32_and_in_bfloat16(monkeypatch):
    x, w = bf16(2, TOKENS, K, seed=4), bf16(N, K, seed=5)
    results = []
    for fast in (True, False):
        monkeypatch.setattr(fp8_linear, "is_bf16_matmul_fast", lambda fast=fast: fast)
        assert LinearRecipe().operand_dtype(x.dtype) is (torch.bfloat16 if fast else torch.float32)
        results.append(of(lambda a, b: quantized_linear(a, b, LinearRecipe()), x, w))
    for a, b in zip(*results, strict=True):
        assert a.dtype is b.dtype is torch.bfloat16
        assert (a != b).double().mean() < 2e-3
