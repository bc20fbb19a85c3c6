"""The quantizer against the published formula, computed here another way: float64, integers and numpy's rounding.

All comparisons are bitwise; a product of two float32 has at most 48 significant bits, so float64 holds it exactly and
one rounding to float32 is IEEE's.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_fp8rl.fp8 import BLOCK, NonFiniteError, fake_quantize, kernels, quantize_blockwise, quantize_delta
from nemo_fp8rl.fp8.kernels import emulate
from nemo_fp8rl.fp8.kernels.emulate import round_to_e4m3
from nemo_fp8rl.fp8.kernels.on_cpu import numba_kernel
from nemo_fp8rl.refit.digest import xxh3_digest
from tests.fp8.values import EACH_FORMAT, random_values

BLOCKS = [(128, 128), (1, 128), (128, 1)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FORMATS = ["pow2", "fp32"]
LARGEST = {torch.bfloat16: (2 - 2.0**-7) * 2.0**127, torch.float16: 65504.0, torch.float32: (2 - 2.0**-23) * 2.0**127}


def e4m3_bytes(values: np.ndarray) -> np.ndarray:
    """E4M3 bit patterns of float64 values: nearest, ties to even, saturating at 448."""
    magnitude = np.minimum(np.abs(values), 448.0)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, -6)  # below 2^-6 the spacing stays 2^-9
    steps = np.rint(np.ldexp(magnitude, 3 - exponent)).astype(np.int64)  # np.rint is half to even
    carried = steps == 16  # the mantissa overflowed into the next exponent
    exponent, steps = exponent + carried, np.where(carried, 8, steps)
    code = np.where(steps >= 8, (exponent + 7) * 8 + steps - 8, steps)
    return (code + 128 * np.signbit(values)).astype(np.uint8)


def formula(x: torch.Tensor, block: tuple[int, int], scale_format: str) -> tuple[np.ndarray, np.ndarray]:
    """(E4M3 bytes, scale_inv), block by block as design/numerics.md says it."""
    values = x.to(torch.float64).numpy()
    (n, k), (b0, b1) = values.shape, block
    data = np.zeros((n, k), np.uint8)
    scale_inv = np.zeros((-(-n // b0), -(-k // b1)), np.float32)
    for i, top in enumerate(range(0, n, b0)):
        for j, left in enumerate(range(0, k, b1)):
            part = values[top : top + b0, left : left + b1]
            amax = float(np.abs(part).max())
            scale = float(np.float32(448.0) / np.float32(amax)) if amax else 1.0
            scale = LARGEST[x.dtype] if math.isinf(scale) else scale
            if scale_format == "pow2":
                scale = math.ldexp(1.0, math.frexp(scale)[1] - 1)
            product = (part * scale).astype(np.float32).astype(np.float64)
            data[top : top + b0, left : left + b1] = e4m3_bytes(product)
            scale_inv[i, j] = np.float32(1.0 / scale)
    return data, scale_inv


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def assert_equals_formula(x: torch.Tensor, block: tuple[int, int], scale_format: str) -> None:
    quantized = quantize_blockwise(x, block=block, scale_format=scale_format)
    with np.errstate(over="ignore"):
        data, scale_inv = formula(x, block, scale_format)
    np.testing.assert_array_equal(bits(quantized.data).numpy(), data)
    np.testing.assert_array_equal(quantized.scale_inv.numpy().view(np.int32), scale_inv.view(np.int32))


def finite(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` in `dtype`, with 0 where it is not finite there."""
    x = x.to(dtype)
    return torch.where(torch.isfinite(x), x, 0)


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """Any finite matrix: one magnitude, many magnitudes (every exponent, denormals too), and blocks of zeros."""
    sizes = st.one_of(st.integers(1, 9), st.sampled_from([127, 128, 129, 200, 256, 300]))
    shape = draw(sizes), draw(sizes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** draw(st.integers(-38, 38))
    else:
        x = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32).view(torch.float32)
    x = finite(x, draw(st.sampled_from(DTYPES)))
    if draw(st.booleans()):
        x[:128, :128] = 0
    if draw(st.booleans()):
        x[-1:] *= 0  # signed zeros
    return x.t() if draw(st.booleans()) else x


@settings(deadline=None, max_examples=150)
@given(matrices(), st.sampled_from(BLOCKS), st.sampled_from(FORMATS))
def test_bytes_and_scales_are_those_of_the_formula(x, block, scale_format):
    assert_equals_formula(x, block, scale_format)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (127, 129), (128, 128), (129, 127)])
def test_ragged_and_single_row_matrices_are_quantized_by_the_formula(shape, block, scale_format):
    assert_equals_formula(
        torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16(), block, scale_format
    )


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("magnitude", [1e-38, 1e-30, 1e-6, 1.0, 1e6, 1e30, 3e38])
def test_every_magnitude_is_quantized_by_the_formula(magnitude, scale_format):
    x = (torch.rand(130, 130, generator=torch.Generator().manual_seed(1)) - 0.5) * 2 * magnitude
    assert_equals_formula(x, BLOCK, scale_format)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_that_overflows_becomes_the_largest_of_the_input_dtype(dtype, scale_format):
    smallest = torch.tensor([[torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps]], dtype=dtype)
    assert smallest.item() > 0
    inverse = quantize_blockwise(smallest, scale_format=scale_format).scale_inv.item()
    scale = 448.0 / smallest.item()  # 448 / 2^-24 for float16: larger than float16 holds, but no overflow of the scale
    expected = LARGEST[dtype] if dtype is not torch.float16 else scale
    if scale_format == "pow2":
        expected = 2.0 ** math.floor(math.log2(expected))
    assert inverse == float(np.float32(1.0 / expected))


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_block_gets_scale_one_and_zero_bytes(dtype, scale_format):
    x = torch.zeros(200, 256, dtype=dtype)
    x[:128, 128:] = 3.0
    quantized = quantize_blockwise(x, scale_format=scale_format)
    assert quantized.scale_inv[0, 0] == 1
    assert quantized.scale_inv[1].tolist() == [1, 1]
    assert not bits(quantized.data)[:, :128].any()
    assert torch.equal(quantized.dequantize(dtype), x)


def test_ragged_edge_is_scaled_by_its_own_values_alone():
    x = torch.full((129, 130), 1.0)
    x[128:] = 2.0**-10
    x[:, 128:] = 2.0**-20
    inverse = quantize_blockwise(x).scale_inv
    assert inverse.tolist() == [[2.0**-8, 2.0**-28], [2.0**-18, 2.0**-28]]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_are_quantized_as_their_contiguous_copies(dtype, block):
    base = torch.randn(300, 280, generator=torch.Generator().manual_seed(2)).to(dtype)
    for view in (base.t(), base[::2, 3::3], base[5:, 7:].t(), base[:1].expand(130, -1)):
        assert not view.is_contiguous()
        seen, copied = quantize_blockwise(view, block=block), quantize_blockwise(view.contiguous(), block=block)
        assert torch.equal(bits(seen.data), bits(copied.data))
        assert torch.equal(seen.scale_inv, copied.scale_inv)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(1, 1), (128, 256), (129, 257), (5, 1000)])
def test_scales_are_contiguous_float32_one_a_block(shape, block, scale_format):
    x = torch.randn(shape[::-1]).t()
    quantized = quantize_blockwise(x, block=block, scale_format=scale_format)
    assert quantized.block == block
    assert quantized.data.dtype == torch.float8_e4m3fn
    assert quantized.data.shape == shape
    assert quantized.data.is_contiguous()
    assert quantized.scale_inv.dtype == torch.float32
    assert quantized.scale_inv.shape == (math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1]))
    assert quantized.scale_inv.is_contiguous()


def test_dequantize_multiplies_each_value_by_the_scale_of_its_block():
    quantized = quantize_blockwise(torch.randn(200, 300, generator=torch.Generator().manual_seed(3)))
    expected = quantized.data.double()
    for i in range(2):
        for j in range(3):
            expected[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] *= quantized.scale_inv[i, j].double()
    assert torch.equal(quantized.dequantize(), expected.float())
    assert torch.equal(quantized.dequantize(torch.bfloat16), expected.bfloat16())


@settings(deadline=None, max_examples=50)
@given(matrices(), st.sampled_from(BLOCKS))
def test_pow2_scales_are_powers_of_two_and_the_largest_that_fit(x, block):
    scales = 1.0 / quantize_blockwise(x, block=block, scale_format="pow2").scale_inv.double().numpy()
    assert (np.frexp(scales)[0] == 0.5).all()
    (b0, b1), values = block, np.abs(x.double().numpy())
    for (i, j), scale in np.ndenumerate(scales):
        amax = values[b0 * i : b0 * (i + 1), b1 * j : b1 * (j + 1)].max()
        capped = scale == 2.0 ** math.floor(math.log2(LARGEST[x.dtype]))
        assert amax * scale <= 448
        assert amax == 0 or capped or amax * scale * 2 > 448


@pytest.mark.parametrize("exponent", [-110, -30, -7, 0, 1, 40, 120])
def test_pow2_scale_is_right_just_above_and_below_the_border_at_1_75(exponent):
    amax = np.float32(1.75 * 2.0**exponent)  # 448 / amax is exactly 2^(8 - exponent)
    step, above, below = np.float32(np.inf), amax, amax
    for ulps in range(9):
        inverse = [quantize_blockwise(torch.tensor([[float(a)]])).scale_inv.item() for a in (above, below)]
        assert inverse[0] == 2.0 ** (exponent - 8 + (ulps > 0)), f"{ulps} ulps above"
        assert inverse[1] == 2.0 ** (exponent - 8), f"{ulps} ulps below"
        above, below = np.nextafter(above, step), np.nextafter(below, -step)


def test_pow2_dequantized_weights_are_exact_in_bfloat16():
    generator = torch.Generator().manual_seed(4)
    weights = torch.randn(300, 300, generator=generator) * torch.logspace(-6, 1, 300)[:, None]
    for block in BLOCKS:
        exact = quantize_blockwise(weights.bfloat16(), block=block).dequantize(torch.float32)
        assert torch.equal(bits(exact.bfloat16().float()), bits(exact))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from(BLOCKS), st.integers(-20, 20))
def test_quantizing_pow2_values_again_keeps_them(seed, block, exponent):
    x = torch.randn(130, 140, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    once = quantize_blockwise(x, block=block).dequantize()
    assert torch.equal(quantize_blockwise(once, block=block).dequantize(), once)


@pytest.mark.parametrize(
    "emulation", [numba_kernel.quantize_dequantize, emulate.quantize_dequantize], ids=["cpu", "emulate"]
)
@settings(deadline=None, max_examples=100)
@given(matrices(), st.sampled_from([*BLOCKS, (3, 5)]), st.sampled_from(FORMATS), st.sampled_from(DTYPES))
def test_emulation_equals_quantize_and_dequantize_to_the_bit(emulation, x, block, scale_format, dtype):
    fake = emulation(x, block, scale_format, dtype)
    real = quantize_blockwise(x, block=block, scale_format=scale_format, kernel="reference").dequantize(dtype)
    assert fake.dtype == real.dtype
    assert torch.equal(bits(fake), bits(real))


def test_fake_quantize_keeps_the_dtype_unless_told():
    x = torch.randn(3, 130).half()
    assert fake_quantize(x, block=(1, 128)).dtype == torch.float16
    assert fake_quantize(x, block=(1, 128), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_where_the_cpu_kernel_cannot_run_emulation_is_torchs():
    assert kernels.load_emulation("cpu") is numba_kernel.quantize_dequantize
    assert kernels.load_emulation("cuda") is emulate.quantize_dequantize


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize(("shape", "block"), [((1500, 1000), (1, 128)), ((1500, 1000), (128, 1)), ((300, 5000), BLOCK)])
def test_fake_quantize_handles_large_matrices_as_a_whole(shape, block, scale_format):
    rows = torch.logspace(-3, 3, shape[0])[:, None]
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(5)) * rows).bfloat16()
    given = x.clone()
    fake = fake_quantize(x, block=block, scale_format=scale_format)
    assert torch.equal(fake, quantize_blockwise(x, block=block, scale_format=scale_format).dequantize(x.dtype))
    assert torch.equal(x, given)


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("shape", [(128, 128), (130, 200)])
def test_the_input_is_left_as_it_was(shape, scale_format):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(6))
    given = x.clone()
    quantize_blockwise(x, scale_format=scale_format)
    fake_quantize(x, block=BLOCK, scale_format=scale_format)
    assert torch.equal(x, given)


def test_round_to_e4m3_equals_the_cast_on_every_bfloat16_value():
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = values[values.abs() <= 448]
    assert len(values) > 30_000
    assert torch.equal(bits(round_to_e4m3(values)), bits(values.to(torch.float8_e4m3fn).float()))


def test_round_to_e4m3_sends_ties_to_even_and_their_neighbours_to_the_nearest():
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # 0 ... 448
    ties = (codes[1:] + codes[:-1]) / 2
    even = codes[(torch.arange(0x7E) + 1) // 2 * 2]
    assert torch.equal(round_to_e4m3(ties), even)
    assert torch.equal(round_to_e4m3(torch.nextafter(ties, codes[1:])), codes[1:])
    assert torch.equal(round_to_e4m3(torch.nextafter(ties, codes[:-1])), codes[:-1])


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_values_are_refused_with_their_count_and_first_place(dtype, bad, scale_format):
    x = torch.ones(140, 150, dtype=dtype)
    x[3, 149] = x[139, 0] = x[7, 7] = bad
    with pytest.raises(NonFiniteError, match=r"3 of 21000 .*\[3, 149\]"):
        quantize_blockwise(x, scale_format=scale_format)
    with pytest.raises(NonFiniteError, match=r"\[0, 139\]"):
        quantize_blockwise(x.t(), scale_format=scale_format)


def test_fake_quantize_lets_non_finite_values_stay_non_finite():
    x = torch.ones(2, 256)
    x[0, 3], x[1, 130] = math.nan, -math.inf
    for scale_format in FORMATS:
        out = fake_quantize(x, block=(1, 128), scale_format=scale_format)
        assert not torch.isfinite(out[0, 3])
        assert not torch.isfinite(out[1, 130])
        assert torch.equal(out[0, 128:], x[0, 128:])
        assert torch.equal(out[1, :128], x[1, :128])


def test_a_misspelled_scale_format_is_refused():
    with pytest.raises(ValueError, match="'power2'"):
        fake_quantize(torch.ones(4, 4), block=BLOCK, scale_format="power2")
    for quantize in (quantize_blockwise, lambda x, **keys: quantize_delta(x, quantize_blockwise(x).data, **keys)):
        with pytest.raises(ValueError, match="'power2'; there are pow2, fp32"):
            quantize(torch.ones(4, 4), scale_format="power2")


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4, 5)])
def test_only_matrices_and_stacks_of_them_are_quantized(shape):
    with pytest.raises(ValueError, match="matrix"):
        quantize_blockwise(torch.zeros(shape))


FROZEN = [
    ((200, 300), torch.bfloat16, "0.02", (128, 128), {"pow2": "efe43517882e1472", "fp32": "3e84a13a950ab75d"}),
    ((2, 130, 260), torch.float32, "bits", (128, 128), {"pow2": "5158fd6a2e69a4ac", "fp32": "9ab2570f4af520c0"}),
    ((70, 300), torch.bfloat16, "1", (1, 128), {"pow2": "dcd41766a3b17048", "fp32": "ded5c45ddf915e1c"}),
    ((300, 70), torch.float16, "bits", (128, 1), {"pow2": "d858ecebe88f627d", "fp32": "0cda2058c91b3a82"}),
    ((64, 128), torch.bfloat16, "denormal", (1, 128), {"pow2": "eb82da2a783adbc9", "fp32": "bfeb4ad91084cbf6"}),
]
"""Digests of data and scale_inv, made before there were other formats (commit 5da5b58)."""


@EACH_FORMAT
@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_fp8_has_the_bytes_that_it_always_had(scale_format, kernel):
    for seed, (shape, dtype, kind, block, digests) in enumerate(FROZEN):
        x = random_values(shape, dtype, kind, seed)
        q = quantize_blockwise(x, block=block, scale_format=scale_format, kernel=kernel)
        assert xxh3_digest(q.data, q.scale_inv) == digests[scale_format]
