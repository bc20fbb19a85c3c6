"""The shared operations on Triton's interpreter: their bits, their gradients, and that a row does not see its batch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_fp8rl.fp8 import quantize_activations, quantize_blockwise
from nemo_fp8rl.ops.activation import silu_mul
from nemo_fp8rl.ops.log_softmax import log_softmax
from nemo_fp8rl.ops.matmul import fp8_linear, linear
from nemo_fp8rl.ops.norm import add_rms_norm, rms_norm
from nemo_fp8rl.ops.rank_sum import sum_in_rank_order
from nemo_fp8rl.ops.rope import rotate
from tests.gpu_engine import torch_formulas as formulas

EPS = 1e-6
DTYPES = [torch.bfloat16, torch.float32]


def values(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def rope_table(length: int, d: int, dtype: torch.dtype) -> Tensor:
    angles = torch.outer(torch.arange(length).float(), 10000.0 ** -(torch.arange(0, d, 2) / d))
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(37, 128), (5, 3, 64), (3, 384), (2, 5000)], ids=str)
def test_the_norms_equal_the_formula_to_the_bit(shape, dtype):
    x, residual, weight = values(*shape, dtype=dtype, scale=3), values(*shape, dtype=dtype, seed=1), values(shape[-1])
    weight = weight.to(dtype)
    assert torch.equal(rms_norm(x, weight, EPS), formulas.rms_norm(x, weight, EPS))
    for got, expected in zip(
        add_rms_norm(x, residual, weight, EPS), formulas.add_rms_norm(x, residual, weight, EPS), strict=True
    ):
        assert torch.equal(got, expected)
    near = F.rms_norm(x.float(), x.shape[-1:], weight.float(), EPS)
    torch.testing.assert_close(rms_norm(x, weight, EPS).float(), near, rtol=1e-2, atol=1e-5)


def test_a_norm_of_a_sum_is_the_norm_of_the_rounded_sum():
    """The trainer adds in a place of its own."""
    x, residual, weight = values(9, 256), values(9, 256, seed=1), values(256, seed=2)
    normed, total = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_and_activation_equal_the_formulas_to_the_bit(dtype):
    table, positions = rope_table(64, 64, dtype), torch.tensor([0, 63, 5, 5, 17])
    x = values(5, 3, 96, dtype=dtype)[..., 16:80]  # a view, as of q in qkv
    assert torch.equal(rotate(x, positions, table), formulas.rotate(x, positions, table))
    gate_up = values(7, 600, dtype=dtype, scale=4)
    gate_up[0, :8] = torch.tensor([0.0, 100.0, -100.0, 88.5, -88.5, float("inf"), -300.0, 1e-30])
    assert torch.equal(silu_mul(gate_up), formulas.silu_mul(gate_up))
    gate, up = gate_up[1:].float().chunk(2, -1)
    torch.testing.assert_close(silu_mul(gate_up)[1:].float(), F.silu(gate) * up, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("columns", [77, 1024, 5000])
def test_the_log_softmax_equals_the_formula_to_the_bit(columns):
    x = values(6, columns + 3, dtype=torch.float32, scale=5)[
        :, :columns
    ]  # rows with a stride, as of a padded vocabulary
    x[0, 3:] = float("-inf")  # what top-k leaves out
    assert torch.equal(log_softmax(x), formulas.log_softmax(x))
    torch.testing.assert_close(log_softmax(x), x.log_softmax(-1), rtol=1e-6, atol=1e-6)


def test_a_nan_stays_a_nan():
    bad = values(1, 256)
    bad[0, 3] = float("nan")
    assert rms_norm(bad, values(256), EPS).isnan().all()
    assert silu_mul(bad)[0, 3].isnan()
    assert log_softmax(bad.float()).isnan().all()
    assert linear(bad, values(64, 256)).isnan().all()


@pytest.mark.parametrize("ranks", [2, 5])
def test_parts_are_added_in_rank_order(ranks):
    parts = values(ranks, 3, 700, scale=100)
    assert torch.equal(sum_in_rank_order(parts), formulas.sum_in_rank_order(parts))


@pytest.mark.parametrize("shape", [(70, 200, 96), (3, 128, 256)], ids=str)
def test_the_product_is_one_rounding_of_a_float32_sum(shape):
    m, k, n = shape
    x, weight, bias = values(m, k), values(n, k, seed=1), values(n, seed=2)
    exact = x.double() @ weight.double().t() + bias.double()
    got = linear(x, weight, bias)
    assert (got == exact.bfloat16()).float().mean() > 0.99
    torch.testing.assert_close(got.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_the_fp8_product_adds_blocks_of_128_in_order(scale_format):
    x, weight = values(70, 384, scale=2), quantize_blockwise(values(160, 384, seed=1), scale_format=scale_format)
    got = fp8_linear(x, weight.data, weight.scale_inv, scale_format == "pow2")
    quantized = quantize_activations(x, scale_format)
    total = torch.zeros(70, 160)
    for block in range(3):
        part = slice(128 * block, 128 * block + 128)
        product = quantized.data[:, part].double() @ weight.data[:, part].double().t()
        scale_w = weight.scale_inv[:, block].repeat_interleave(128)[:160]
        total = formulas.fma(product.float(), quantized.scale_inv[:, block, None] * scale_w, total)
    assert (got == total.bfloat16()).float().mean() > 0.995  # the sums within a block are the matrix unit's


def test_a_row_does_not_see_its_batch():
    x, weight, eps = values(130, 256), values(256, seed=1), EPS
    w, w8 = values(192, 256, seed=2), quantize_blockwise(values(192, 256, seed=3))
    table, positions = rope_table(256, 64, torch.bfloat16), torch.arange(130)
    operations = {
        "rms_norm": lambda rows: rms_norm(x[rows], weight, eps),
        "add_rms_norm": lambda rows: torch.cat(add_rms_norm(x[rows], x.flip(0)[rows], weight, eps), -1),
        "rotate": lambda rows: rotate(x.view(130, 4, 64)[rows], positions[rows], table).flatten(1),
        "silu_mul": lambda rows: silu_mul(x[rows]),
        "linear": lambda rows: linear(x[rows], w),
        "log_softmax": lambda rows: log_softmax(x[rows].float()),
        "fp8_linear": lambda rows: fp8_linear(x[rows], w8.data, w8.scale_inv, True),
    }
    for name, operation in operations.items():
        whole = operation(slice(None))
        for rows in (slice(0, 1), slice(129, 130), slice(3, 68), slice(64, 128)):
            assert torch.equal(operation(rows), whole[rows]), name


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def test_gradients_equal_those_of_float32():
    x, weight = values(20, 256, dtype=torch.float32), values(256, dtype=torch.float32, seed=1)
    residual, w, bias = values(20, 256, dtype=torch.float32, seed=2), values(64, 256, dtype=torch.float32), values(64)
    bias, table, positions = bias.float(), rope_table(32, 64, torch.float32), torch.arange(20)

    def plain_rotate(t: Tensor) -> Tensor:
        cos, sin = table[positions][:, None].chunk(2, -1)
        x1, x2 = t.view(20, 4, 64).chunk(2, -1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)

    def plain_silu_mul(t: Tensor) -> Tensor:
        gate, up = t.chunk(2, -1)
        return F.silu(gate) * up

    pairs = {
        "rms_norm": (rms_norm, lambda t, s, e: F.rms_norm(t, s.shape, s, e), (x, weight, EPS)),
        "add_rms_norm": (
            lambda t, r, s, e: torch.cat(add_rms_norm(t, r, s, e)),
            lambda t, r, s, e: torch.cat((F.rms_norm(t + r, s.shape, s, e), t + r)),
            (x, residual, weight, EPS),
        ),
        "rotate": (lambda t: rotate(t.view(20, 4, 64), positions, table), plain_rotate, (x,)),
        "silu_mul": (silu_mul, plain_silu_mul, (x,)),
        "linear": (linear, F.linear, (x, w, bias)),
    }
    for name, (ours, plain, arguments) in pairs.items():
        gradients = []
        for function in (ours, plain):
            leaves = [a.clone().requires_grad_() if isinstance(a, Tensor) else a for a in arguments]
            out = function(*leaves)
            out.backward(values(*out.shape, dtype=torch.float32, seed=9))
            gradients.append([leaf.grad for leaf in leaves if isinstance(leaf, Tensor)])
        for got, expected in zip(*gradients, strict=True):
            assert relative(got, expected) < 1e-3, name
