"""The three matmuls of the emulated linear in MXFP8 and NVFP4, for each backward, against products in float64."""

import itertools

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.fp8 import (
    FP8,
    MXFP8,
    NVFP4,
    NVFP4_A16,
    LinearRecipe,
    encode_scale,
    fake_quantize,
    fake_quantize_tokens,
    quantized_linear,
    with_lines,
)
from nemo_fp8rl.fp8.fp4_training.gradient_estimator import weight_slope
from nemo_fp8rl.fp8.fp4_training.hadamard import transform_tokens
from nemo_fp8rl.fp8.fp4_training.outliers import split_outliers
from nemo_fp8rl.fp8.fp4_training.random_bits import GradientBits, LayerBits
from nemo_fp8rl.fp8.linear import DGRAD, WGRAD

TOKENS, K, N = 37, 96, 64


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [1, T, K], w [N, K], dy [1, T, N], and the factor of the weight's global scale."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, TOKENS, K, generator=generator).bfloat16()
    w = (torch.randn(N, K, generator=generator) * 0.02).bfloat16()
    dy = (torch.randn(1, TOKENS, N, generator=generator) * 1e-3).bfloat16()
    x[..., 5] *= 20
    return x, w, dy, encode_scale(w.abs().amax(), "pow2")


def run(recipe: LinearRecipe, bits: LayerBits | None = None) -> tuple[Tensor, Tensor, Tensor]:
    x, w, dy, encode = operands()
    x.requires_grad_(), w.requires_grad_()
    y = quantized_linear(x, w, recipe, encode=encode, bits=bits)
    y.backward(dy)
    return y.detach()[0], x.grad[0], w.grad


def assert_is_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """A result in bfloat16 is a product of these operands, rounded once, up to the order of float32 sums."""
    a, b = a.double(), b.double()
    allowed = 2.0**-8 * (a @ b).abs() + (a.size(1) + 3) * 2.0**-24 * (a.abs() @ b.abs())
    assert ((out.double() - a @ b).abs() <= allowed).all()


FORMATS = [MXFP8, NVFP4, NVFP4_A16, with_lines(MXFP8), with_lines(NVFP4)]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_the_backwards_that_do_not_quantize_gradients_multiply_what_they_say(format):
    x, w, dy, encode = operands()
    wq = fake_quantize(w, format=format, block=format.weight_block, encode=encode, flush=True)
    xq = fake_quantize_tokens(x[0], format)
    y, dx, dw = run(LinearRecipe(format, backward="dequantized"))
    assert_is_product(y, xq, wq.t())
    assert_is_product(dx, dy[0], wq)
    assert_is_product(dw, dy[0].t(), xq)
    same_y, dx, dw = run(LinearRecipe(format, backward="high_precision"))
    assert torch.equal(same_y, y)
    assert_is_product(dx, dy[0], w)
    assert_is_product(dw, dy[0].t(), x[0])


@pytest.mark.parametrize("format", [f for f in FORMATS if f.token_block], ids=lambda format: format.name)
def test_the_native_backward_quantizes_along_what_it_sums_over(format):
    x, w, dy, encode = operands()
    y, dx, dw = run(LinearRecipe(format, backward="native"))
    assert torch.equal(y, run(LinearRecipe(format, backward="dequantized"))[0])
    along_n = format.weight_block if format.weight_block[0] > 1 else format.column_block
    wq = fake_quantize(w, format=format, block=along_n, encode=encode, flush=True)
    rows, dy_columns, x_columns = (
        fake_quantize(values, format=format, block=block)
        for values, block in ((dy[0], format.line_block), (dy[0], format.column_block), (x[0], format.column_block))
    )
    assert_is_product(dx, rows, wq)
    assert_is_product(dw, dy_columns.t(), x_columns)


def test_the_hadamard_transform_and_stochastic_rounding_are_of_the_gradients_operands():
    x, w, dy, encode = operands()
    plain = run(LinearRecipe(NVFP4, backward="native"))
    y, dx, dw = run(LinearRecipe(NVFP4, backward="native", hadamard=True))
    assert torch.equal(y, plain[0]) and torch.equal(dx, plain[1]) and not torch.equal(dw, plain[2])
    columns = [fake_quantize(transform_tokens(values[0]), format=NVFP4, block=(1, 16)) for values in (dy, x)]
    assert columns[0].shape == (N, 48)
    assert_is_product(dw, columns[0], columns[1].t())

    trainer = GradientBits(7)
    bits = LayerBits(trainer, "layer")
    recipe = LinearRecipe(NVFP4, backward="native", hadamard=True, stochastic_rounding=True)
    first, second = run(recipe, bits), run(recipe, bits)  # two microbatches
    trainer.start_step(0)
    assert all(torch.equal(a, b) for a, b in zip(first, run(recipe, bits), strict=True))
    for drawn in (first, second):
        assert torch.equal(drawn[0], plain[0])
        assert not torch.equal(drawn[1], dx) and not torch.equal(drawn[2], dw)
    assert not torch.equal(first[1], second[1]) and not torch.equal(first[2], second[2])
    call = GradientBits(7).start_call("layer")
    assert_is_product(
        first[1],
        recipe.line_operand(dy[0], torch.float32, call),
        fake_quantize(w, format=NVFP4, block=(16, 16), encode=encode, flush=True),
    )
    assert not torch.equal(*(call.draw(use, (4, 4), x.device) for use in (DGRAD, WGRAD)))


def test_gradients_are_kept_on_average():
    """Over many draws the native gradients of NVFP4 come nearer to those of unrounded dy; nearest rounding does not."""
    _, w, dy, encode = operands()
    wq = fake_quantize(w, format=NVFP4, block=(16, 16), encode=encode, flush=True)
    exact = dy[0].double() @ wq.double()
    nearest = run(LinearRecipe(NVFP4, backward="native"))[1].double()
    bits, recipe = LayerBits(GradientBits(0), "layer"), LinearRecipe(NVFP4, backward="native", stochastic_rounding=True)
    mean = torch.stack([run(recipe, bits)[1].double() for _ in range(100)]).mean(0)
    assert (mean - exact).norm() < 0.4 * (nearest - exact).norm()


@pytest.mark.parametrize("backward", ["native", "dequantized", "high_precision"])
def test_the_differentiable_estimator_scales_the_gradient_of_weights_alone(backward):
    _, w, _, encode = operands()
    straight = run(LinearRecipe(NVFP4, backward=backward))
    estimated = run(LinearRecipe(NVFP4, backward=backward, estimator="differentiable"))
    assert torch.equal(straight[0], estimated[0]) and torch.equal(straight[1], estimated[1])
    slope = weight_slope(w, (16, 16), encode, flush=True)
    torch.testing.assert_close(estimated[2].float(), straight[2].float() * slope, rtol=2.0**-7, atol=1e-8)


def test_outliers_are_multiplied_in_high_precision():
    x, w, dy, encode = operands()
    wq = fake_quantize(w, format=NVFP4, block=(16, 16), encode=encode, flush=True)
    clamped, rest = split_outliers(x[0], 0.97)
    assert (rest != 0).any()
    y, dx, dw = run(LinearRecipe(NVFP4, clamp_quantile=0.97))
    operand = fake_quantize_tokens(clamped, NVFP4, dtype=torch.float32) + rest
    assert_is_product(y, operand, wq.t())
    assert_is_product(dx, dy[0], wq)
    assert_is_product(dw, dy[0].t(), operand)
    assert not torch.equal(y, run(LinearRecipe(NVFP4))[0])


@pytest.mark.parametrize("backward", ["native", "dequantized", "high_precision"])
def test_an_expert_without_tokens_has_gradients_of_zero(backward):
    fp4 = {"hadamard": True, "stochastic_rounding": True} if backward == "native" else {}
    recipe = LinearRecipe(NVFP4, backward=backward, estimator="differentiable", **fp4)
    w = operands()[1].requires_grad_()
    y = quantized_linear(torch.zeros(0, K, dtype=torch.bfloat16), w, recipe, bits=LayerBits(GradientBits(0), "layer"))
    y.sum().backward()
    assert y.shape == (0, N) and torch.equal(w.grad, torch.zeros_like(w))


def test_the_default_backward_is_the_formats():
    expected = {FP8: "native", MXFP8: "native", NVFP4: "dequantized", NVFP4_A16: "dequantized"}
    assert {format: LinearRecipe(format).backward for format in expected} == expected
    assert LinearRecipe(NVFP4) == LinearRecipe(NVFP4, backward="dequantized")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backward": "natural"}, "there is no backward 'natural'"),
        ({"estimator": "ste"}, "there is no estimator 'ste'"),
        ({"format": NVFP4_A16, "backward": "native"}, "nvfp4_a16 has no native backward"),
        ({"format": NVFP4, "hadamard": True}, "are of native FP4, not of dequantized nvfp4"),
        ({"stochastic_rounding": True}, "are of native FP4, not of native fp8"),
        ({"format": MXFP8, "estimator": "differentiable"}, "is of FP4, not of mxfp8"),
        ({"format": NVFP4_A16, "clamp_quantile": 0.99}, "activations in FP4, which nvfp4_a16 does not have"),
    ],
)
def test_what_a_format_does_not_have_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LinearRecipe(**arguments)


def test_stochastic_rounding_without_bits_is_refused():
    with pytest.raises(ValueError, match="needs random bits"):
        run(LinearRecipe(NVFP4, backward="native", stochastic_rounding=True))


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_gradients_are_finite_with_every_switch(scale_format):
    for hadamard, rounding, estimator in itertools.product(
        (False, True), (False, True), ("straight_through", "differentiable")
    ):
        recipe = LinearRecipe(NVFP4, scale_format, "native", hadamard, rounding, estimator, 0.97)
        assert all(part.isfinite().all() for part in run(recipe, LayerBits(GradientBits(0), "layer")))
