"""Transformer Engine's layers, with the package's kernels, compute what `fp8.linear` emulates, to the bit."""

import pytest
import torch

from nemo_fp8rl.fp8 import LinearRecipe, quantized_linear
from tests.transformer_engine.fake_kernels import fake_hopper

pytestmark = pytest.mark.transformer_engine


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
@pytest.mark.parametrize("tokens", [8, 128, 200])
def test_the_emulated_linear_is_transformer_engines(tokens, scale_format):
    import transformer_engine.pytorch as te

    from nemo_fp8rl.policy.layers.te_linears import block_scaling

    torch.manual_seed(0)
    x, dy = torch.randn(tokens, 256, dtype=torch.bfloat16), torch.randn(tokens, 384, dtype=torch.bfloat16)
    te_input = x.clone().requires_grad_()
    with fake_hopper():
        layer = te.Linear(256, 384, bias=False, params_dtype=torch.bfloat16, device="cpu")
        with te.autocast(recipe=block_scaling(scale_format)):
            y = layer(te_input)
        y.backward(dy)
    emulated_input, weight = x.clone().requires_grad_(), layer.weight.detach().clone().requires_grad_()
    expected = quantized_linear(emulated_input, weight, LinearRecipe(scale_format=scale_format))
    expected.backward(dy)
    assert torch.equal(y, expected)
    assert torch.equal(te_input.grad, emulated_input.grad)
    assert torch.equal(layer.weight.grad, weight.grad)
