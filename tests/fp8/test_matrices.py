"""Separate matrices are quantized as one stack of copies would be, wherever each of them lies."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_fp8rl.fp8 import FP8, MXFP8, NVFP4, Matrices, NonFiniteError, quantize_blockwise, quantize_delta, with_lines
from nemo_fp8rl.fp8.delta import as_bytes
from nemo_fp8rl.fp8.kernels.on_cpu import strips
from tests.fp8.values import DTYPES, random_values

EACH = [FP8, MXFP8, NVFP4, with_lines(FP8), with_lines(NVFP4)]
LAYOUTS = ["separate", "reversed", "halves", "columns", "transposed", "odd"]
SIZES = st.one_of(st.integers(1, 9), st.sampled_from([31, 64, 127, 128, 129, 200]))


def lay_out(values: Tensor, layout: str) -> list[Tensor]:
    """The matrices of [E, N, K], each in memory of its own or as a part of larger memory."""
    experts, n, k = values.shape
    if layout == "reversed":  # as in a buffer of Megatron's, with other parameters between
        memory = torch.full((experts, n * k + 24), torch.nan, dtype=values.dtype)
        matrices = [row[: n * k].view(n, k) for row in memory.flip(0).unbind()][::-1]
    elif layout == "halves":  # gate above up
        matrices = [torch.full((2 * n, k), torch.nan, dtype=values.dtype)[n:] for _ in values]
    elif layout == "columns":
        matrices = [torch.full((n, 2 * k + 1), torch.nan, dtype=values.dtype)[:, k : 2 * k] for _ in values]
    elif layout == "transposed":
        matrices = [torch.empty(k, n, dtype=values.dtype).t() for _ in values]
    elif layout == "odd":
        matrices = [torch.full((2 * n + 3, 3 * k), torch.nan, dtype=values.dtype)[3::2, ::3] for _ in values]
    else:
        matrices = [torch.empty(n, k, dtype=values.dtype) for _ in values]
    for matrix, x in zip(matrices, values, strict=True):
        matrix.copy_(x)
    return matrices


@st.composite
def stacks(draw: st.DrawFn) -> tuple[Tensor, list[Tensor]]:
    """[E, N, K], and the same values as separate matrices."""
    shape = draw(st.integers(1, 5)), draw(SIZES), 2 * draw(SIZES)
    kind = draw(st.sampled_from(["1e-38", "0.02", "3e38", "bits", "denormal"]))
    values = random_values(shape, draw(st.sampled_from(DTYPES)), kind, draw(st.integers(0, 2**32)))
    return values, lay_out(values, draw(st.sampled_from(LAYOUTS)))


def assert_same(x, y) -> None:
    for a, b in ((x.data, y.data), (x.scale_inv, y.scale_inv), (x.global_scale, y.global_scale)):
        assert (a is None and b is None) or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@settings(deadline=None, max_examples=120)
@given(
    stacks(),
    st.sampled_from(EACH),
    st.sampled_from(["pow2", "fp32"]),
    st.sampled_from(["cpu", "reference"]),
    st.sampled_from([1, 3]),
    st.sampled_from([300, strips.PIECE_VALUES]),
)
def test_the_bytes_are_those_of_each_matrix_alone(stack, format, scale_format, kernel, threads, values):
    of_values, matrices = stack
    with (
        mock.patch.object(torch, "get_num_threads", lambda: threads),
        mock.patch.object(strips, "PIECE_VALUES", values),
        mock.patch.object(strips, "THREAD_VALUES", values),
    ):
        seen = quantize_blockwise(Matrices(matrices), format=format, scale_format=scale_format, kernel=kernel)
    for i, matrix in enumerate(of_values):
        alone = quantize_blockwise(matrix, format=format, scale_format=scale_format, kernel="reference")
        assert torch.equal(seen.data[i].view(torch.uint8), alone.data.view(torch.uint8))
        assert torch.equal(seen.scale_inv[i].view(torch.uint8), alone.scale_inv.view(torch.uint8))
        assert alone.global_scale is None or float(seen.global_scale[i]) == float(alone.global_scale)


@settings(deadline=None, max_examples=60)
@given(stacks(), st.sampled_from(EACH), st.sampled_from(["cpu", "reference"]), st.sampled_from([0.0, 0.01, 0.5]))
def test_the_delta_is_that_of_a_stack_in_one_piece(stack, format, kernel, share):
    values, matrices = stack
    expected = quantize_blockwise(values, format=format, kernel="reference")
    base = expected.data.clone()
    places = torch.rand(base.numel(), generator=torch.Generator().manual_seed(0)) < share
    as_bytes(base)[places] += 1
    seen, delta = quantize_delta(Matrices(matrices), base.clone(), format=format, kernel=kernel)
    assert_same(seen, expected)
    if delta is not None:
        delta.apply_(base)
        assert torch.equal(as_bytes(base), as_bytes(seen.data))
    assert (delta is None) == (int(places.sum()) > places.numel() / 8)


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("format", EACH, ids=lambda format: format.name)
def test_the_matrix_with_a_value_that_is_not_finite_is_named(format, kernel):
    matrices = lay_out(random_values((4, 130, 200), torch.bfloat16, "1"), "reversed")
    matrices[2][129, 3] = torch.inf
    with pytest.raises(NonFiniteError, match=r"1 of 26000 .*\[129, 3\]") as error:
        quantize_blockwise(Matrices(matrices), format=format, kernel=kernel, encode=torch.ones(4))
    assert error.value.matrix == 2


def test_unequal_matrices_are_refused():
    x = torch.zeros(4, 6)
    for other in (torch.zeros(6, 4), torch.zeros(6, 4).t(), x.bfloat16(), torch.zeros(1, 4, 6), x.to("meta")):
        with pytest.raises(ValueError, match="one dtype, device, shape and strides"):
            Matrices([x, other])


def test_memory_that_moves_is_noticed():
    tensors = [torch.ones(4, 6) for _ in range(3)]
    matrices = Matrices(tensors)
    assert matrices.is_in_place()
    tensors[1].add_(1)
    assert matrices.is_in_place()
    tensors[1].data = torch.zeros(4, 6)
    assert not matrices.is_in_place()
    other = Matrices(tensors)
    tensors[2].untyped_storage().resize_(0)
    assert not other.is_in_place()
