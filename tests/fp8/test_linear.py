"""The emulated FP8 linear layer against a float64 model: operands quantized by `quantize_blockwise`, products exact.

The tolerance is what arithmetic allows, and no more. For out = A @ B with inner size K:
    |error| <= u |out|  +  (K + 3) 2^-24 (|A| @ |B|)
the first term rounds the result to its dtype (u = 2^-8 for bfloat16, 2^-24 for float32), the second bounds float32
accumulation in any order (K) and the rounding of dequantized operands to float32 (fp32 scales only).
"""

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.fp8 import (
    BLOCK,
    LinearRecipe,
    QuantizedLinear,
    fake_quantize,
    fprop,
    linear,
    quantize,
    quantize_blockwise,
)

ALONG_LAST, ALONG_TOKENS = (1, 128), (128, 1)
UNIT = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
CASES = pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
SHAPES = pytest.mark.parametrize(
    ("tokens", "k", "n"),
    [((128,), 128, 128), ((1,), 128, 256), ((5,), 200, 130), ((257,), 256, 128), ((3, 67), 130, 72)],
)


def spread(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normal values whose rows and columns differ in size by powers of two, so that the choice of blocks matters."""
    x = torch.randn(shape, generator=generator)
    rows = torch.randint(-6, 7, (*shape[:-1], 1), generator=generator)
    columns = torch.randint(-6, 7, shape[-1:], generator=generator)
    return torch.ldexp(x, rows + columns)


def operands(tokens: tuple[int, ...], k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x [*tokens, K], w [N, K], dy [*tokens, N]."""
    generator = torch.Generator().manual_seed(7)
    x, w, dy = (spread(shape, generator).to(dtype) for shape in ((*tokens, k), (n, k), (*tokens, n)))
    return x, w, dy


def quantized(x: Tensor, block: tuple[int, int], scale_format: str) -> Tensor:
    """The values that FP8 keeps of x [..., K], float64 [tokens, K]."""
    q = quantize_blockwise(x.reshape(-1, x.size(-1)), block=block, scale_format=scale_format)
    rows = q.scale_inv.double().repeat_interleave(block[0], 0)[: q.data.size(0)]
    return q.data.double() * rows.repeat_interleave(block[1], 1)[:, : q.data.size(1)]


def allowed(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return UNIT[dtype] * (a @ b).abs() + (a.size(1) + 3) * 2.0**-24 * (a.abs() @ b.abs())


def assert_is_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    error = (out.double().reshape(a.size(0), b.size(1)) - a @ b).abs()
    assert (error <= allowed(a, b, out.dtype)).all()


@SHAPES
@DTYPES
@CASES
def test_forward_multiplies_what_fp8_keeps_of_activations_and_weights(tokens, k, n, dtype, scale_format):
    x, w, _ = operands(tokens, k, n, dtype)
    y = QuantizedLinear.apply(x, w, LinearRecipe(scale_format=scale_format))
    assert y.shape == (*tokens, n)
    assert y.dtype == dtype
    assert_is_product(y, quantized(x, ALONG_LAST, scale_format), quantized(w, BLOCK, scale_format).t())


@SHAPES
@DTYPES
@CASES
def test_gradients_multiply_what_fp8_keeps_along_the_summed_dimension(tokens, k, n, dtype, scale_format):
    x, w, dy = operands(tokens, k, n, dtype)
    x.requires_grad_(), w.requires_grad_()
    QuantizedLinear.apply(x, w, LinearRecipe(scale_format=scale_format)).backward(dy)
    with torch.no_grad():
        assert (x.grad.shape, x.grad.dtype, w.grad.shape, w.grad.dtype) == (x.shape, dtype, w.shape, dtype)
        assert_is_product(x.grad, quantized(dy, ALONG_LAST, scale_format), quantized(w, BLOCK, scale_format))
        columns = quantized(dy, ALONG_TOKENS, scale_format).t()
        assert_is_product(w.grad, columns, quantized(x, ALONG_TOKENS, scale_format))


@DTYPES
@CASES
def test_the_tolerance_tells_other_blocks_and_unquantized_operands_apart(dtype, scale_format):
    x, w, dy = operands((257,), 256, 128, dtype)
    right = quantized(x, ALONG_LAST, scale_format), quantized(w, BLOCK, scale_format).t()
    gradient = quantized(dy, ALONG_TOKENS, scale_format).t(), quantized(x, ALONG_TOKENS, scale_format)
    wrong_forward = [
        (x.double(), right[1]),
        (right[0], w.double().t()),
        (quantized(x, ALONG_TOKENS, scale_format), right[1]),
        (right[0], quantized(w, ALONG_LAST, scale_format).t()),
    ]
    wrong_gradient = [
        (gradient[0], x.double()),
        (gradient[0], quantized(x, ALONG_LAST, scale_format)),
        (quantized(dy, ALONG_LAST, scale_format).t(), gradient[1]),
    ]
    for (a, b), wrong in ((right, wrong_forward), (gradient, wrong_gradient)):
        for other_a, other_b in wrong:
            assert ((other_a @ other_b - a @ b).abs() > 2 * allowed(a, b, dtype)).any()


@CASES
def test_a_weight_without_gradient_changes_nothing_else(scale_format):
    x, w, dy = operands((40,), 256, 128, torch.bfloat16)
    both = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = QuantizedLinear.apply(*both, LinearRecipe(scale_format=scale_format))
    y.backward(dy)

    assert torch.equal(QuantizedLinear.apply(x, w, LinearRecipe(scale_format=scale_format)), y)
    with torch.no_grad():
        assert not QuantizedLinear.apply(*both, LinearRecipe(scale_format=scale_format)).requires_grad

    only_x, only_w = x.clone().requires_grad_(), w.clone().requires_grad_()
    QuantizedLinear.apply(only_x, w, LinearRecipe(scale_format=scale_format)).backward(dy)
    QuantizedLinear.apply(x, only_w, LinearRecipe(scale_format=scale_format)).backward(dy)
    assert w.grad is None
    assert torch.equal(only_x.grad, both[0].grad)
    assert torch.equal(only_w.grad, both[1].grad)


def test_without_gradients_nothing_is_quantized_for_the_backward(monkeypatch):
    blocks = []

    def recording(x: Tensor, *, block: tuple[int, int], **keywords: object) -> Tensor:
        blocks.append(block)
        return fake_quantize(x, block=block, **keywords)

    monkeypatch.setattr(linear, "fake_quantize", recording)
    monkeypatch.setattr(quantize, "fake_quantize", recording)
    x, w, _ = operands((4,), 128, 128, torch.bfloat16)
    QuantizedLinear.apply(x, w, LinearRecipe())
    assert sorted(blocks) == [ALONG_LAST, BLOCK]
    QuantizedLinear.apply(x.requires_grad_(), w, LinearRecipe())
    assert ALONG_TOKENS in blocks


@CASES
def test_expanded_and_transposed_tensors_are_read_by_their_values(scale_format):
    x, w, _ = operands((6, 33), 128, 256, torch.bfloat16)
    leaf, twisted = x.clone().requires_grad_(), x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert not twisted.is_contiguous()
    for inputs in (leaf, twisted):
        y = QuantizedLinear.apply(inputs, w, LinearRecipe(scale_format=scale_format))
        y.sum().backward()  # dy is one value, expanded
    straight = x.clone().requires_grad_()
    y = QuantizedLinear.apply(straight, w, LinearRecipe(scale_format=scale_format))
    y.backward(torch.ones(6, 33, 256, dtype=torch.bfloat16))
    assert torch.equal(leaf.grad, straight.grad)
    assert torch.equal(twisted.grad, straight.grad)


@CASES
def test_no_tokens_give_an_empty_output_and_a_zero_weight_gradient(scale_format):
    x, w, _ = operands((0,), 128, 256, torch.bfloat16)
    w.requires_grad_()
    y = QuantizedLinear.apply(x, w, LinearRecipe(scale_format=scale_format))
    assert y.shape == (0, 256)
    y.sum().backward()
    assert torch.equal(w.grad, torch.zeros_like(w))


@DTYPES
@CASES
def test_fprop_on_dequantized_weights_equals_the_layer_to_the_bit(dtype, scale_format):
    x, w, _ = operands((2, 19), 200, 130, dtype)
    operand = torch.bfloat16 if dtype is torch.bfloat16 and scale_format == "pow2" else torch.float32
    dequantized = fake_quantize(w, block=BLOCK, scale_format=scale_format, dtype=operand)
    recipe = LinearRecipe(scale_format=scale_format)
    assert torch.equal(fprop(x, dequantized, recipe), QuantizedLinear.apply(x, w, recipe))


def test_gradients_come_back_in_the_dtypes_of_activations_and_weights():
    x, w, dy = operands((9,), 128, 128, torch.bfloat16)
    x, w = x.requires_grad_(), w.float().requires_grad_()
    y = QuantizedLinear.apply(x, w, LinearRecipe())
    y.backward(dy)
    assert (y.dtype, x.grad.dtype, w.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
