"""The kernels of MXFP8 and NVFP4 against the specification, and against arithmetic that shares no code."""

from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_fp8rl.fp8 import (
    MXFP8,
    NVFP4,
    NonFiniteError,
    encode_scale,
    fake_quantize,
    fake_quantize_tokens,
    kernels,
    quantize_blockwise,
)
from nemo_fp8rl.fp8.block_scaled import E2M1_VALUES, E4M3, scale_shape
from nemo_fp8rl.fp8.kernels import emulate, reference
from nemo_fp8rl.fp8.kernels.on_cpu import fp4_kernel, fp4_loops, strips
from tests.fp8.values import DTYPES, EACH_DTYPE, EACH_FORMAT, FORMATS, INTEGER, random_values

FP4_BLOCKS = [(16, 16), (1, 16), (16, 1)]
ODD_BLOCKS = [(1, 1), (3, 5), (1, 32), (1, 40), (7, 64), (2, 1000)]
MAGNITUDES = ["1e-44", "1e-38", "1e-6", "0.02", "1", "30000", "3e38", "bits", "bits", "denormal"]
SIZES = st.one_of(st.integers(1, 9), st.sampled_from([15, 16, 17, 31, 32, 33, 64, 100, 130]))


@st.composite
def inputs(draw: st.DrawFn, even: bool = True) -> Tensor:
    """[E, N, K] of any strides, with zeros of either sign, and sometimes values that are not finite, in some blocks."""
    experts, n, k = draw(st.sampled_from([1, 1, 3])), draw(SIZES), draw(SIZES)
    k += k % 2 * even
    dtype, kind, seed = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(MAGNITUDES)), draw(st.integers(0, 2**32))
    strides = draw(st.sampled_from(["contiguous", "transposed", "sliced", "last"]))
    if strides == "transposed":
        x = random_values((experts, k, n), dtype, kind, seed).transpose(-1, -2)
    elif strides == "sliced":
        x = random_values((experts, 2 * n + 3, 3 * k + 1), dtype, kind, seed)[..., 3::2, 1::3]
    elif strides == "last":
        x = random_values((n, k, experts), dtype, kind, seed).permute(2, 0, 1)
    else:
        x = random_values((experts, n, k), dtype, kind, seed)
    if draw(st.booleans()):
        x[..., :16, :16] *= draw(st.sampled_from([0.0, -0.0]))
    if draw(st.integers(0, 4)) == 0:
        x[0, draw(st.integers(0, n - 1)), draw(st.integers(0, k - 1))] = draw(st.sampled_from([torch.nan, -torch.inf]))
    return x


def factors(x: Tensor, block: tuple[int, int], scale_format: str, by_row: bool) -> Tensor:
    """`encode` by the largest finite values, per matrix or per row."""
    amax = x.float().nan_to_num(0.0, 0.0, 0.0).abs().amax(2)
    return encode_scale(amax if by_row and block[0] == 1 else amax.amax(1, keepdim=True), scale_format)


def run(kernel: str, x: Tensor, block: tuple[int, int], encode: Tensor, flush: bool) -> tuple[Tensor, Tensor]:
    """(packed codes, bits of scale_inv) without the checks before and after a kernel."""
    data = torch.empty(NVFP4.data_shape(tuple(x.shape)), dtype=torch.uint8)
    scale_inv = torch.empty(scale_shape(x.shape, block), dtype=E4M3)
    kernels.load_fp4(kernel, "cpu").quantize_fp4(x, block, encode, flush, data, scale_inv)
    return data, scale_inv.view(torch.uint8)


def assert_kernels_agree(x: Tensor, block: tuple[int, int], encode: Tensor, flush: bool) -> None:
    (data, scale_inv), (expected, expected_inv) = (run(k, x, block, encode, flush) for k in ("cpu", "reference"))
    assert torch.equal(scale_inv, expected_inv)
    # the codes of a block that is refused mean nothing
    refused = (expected_inv & 0x7F == 0x7F).repeat_interleave(block[0], 1).repeat_interleave(block[1], 2)
    refused = refused[:, : x.size(1), : x.size(2)].unflatten(2, (-1, 2))
    mask = torch.where(refused[..., 0], 0, 0x0F) | torch.where(refused[..., 1], 0, 0xF0)
    assert torch.equal(data & mask, expected & mask)


@settings(deadline=None, max_examples=200)
@given(inputs(), st.sampled_from(FP4_BLOCKS + ODD_BLOCKS), st.sampled_from(FORMATS), st.booleans(), st.booleans())
def test_cpu_equals_reference_for_any_shape_dtype_stride_block_and_factor(x, block, scale_format, flush, by_row):
    before = x.clone()
    assert_kernels_agree(x, block, factors(x, block, scale_format, by_row), flush)
    assert torch.equal(x.view(INTEGER[x.dtype]), before.view(INTEGER[x.dtype]))


@settings(deadline=None, max_examples=60)
@given(inputs(), st.sampled_from(FP4_BLOCKS), st.integers(1, 3), st.sampled_from([1, 100, 5000]))
def test_cpu_equals_reference_however_the_work_is_cut_and_shared(x, block, threads, values):
    with (
        mock.patch.object(torch, "get_num_threads", lambda: threads),
        mock.patch.object(strips, "PIECE_VALUES", values),
        mock.patch.object(strips, "THREAD_VALUES", values),
    ):
        assert_kernels_agree(x, block, factors(x, block, "fp32", True), True)


def same_values(a: Tensor, b: Tensor) -> bool:
    """Alike to the bit, but for the bits of NaN."""
    a, b = (x.masked_fill(x.isnan(), torch.nan).view(INTEGER[x.dtype]) for x in (a, b))
    return torch.equal(a, b)


@settings(deadline=None, max_examples=150)
@given(
    inputs(even=False),
    st.sampled_from(FP4_BLOCKS + ODD_BLOCKS),
    st.sampled_from(FORMATS),
    st.sampled_from([False, True, "own"]),
    st.booleans(),
    st.sampled_from(DTYPES),
)
def test_the_fast_round_trip_equals_the_slow_one(x, block, scale_format, by_row, flush, dtype):
    x = x[0]
    encode = (
        scale_format if by_row == "own" and block[0] == 1 else factors(x[None], block, scale_format, bool(by_row))[0]
    )
    seen, expected = (
        module.quantize_dequantize_fp4(x, block, encode, flush, dtype) for module in (fp4_kernel, emulate)
    )
    assert same_values(seen, expected)


@EACH_DTYPE
@EACH_FORMAT
def test_the_round_trip_gives_the_stored_values(dtype, scale_format):
    x = random_values((37, 64), dtype, "1")
    for block in FP4_BLOCKS:
        encode = factors(x[None], block, scale_format, False)
        stored = quantize_blockwise(x, format=NVFP4, block=block, scale_format=scale_format, encode=encode[0, 0])
        flush = scale_format == "pow2"
        for module in (fp4_kernel, emulate):
            assert same_values(
                module.quantize_dequantize_fp4(x, block, encode[0], flush, dtype), stored.dequantize(dtype)
            )


@EACH_FORMAT
def test_a_token_has_the_same_values_alone_and_among_others(scale_format):
    x = random_values((9, 80), torch.bfloat16, "bits")
    together = fake_quantize_tokens(x, NVFP4, scale_format)
    alone = torch.cat([fake_quantize_tokens(row[None], NVFP4, scale_format) for row in x])
    assert same_values(together, alone)
    assert together.isfinite().all()


def nearest_codes(values: np.ndarray) -> np.ndarray:
    """Codes of non-negative float64 values: the nearer of two, from the middle the even one."""
    table = np.array(E2M1_VALUES)
    middles = (table[1:] + table[:-1]) / 2
    code = np.searchsorted(middles, values, side="left")
    tie = np.append(middles, np.nan)[code] == values
    return (code + (tie & (code % 2 == 1))).astype(np.uint8)


def test_float32_on_every_border_of_e2m1_and_beside_it_goes_to_the_right_side():
    table = np.array(E2M1_VALUES)
    points = np.concatenate([table, (table[1:] + table[:-1]) / 2, [7, 8, 100, 1e30, 3.4e38, 1e-45]]).astype(np.float32)
    x = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(1e38))])
    expected = nearest_codes(x.astype(np.float64))
    for signed, sign in ((x, 0), (-x, 8)):
        codes = np.empty(len(x), np.uint8)
        fp4_loops.convert_row(signed.view(np.int32), np.ones(len(x), np.float32), codes)
        np.testing.assert_array_equal(codes, expected | sign)
        np.testing.assert_array_equal(reference.e2m1_codes(torch.from_numpy(signed)).numpy(), expected | sign)


def test_every_bfloat16_is_rounded_to_the_nearest_e2m1_under_scales_of_any_mantissa():
    magnitudes = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    bits, exact = magnitudes.view(torch.int16).numpy(), magnitudes.double().numpy()
    generator = torch.Generator().manual_seed(1)
    for exponent in range(-120, 127, 9):
        scale = (1 + torch.rand(1, generator=generator)).item() * 2.0**exponent
        scales = np.full(len(bits), scale, np.float32)
        codes = np.empty(len(bits), np.uint8)
        fp4_loops.convert_row(bits, scales, codes)
        with np.errstate(over="ignore"):
            products = (exact * scales[0].astype(np.float64)).astype(np.float32).astype(np.float64)
        np.testing.assert_array_equal(codes, nearest_codes(products))
        packed = np.empty(len(bits) // 2, np.uint8)
        fp4_loops.convert_pairs(bits, scales[::2].copy(), packed)
        np.testing.assert_array_equal(packed, codes[::2] | codes[1::2] << 4)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_bytes_and_scales_are_frozen(kernel):
    # amax 6: scale_inv 448 of encode 448, pow2 256 -> 256; ties go to even, a negative that vanishes keeps its sign
    x = torch.tensor([[6.0, 5.0, 0.25, -0.25, 0.75, 1.25, 2.5, -3.5, 0, -0.0, 1, 2, 3, 4, 1.5, 0.5]])
    packed = "67 80 22 e4 80 42 65 13"
    for scale_format, scale in (("fp32", 448.0), ("pow2", 256.0)):
        q = quantize_blockwise(x, format=NVFP4, block=(1, 16), scale_format=scale_format, kernel=kernel)
        assert q.data.numpy().tobytes().hex(" ") == packed
        assert (q.scale_inv.item(), q.global_scale.item()) == (
            scale,
            1 / scale if scale_format == "pow2" else q.global_scale,
        )


@pytest.mark.parametrize(("kernel", "flush"), product(["cpu", "reference"], [False, True]))
def test_a_block_whose_scale_marlin_would_lose_is_zeros_only_if_flushed(kernel, flush):
    x = torch.full((1, 1, 32), 448 * 6.0)
    x[..., 16:] = 2.0**-6 * 5  # its scale is 5/6 of 2^-6, which is below E4M3's normal values
    data, scale_inv = run(kernel, x, (1, 16), torch.ones(1, 1), flush)
    assert scale_inv[0, 0].tolist() == [0x7E, 0 if flush else 7]
    assert (data[..., 8:] == 0).all() == flush


@EACH_DTYPE
@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_values_that_are_not_finite_are_refused_with_count_and_first_place(kernel, dtype):
    x = random_values((35, 64), dtype, "1")
    x[20, 33], x[34, 1] = torch.nan, torch.inf
    for block in FP4_BLOCKS:
        with pytest.raises(NonFiniteError, match=r"2 of 2240 values are not finite, the first at \[20, 33\]"):
            quantize_blockwise(x, format=NVFP4, block=block, kernel=kernel)


@pytest.mark.parametrize("block", FP4_BLOCKS)
@pytest.mark.parametrize("shape", [(1, 2), (17, 34), (2, 5, 66)])
def test_nothing_beside_the_tensors_is_read_or_written(shape, block):
    memory = torch.full((9, *shape), torch.nan, dtype=torch.bfloat16)
    memory[4] = random_values(shape, torch.bfloat16, "1")
    expected = quantize_blockwise(memory[4], format=NVFP4, block=block, kernel="reference")
    data, scales = (torch.full((3, *t.shape), 0x55, dtype=torch.uint8) for t in (expected.data, expected.scale_inv))
    x, stack = memory[4], (1,) * (3 - len(shape))
    encode = (1 / expected.global_scale).reshape(-1, 1)
    fp4_kernel.quantize_fp4(
        x.view(*stack, *shape), block, encode, True, data[1].view(*stack, *data.shape[1:]),
        scales[1].view(E4M3).view(*stack, *scales.shape[1:]),
    )  # fmt: skip
    assert torch.equal(data[1], expected.data)
    assert torch.equal(scales[1], expected.scale_inv.view(torch.uint8))
    assert all((t[[0, 2]] == 0x55).all() for t in (data, scales))


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_empty_tensors_give_empty_bytes(shape):
    data, scale_inv = run("cpu", torch.zeros(shape), (16, 16), torch.ones(shape[0], 1), True)
    assert data.numel() == 0
    assert scale_inv.numel() == 0
    assert fake_quantize_tokens(torch.zeros(shape[1:]), NVFP4).shape == shape[1:]


MXFP8_BLOCKS = [(32, 32), (1, 32), (32, 1), (3, 5), (1, 48), (1, 1)]


@settings(deadline=None, max_examples=150)
@given(inputs(even=False), st.sampled_from(MXFP8_BLOCKS))
def test_mxfp8_of_cpu_equals_the_reference(x, block):
    x = x.nan_to_num(0.0, 0.0, 0.0)
    for one in (x, x[0]):
        seen, expected = (quantize_blockwise(one, format=MXFP8, block=block, kernel=k) for k in ("cpu", "reference"))
        assert torch.equal(seen.scale_inv, expected.scale_inv)
        assert torch.equal(seen.data.view(torch.uint8), expected.data.view(torch.uint8))
    for dtype in (torch.bfloat16, torch.float32):
        assert same_values(fake_quantize(x[0], format=MXFP8, block=block, dtype=dtype), expected.dequantize(dtype))


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("block", [(1, 32), (32, 1)])
def test_mxfp8_rounds_the_scale_of_every_bfloat16_up(kernel, block):
    """By exact arithmetic: the smallest 2^e with amax / 448 <= 2^e, as E8M0 holds it."""
    amax = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    mantissas, exponents = np.frexp(amax.double().numpy() / 448)
    expected = np.maximum(exponents - (mantissas == 0.5), -127) + 127
    x = torch.zeros(len(amax), 32, dtype=torch.bfloat16)
    x[:, 7] = -amax
    q = quantize_blockwise(x if block == (1, 32) else x.t(), format=MXFP8, block=block, kernel=kernel)
    np.testing.assert_array_equal(q.scale_inv.flatten().numpy(), expected)
    assert quantize_blockwise(torch.zeros(1, 32), format=MXFP8, kernel=kernel).scale_inv.item() == 0


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_mxfp8_refuses_values_that_are_not_finite(kernel):
    x = random_values((35, 64), torch.bfloat16, "1")
    x[20, 33], x[34, 1] = torch.nan, torch.inf
    for block in MXFP8_BLOCKS:
        with pytest.raises(NonFiniteError, match=r"2 of 2240 values are not finite, the first at \[20, 33\]"):
            quantize_blockwise(x, format=MXFP8, block=block, kernel=kernel)
