"""Every kernel against the specification, bit by bit, and both against a model of E4M3 that shares no code with them.

`cpu` is compared with `reference` on whatever hypothesis finds. Because two implementations may agree on a mistake,
all bfloat16 patterns, all their amaxes and many float32 scales are also held to the table of E4M3 values in float64.
"""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from threading import Thread
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_fp8rl.fp8 import BlockScaled, KernelError, NonFiniteError, kernels, quantize_blockwise, quantize_delta
from nemo_fp8rl.fp8.block_scaled import scale_shape
from nemo_fp8rl.fp8.kernels.on_cpu import loops, numba_kernel, strips
from nemo_fp8rl.fp8.kernels.on_cpu import threads as shared
from tests.fp8.values import BLOCKS, DTYPES, EACH_DTYPE, EACH_FORMAT, FORMATS, INTEGER, random_values

ROOT = Path(kernels.__file__).parents[3]
ODD_BLOCKS = [(3, 5), (1, 1), (7, 64), (200, 3), (2, 1000)]
KERNELS = pytest.mark.parametrize("kernel", ["cpu", "reference"])
LARGEST = {dtype: torch.finfo(dtype).max for dtype in DTYPES}


def quantized(x: Tensor, block: tuple[int, int], scale_format: str, kernel: str) -> tuple[np.ndarray, np.ndarray]:
    """(E4M3 bytes, bits of scale_inv)."""
    q = quantize_blockwise(x, block=block, scale_format=scale_format, kernel=kernel)
    return q.data.view(torch.uint8).numpy(), q.scale_inv.view(torch.int32).numpy()


def assert_kernels_agree(x: Tensor, block: tuple[int, int], scale_format: str) -> None:
    (data, scale_inv), (expected, expected_inv) = (
        quantized(x, block, scale_format, kernel) for kernel in ("cpu", "reference")
    )
    np.testing.assert_array_equal(scale_inv, expected_inv)
    np.testing.assert_array_equal(data, expected)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Not by torch.set_num_threads: an engine of vLLM in this process makes it do nothing."""
    with mock.patch.object(torch, "get_num_threads", lambda: number):
        yield


MAGNITUDES = ["1e-44", "1e-38", "1e-20", "1e-6", "0.02", "1", "30000", "1e20", "3e38"]
SIZES = st.one_of(st.integers(0, 9), st.sampled_from([63, 64, 65, 127, 128, 129, 200, 256, 300]))


@st.composite
def inputs(draw: st.DrawFn) -> Tensor:
    """[N, K] or [E, N, K] of any strides, in which some blocks may be zeros of either sign."""
    n, k = draw(SIZES), draw(SIZES)
    experts = draw(st.sampled_from([(), (), (0,), (1,), (3,)]))
    dtype, kind = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([*MAGNITUDES, "bits", "bits", "denormal"]))
    seed = draw(st.integers(0, 2**32))
    strides = draw(st.sampled_from(["contiguous", "transposed", "sliced", "row", "column", "expert", "last"]))
    if strides == "transposed":
        x = random_values((*experts, k, n), dtype, kind, seed).transpose(-1, -2)
    elif strides == "sliced":
        x = random_values((*experts, 2 * n + 3, 3 * k + 1), dtype, kind, seed)[..., 3::2, 1::3]
    elif strides == "row":
        x = random_values((*experts, 1, k), dtype, kind, seed).expand(*experts, n, k)
    elif strides == "column":
        x = random_values((*experts, n, 1), dtype, kind, seed).expand(*experts, n, k)
    elif strides == "expert" and experts:
        x = random_values((n, k), dtype, kind, seed).expand(*experts, n, k)
    elif strides == "last" and experts:
        x = random_values((n, k, *experts), dtype, kind, seed).permute(2, 0, 1)
    else:
        x = random_values((*experts, n, k), dtype, kind, seed)
    assert x.shape == (*experts, n, k)
    if strides in ("contiguous", "transposed", "sliced", "last") and draw(st.booleans()):
        x[..., :128, :128] *= draw(st.sampled_from([0.0, -0.0]))
    return x


@settings(deadline=None, max_examples=500)
@given(inputs(), st.sampled_from(BLOCKS + ODD_BLOCKS), st.sampled_from(FORMATS))
def test_cpu_equals_reference_for_any_shape_dtype_stride_and_block(x, block, scale_format):
    given = x.clone()
    assert_kernels_agree(x, block, scale_format)
    assert torch.equal(x.view(INTEGER[x.dtype]), given.view(INTEGER[x.dtype]))


@settings(deadline=None, max_examples=150)
@given(
    inputs(),
    st.sampled_from(BLOCKS + ODD_BLOCKS),
    st.sampled_from(FORMATS),
    st.integers(1, 3),
    st.sampled_from([1, 100, 5000]),
)
def test_cpu_equals_reference_however_the_work_is_cut_and_shared(x, block, scale_format, number, values):
    with (
        threads(number),
        mock.patch.object(strips, "PIECE_VALUES", values),
        mock.patch.object(strips, "THREAD_VALUES", values),
    ):
        assert_kernels_agree(x, block, scale_format)


@EACH_FORMAT
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(("shape", "dtype"), [((2100, 1101), torch.bfloat16), ((5, 700, 640), torch.float32)])
def test_large_tensors_are_quantized_alike_by_any_number_of_threads(shape, dtype, block, scale_format):
    x = random_values(shape, dtype, "0.02", seed=0)
    expected, expected_inv = quantized(x, block, scale_format, "reference")
    for number in (1, 2, 3):
        with (
            threads(number),
            mock.patch.object(strips, "THREAD_VALUES", x.numel() // 2),
            mock.patch.object(shared, "_pool", wraps=shared._pool) as pool,
        ):
            data, scale_inv = quantized(x, block, scale_format, "cpu")
        assert pool.call_count == (number > 1)
        np.testing.assert_array_equal(data, expected)
        np.testing.assert_array_equal(scale_inv, expected_inv)


def test_a_share_for_which_no_thread_could_be_started_never_runs(monkeypatch):
    """It would write into what by then is other weights' memory."""

    def none_left(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    ran = list[int]()
    shared._pool.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", none_left)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            shared.run_in_threads(lambda first, end: ran.append(first), 2, 2)
    assert ran == []
    shared.run_in_threads(lambda first, end: ran.append(first), 2, 2)
    assert sorted(ran) == [0, 1]


FORKED = """
import os
import torch
from nemo_fp8rl.fp8 import quantize_blockwise
from nemo_fp8rl.fp8.kernels.on_cpu import strips
strips.THREAD_VALUES = 1
torch.set_num_threads(2)
x = torch.ones(256, 128, dtype=torch.bfloat16)
quantize_blockwise(x, kernel="cpu")
child = os.fork()
quantize_blockwise(x, kernel="cpu")
if not child:
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_has_threads_of_its_own():
    process = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=True)
    assert process.stdout == "7\n"


@KERNELS
@EACH_FORMAT
@pytest.mark.parametrize("block", BLOCKS)
def test_no_block_crosses_from_one_expert_to_the_next(block, scale_format, kernel):
    experts = torch.stack([random_values((130, 200), torch.bfloat16, kind, seed=1) for kind in ("1e-6", "1", "1e6")])
    data, scale_inv = quantized(experts, block, scale_format, kernel)
    for expert, alone in enumerate(experts):
        expected, expected_inv = quantized(alone, block, scale_format, kernel)
        np.testing.assert_array_equal(data[expert], expected)
        np.testing.assert_array_equal(scale_inv[expert], expected_inv)


E4M3_VALUES = np.array([m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:-1])
"""The values of the codes 0x00 ... 0x7E, in order: 0 ... 448."""


def nearest_e4m3(values: np.ndarray) -> np.ndarray:
    """Codes of non-negative float64 values: between two codes the nearer one, from the middle the even one."""
    middles = (E4M3_VALUES[1:] + E4M3_VALUES[:-1]) / 2
    code = np.searchsorted(middles, values, side="left")  # from a middle, the lower of the two
    tie = np.append(middles, np.inf)[code] == values
    return (code + (tie & (code % 2 == 1))).astype(np.uint8)


def codes(magnitudes: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    """Codes of non-negative float32 times float32: both exact in float64, so that one rounding to float32 is IEEE's."""
    with np.errstate(over="ignore"):
        return nearest_e4m3((magnitudes.astype(np.float64) * scale).astype(np.float32).astype(np.float64))


def specified_scale(amax: np.ndarray, dtype: torch.dtype, scale_format: str) -> np.ndarray:
    """float64 holds what is float32; numpy divides float32 as IEEE does."""
    with np.errstate(over="ignore", divide="ignore"):
        scale = np.float32(448) / amax.astype(np.float32)
    scale = np.where(np.isinf(scale), LARGEST[dtype], scale.astype(np.float64))
    scale = np.where(amax == 0, 1.0, scale)
    return np.ldexp(1.0, np.frexp(scale)[1] - 1) if scale_format == "pow2" else scale


BF16_MAGNITUDES = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
"""Every finite one, ascending: 0 ... 3.39e38."""


def converted(x: Tensor, scales: Tensor) -> np.ndarray:
    out = np.empty(len(x), np.uint8)
    loops.convert_row(x.view(INTEGER[x.dtype]).numpy(), scales.float().numpy(), out)
    return out


def test_every_bfloat16_times_every_power_of_two_is_rounded_to_the_nearest_e4m3():
    magnitudes = BF16_MAGNITUDES.double().numpy()
    reachable = range(-120, 128)
    ends = [specified_scale(np.array(amax), torch.bfloat16, "pow2") for amax in (magnitudes[-1], magnitudes[1])]
    assert ends == [2.0 ** reachable[0], 2.0 ** reachable[-1]]
    for exponent in reachable:
        expected = codes(magnitudes, 2.0**exponent)
        scales = torch.full(BF16_MAGNITUDES.shape, 2.0**exponent)
        np.testing.assert_array_equal(converted(BF16_MAGNITUDES, scales), expected)
        np.testing.assert_array_equal(converted(-BF16_MAGNITUDES, scales), expected | 0x80)


def test_every_bfloat16_is_rounded_to_the_nearest_e4m3_under_maxima_of_every_exponent():
    for maximum in range(1, len(BF16_MAGNITUDES), 61):
        x = BF16_MAGNITUDES[: maximum + 1]
        scale = specified_scale(x[-1:].double().numpy(), torch.bfloat16, "pow2")
        expected = codes(x.double().numpy(), scale)
        data, _ = quantized(torch.cat([x, -x])[None], (1, 2 * len(x)), "pow2", "cpu")
        np.testing.assert_array_equal(data[0], np.concatenate([expected, expected | 0x80]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_with_float32_scales_are_rounded_twice_as_ieee_does(dtype):
    generator = torch.Generator().manual_seed(2)
    for _ in range(100):
        if dtype is torch.bfloat16:
            x = BF16_MAGNITUDES
        else:
            x = torch.randint(0, 0x7F800000, (2**15,), generator=generator, dtype=torch.int32).view(torch.float32)
        mantissas = 1 + torch.rand(x.shape, generator=generator)
        scale = torch.exp2(torch.randint(-126, 127, (1,), generator=generator)) * mantissas
        expected = codes(x.double().numpy(), scale.double().numpy())
        np.testing.assert_array_equal(converted(x, scale), expected)
        np.testing.assert_array_equal(converted(-x, scale), expected | 0x80)


def test_float32_on_every_border_of_e4m3_and_around_it_goes_to_the_right_side():
    middles = (E4M3_VALUES[1:] + E4M3_VALUES[:-1]) / 2
    points = np.concatenate([E4M3_VALUES, middles, [464, 480, 512, 1e30, LARGEST[torch.float32]]]).astype(np.float32)
    around, inf = [points], np.float32(np.inf)
    for towards in (inf, -inf):
        moved = points
        for _ in range(3):
            with np.errstate(over="ignore"):
                moved = np.nextafter(moved, towards)
            around.append(moved)
    x = np.concatenate(around)
    x = x[(x >= 0) & np.isfinite(x)]
    ones = torch.ones(len(x))
    np.testing.assert_array_equal(converted(torch.from_numpy(x), ones), nearest_e4m3(x.astype(np.float64)))
    np.testing.assert_array_equal(converted(-torch.from_numpy(x), ones), nearest_e4m3(x.astype(np.float64)) | 0x80)


@EACH_FORMAT
def test_every_bfloat16_in_a_block_of_every_amax_exponent_gets_the_byte_of_the_formula(scale_format):
    """A row holds all patterns that are not larger than its amax, and that amax once in every 128 values."""
    patterns = torch.arange(258 * 127).view(258, 127)
    assert patterns[-1, -1] >= 0x7F7F
    mantissas = torch.randint(0, 128, (255,), generator=torch.Generator().manual_seed(3))
    mantissas[::2] = 0x60  # 1.75: its product with the scale is exactly 448
    amaxes = (torch.arange(255) << 7) + mantissas
    for some in amaxes.split(32):
        smaller = torch.where(patterns <= some[:, None, None], patterns, 0)
        positive = torch.cat([some[:, None, None].expand(-1, 258, 1), smaller], 2).flatten(1).to(torch.int16)
        x = torch.cat([positive, positive | -0x8000], 1).view(torch.bfloat16)
        magnitudes = positive.view(torch.bfloat16).double().numpy()
        scale = specified_scale(magnitudes.max(1), torch.bfloat16, scale_format)[:, None]
        expected = codes(magnitudes, scale)
        expected = np.concatenate([expected, expected | 0x80], 1)
        for kernel, wide in product(("cpu", "reference"), (128, x.size(1))):
            for across in (False, True):
                seen, block = (x.t(), (wide, 1)) if across else (x, (1, wide))
                data, scale_inv = (each.T if across else each for each in quantized(seen, block, scale_format, kernel))
                np.testing.assert_array_equal(data, expected)
                inverse = np.broadcast_to((1 / scale).astype(np.float32).view(np.int32), scale_inv.shape)
                np.testing.assert_array_equal(scale_inv, inverse)


@KERNELS
@EACH_FORMAT
@EACH_DTYPE
def test_every_amax_gives_the_specified_scale(dtype, scale_format, kernel):
    """All of them in 16 bits; in 32, the borders of all powers of two and a sample of the rest."""
    if dtype is torch.float32:
        borders = (torch.arange(255, dtype=torch.int64) << 23)[:, None, None]
        near = torch.tensor([0, 0x600000])[:, None] + torch.arange(-3, 4)
        sample = torch.randint(0, 0x7F800000, (100_000,), generator=torch.Generator().manual_seed(4))
        x = torch.cat([(borders + near).reshape(-1).clamp(min=0), sample]).to(torch.int32).view(dtype)
    else:
        x = torch.arange(0x7F80 if dtype is torch.bfloat16 else 0x7C00, dtype=torch.int16).view(dtype)
    amax = x.double().numpy()
    expected = (1 / specified_scale(amax, dtype, scale_format)).astype(np.float32)
    for signed in (x, -x):
        data, scale_inv = quantized(signed[:, None], (1, 1), scale_format, kernel)
        np.testing.assert_array_equal(scale_inv[:, 0], expected.view(np.int32))
    np.testing.assert_array_equal(data[:, 0] & 0x7F, codes(amax, specified_scale(amax, dtype, scale_format)))


GOLDEN = [
    # 448 -> scale 1: ties go to even, the smallest step is 2^-9, and a negative that vanishes keeps its sign
    ([448.0, 17.0, 19.0, -18.0, 2.0**-9, -(2.0**-10)], "7e 58 5a d9 01 80", {"pow2": 1.0, "fp32": 1.0}),
    # 3 -> scale 128 or 149.33333: the two formats keep different bytes
    ([3.0, -3.0, 1.0, 0.1, 0.01, 0.0], "7c fc 70 55 3a 00", {"pow2": 2.0**-7}),
    ([3.0, -3.0, 1.0, 0.1, 0.01, 0.0], "7e fe 71 57 3c 00", {"fp32": 0.0066964286379516125}),
    # the first float32 above 1.75 -> scale 128, and 1.75 itself -> 256
    ([1.75 + 2.0**-23, 1.0, 0, 0, 0, 0], "76 70 00 00 00 00", {"pow2": 2.0**-7}),
    ([1.75, 1.0, 0, 0, 0, 0], "7e 78 00 00 00 00", {"pow2": 2.0**-8, "fp32": 2.0**-8}),
    # zeros -> scale 1; 2^-149 -> the largest float32, whose inverse is denormal, or 2^127
    ([0.0, -0.0, 0.0, 0.0, 0.0, -0.0], "00 80 00 00 00 80", {"pow2": 1.0, "fp32": 1.0}),
    ([2.0**-149, -(2.0**-148), 0, 0, 0, 0], "00 80 00 00 00 00", {"pow2": 2.0**-127, "fp32": 2.938735877055719e-39}),
]


@KERNELS
@pytest.mark.parametrize(("values", "data", "inverses"), GOLDEN)
def test_bytes_and_scales_are_frozen(values, data, inverses, kernel):
    for scale_format, inverse in inverses.items():
        q = quantize_blockwise(torch.tensor([values]), block=(1, 6), scale_format=scale_format, kernel=kernel)
        assert q.data.view(torch.uint8).numpy().tobytes().hex(" ") == data
        assert q.scale_inv.tolist() == [[inverse]]


NON_FINITE_BITS = {
    torch.bfloat16: [0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0x7FFF, 0xFFFF],
    torch.float16: [0x7C00, 0xFC00, 0x7C01, 0x7E00, 0x7FFF, 0xFFFF],
    torch.float32: [0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF],
}
"""Both infinities; NaN of either sign, signalling and quiet, with the fewest and the most bits."""


def with_bits(x: Tensor, places: list[int], bits: list[int]) -> None:
    """Write bit patterns, given without a sign, at flat places of a contiguous tensor."""
    flat, width = x.view(INTEGER[x.dtype]).view(-1), 8 * x.element_size()
    for place, pattern in zip(places, bits, strict=True):
        flat[place] = pattern - (1 << width) * (pattern >= 1 << (width - 1))


@settings(deadline=None, max_examples=200)
@given(st.data(), st.sampled_from(DTYPES), st.sampled_from(BLOCKS + ODD_BLOCKS), st.sampled_from(FORMATS))
def test_non_finite_values_are_refused_alike_with_count_and_first_place(data, dtype, block, scale_format):
    shape = data.draw(st.sampled_from([(1, 1), (5, 7), (129, 130), (3, 4, 5), (2, 130, 9)]))
    x = random_values(shape, dtype, data.draw(st.sampled_from(["0", "1", "3e38"])), seed=5)
    places = data.draw(st.lists(st.integers(0, x.numel() - 1), min_size=1, max_size=4, unique=True))
    with_bits(x, places, [data.draw(st.sampled_from(NON_FINITE_BITS[dtype])) for _ in places])
    seen = x.transpose(-1, -2) if data.draw(st.booleans()) else x
    first = seen.isfinite().logical_not().nonzero()[0].tolist()
    base = torch.zeros(seen.shape).to(torch.float8_e4m3fn)
    for kernel in ("cpu", "reference"):
        how = {"block": block, "scale_format": scale_format, "kernel": kernel}
        for refused in (
            lambda how=how: quantize_blockwise(seen, **how),
            lambda how=how: quantize_delta(seen, base, **how),
        ):
            with pytest.raises(NonFiniteError) as error:
                refused()
            assert str(error.value) == (f"{len(places)} of {x.numel()} values are not finite, the first at {first}")
    assert not base.view(torch.uint8).any()


@KERNELS
def test_the_largest_finite_values_are_not_refused(kernel):
    for dtype in DTYPES:
        x = torch.full((3, 4), LARGEST[dtype], dtype=dtype)
        data, _ = quantized(-x, (1, 128), "pow2", kernel)
        assert (data & 0x80).all()


@KERNELS
@EACH_FORMAT
@pytest.mark.parametrize("shape", [(130, 200), (3, 130, 200), (0, 7), (7, 0)])
def test_out_is_filled_returned_and_may_be_used_again(shape, scale_format, kernel):
    data = torch.full(shape, 0x55, dtype=torch.uint8).view(torch.float8_e4m3fn)
    out = BlockScaled(data, torch.full(scale_shape(shape, (128, 128)), torch.nan), (128, 128))
    for seed in (6, 7):
        x = random_values(shape, torch.bfloat16, "1", seed)
        expected, expected_inv = quantized(x, (128, 128), scale_format, kernel)
        assert quantize_blockwise(x, scale_format=scale_format, kernel=kernel, out=out) is out
        np.testing.assert_array_equal(data.view(torch.uint8).numpy(), expected)
        np.testing.assert_array_equal(out.scale_inv.view(torch.int32).numpy(), expected_inv)


def within(x: Tensor, around: float) -> tuple[Tensor, Tensor]:
    """(a contiguous copy of x, the memory in the midst of which it lies): `around` fills it before and behind."""
    memory = torch.full((x.numel() + 60_000,), around).to(x.dtype)
    inside = memory[30_000:-30_000].view(x.shape)
    inside.copy_(x)
    return inside, memory


@KERNELS
@pytest.mark.parametrize("block", BLOCKS + ODD_BLOCKS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 64), (130, 200), (2, 3, 130)])
def test_nothing_beside_the_tensors_is_read_or_written(shape, block, kernel):
    x = random_values(shape, torch.bfloat16, "1", seed=8)
    expected = quantize_blockwise(x, block=block, kernel="reference")
    base, base_memory = within(expected.data.view(torch.uint8), 0x55)
    base.view(-1)[-1] ^= 1
    data, data_memory = within(torch.zeros(shape, dtype=torch.uint8), 0x55)
    scale_inv, scale_memory = within(torch.zeros(expected.scale_inv.shape), 7.0)
    out = BlockScaled(data.view(torch.float8_e4m3fn), scale_inv, block)
    for call in (
        lambda x: quantize_blockwise(x, block=block, kernel=kernel, out=out),
        lambda x: quantize_delta(x, base.view(torch.float8_e4m3fn), block=block, kernel=kernel, out=out),
    ):
        data.zero_(), scale_inv.zero_()
        call(within(x, np.nan)[0])
        assert torch.equal(data, expected.data.view(torch.uint8))
        assert torch.equal(scale_inv, expected.scale_inv)
        for memory in (data_memory, base_memory, scale_memory):
            assert len(memory[:30_000].unique()) == len(memory[-30_000:].unique()) == 1


def floats(*shape: int) -> Tensor:
    return torch.zeros(shape)


def bytes_of(*shape: int) -> Tensor:
    return torch.zeros(shape).to(torch.float8_e4m3fn)


OUT = "out.data must be contiguous torch.float8_e4m3fn \\[4, 6\\] on cpu, got "
OUT_SCALE = "out.scale_inv must be contiguous torch.float32 \\[2, 3\\] on cpu, got "
REFUSED_OUT = [
    (BlockScaled(bytes_of(4, 7), floats(2, 3), (2, 2)), OUT + r"torch.float8_e4m3fn \[4, 7\]"),
    (BlockScaled(bytes_of(1, 4, 6), floats(2, 3), (2, 2)), OUT + r"torch.float8_e4m3fn \[1, 4, 6\]"),
    (BlockScaled(bytes_of(4, 6).view(torch.uint8), floats(2, 3), (2, 2)), OUT + r"torch.uint8 \[4, 6\]"),
    (BlockScaled(bytes_of(6, 4).t(), floats(2, 3), (2, 2)), OUT),
    (BlockScaled(bytes_of(4, 6).to("meta"), floats(2, 3), (2, 2)), OUT + r".* on meta"),
    (BlockScaled(bytes_of(4, 6), floats(3, 2), (2, 2)), OUT_SCALE + r"torch.float32 \[3, 2\]"),
    (BlockScaled(bytes_of(4, 6), floats(2, 3).double(), (2, 2)), OUT_SCALE + r"torch.float64"),
    (BlockScaled(bytes_of(4, 6), floats(3, 2).t(), (2, 2)), OUT_SCALE),
    (BlockScaled(bytes_of(4, 6), floats(2, 3), (3, 2)), r"out is for blocks of \(3, 2\), not of \(2, 2\)"),
]


@KERNELS
@pytest.mark.parametrize(("out", "message"), REFUSED_OUT)
def test_an_out_that_does_not_fit_is_refused(out, message, kernel):
    for call in (
        lambda: quantize_blockwise(floats(4, 6), block=(2, 2), kernel=kernel, out=out),
        lambda: quantize_delta(floats(4, 6), bytes_of(4, 6), block=(2, 2), kernel=kernel, out=out),
    ):
        with pytest.raises(ValueError, match=message):
            call()


BASE = "the base of a delta must be contiguous torch.float8_e4m3fn \\[4, 6\\] on cpu, got "


@KERNELS
@pytest.mark.parametrize(
    ("base", "message"),
    [
        (bytes_of(4, 7), BASE + r"torch.float8_e4m3fn \[4, 7\] on cpu"),
        (bytes_of(1, 4, 6), BASE + r"torch.float8_e4m3fn \[1, 4, 6\] on cpu"),
        (floats(4, 6), BASE + r"torch.float32 \[4, 6\] on cpu"),
        (bytes_of(6, 4).t(), BASE),
        (bytes_of(4, 6).to("meta"), BASE + r".* on meta"),
    ],
)
def test_a_base_that_does_not_fit_is_refused(base, message, kernel):
    with pytest.raises(ValueError, match=message):
        quantize_delta(floats(4, 6), base, kernel=kernel)


@KERNELS
@pytest.mark.parametrize(
    ("x", "block", "message"),
    [
        (floats(4, 6).double(), (2, 2), "torch.float32 is quantized, got torch.float64"),
        (floats(4, 6).int(), (2, 2), "is quantized, got torch.int32"),
        (bytes_of(4, 6), (2, 2), "is quantized, got torch.float8_e4m3fn"),
        (floats(6), (2, 2), r"a stack of them \[E, N, K\] is quantized, got shape \[6\]"),
        (floats(1, 2, 4, 6), (2, 2), r"got shape \[1, 2, 4, 6\]"),
        (floats(4, 6), (0, 2), r"at least one row and one column, got \(0, 2\)"),
        (floats(4, 6), (2, -1), r"at least one row and one column, got \(2, -1\)"),
    ],
)
def test_inputs_outside_the_contract_are_refused(x, block, message, kernel):
    with pytest.raises(ValueError, match=message):
        quantize_blockwise(x, block=block, kernel=kernel)
    with pytest.raises(ValueError, match=message):
        quantize_delta(x, torch.zeros(x.shape).to(torch.float8_e4m3fn), block=block, kernel=kernel)


@pytest.fixture
def unresolved(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """No kernel has been chosen yet, and Triton does not interpret; holds the log."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernels.resolve.cache_clear()
    with caplog.at_level(logging.INFO, logger=kernels.logger.name):
        yield caplog
    kernels.resolve.cache_clear()


def test_auto_means_cpu_on_a_cpu_and_the_log_says_so_once(unresolved):
    import numba

    for _ in range(3):
        quantize_blockwise(torch.ones(2, 2))
        quantize_delta(torch.ones(2, 2), bytes_of(2, 2))
    assert kernels.resolve("auto", "cpu") == "cpu"
    assert kernels.load("auto", "cpu") is numba_kernel
    assert unresolved.messages == [f"FP8 quantizer on cpu: cpu (numba {numba.__version__})"]


def test_a_kernel_asked_for_by_name_is_taken_and_the_log_says_so_once(unresolved):
    for _ in range(2):
        quantize_blockwise(torch.ones(2, 2), kernel="reference")
    assert kernels.resolve("reference", "cpu") == "reference"
    assert unresolved.messages == ["FP8 quantizer on cpu: reference, as asked for"]


@pytest.mark.parametrize("kernel", ["te", "triton"])
def test_a_gpu_kernel_on_a_cpu_is_refused(kernel, unresolved):
    for _ in range(2):
        with pytest.raises(
            KernelError, match=f"FP8 kernel {kernel} cannot run: {kernel} runs on cuda, not on cpu; take"
        ):
            quantize_blockwise(torch.ones(2, 2), kernel=kernel)
    with pytest.raises(KernelError, match="FP8 kernel cpu cannot run: cpu runs on cpu, not on cuda; take"):
        kernels.resolve("cpu", "cuda")
    assert unresolved.messages == []


def test_an_unknown_kernel_is_refused_with_the_names_that_exist(unresolved):
    with pytest.raises(KernelError, match="no FP8 kernel 'fast'; there are auto, reference, cpu, triton, te"):
        quantize_blockwise(torch.ones(2, 2), kernel="fast")


WITHOUT_NUMBA = """
import json, logging, sys
sys.modules["numba"] = None
import torch
from nemo_fp8rl.fp8 import KernelError, quantize_blockwise, quantize_delta

lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logger = logging.getLogger("nemo_fp8rl")
logger.addHandler(handler)
logger.setLevel(logging.INFO)
x = torch.tensor([[448.0, 17.0]])
found = [quantize_blockwise(x).data.view(torch.uint8).tolist()]
found.append(quantize_delta(x, torch.zeros(1, 2).to(torch.float8_e4m3fn))[1])
try:
    quantize_blockwise(x, kernel="cpu")
except KernelError as error:
    found.append(str(error))
print(json.dumps([*found, lines]))
"""


def test_without_numba_auto_falls_back_to_reference_and_says_so_and_cpu_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMBA], capture_output=True, text=True, check=True, cwd=ROOT, timeout=120
    )
    data, delta, refusal, lines = json.loads(done.stdout)
    assert (data, delta) == ([[0x7E, 0x58]], None)
    assert refusal.startswith("FP8 kernel cpu cannot run: numba cannot be imported (")
    assert [line.partition(" (")[0] for line in lines] == [
        "FP8 quantizer on cpu: reference, as numba cannot be imported"
    ]
