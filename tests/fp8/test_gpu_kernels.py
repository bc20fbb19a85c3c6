"""The kernels that run on a GPU, to the bit: `triton` on its own conversion to E4M3, and Transformer Engine itself.

Only the layouts of `te` are tested without a GPU, with a stand-in that lays its results out as Transformer Engine does.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import product
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.fp8 import BLOCK, BlockScaled, Delta, NonFiniteError, kernels, quantize_blockwise, quantize_delta
from nemo_fp8rl.fp8.block_scaled import ALONG_LAST, ALONG_TOKENS, E4M3
from nemo_fp8rl.fp8.delta import as_bytes
from nemo_fp8rl.fp8.kernels import reference
from tests.fp8.values import BLOCKS, DTYPES, EACH_BLOCK, EACH_DTYPE, EACH_FORMAT, INTEGER


def on_gpu(test: Callable) -> Callable:
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")(test))


def of_each_gpu_kernel(test: Callable) -> Callable:
    """`test` once with kernel="triton", once with "te"."""
    names = [
        pytest.param(name, marks=pytest.mark.skipif(find_spec(library) is None, reason=f"needs {library}"))
        for name, library in (("triton", "triton"), ("te", "transformer_engine"))
    ]
    return pytest.mark.parametrize("kernel", names)(on_gpu(test))


def values(shape: tuple[int, ...], dtype: torch.dtype, kind: str = "bits") -> Tensor:
    """Finite values, on the CPU: of one magnitude, or of every magnitude at once (denormals too)."""
    generator = torch.Generator().manual_seed(0)
    if kind == "bits":
        x = torch.randint(-(2**31), 2**31, shape, generator=generator)
        x = (x >> (32 - 8 * dtype.itemsize)).to(INTEGER[dtype]).view(dtype)
    else:
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * float(kind)
    x = x.to(dtype)
    return torch.where(torch.isfinite(x), x, 0)


def assert_same(a: BlockScaled, b: BlockScaled) -> None:
    assert torch.equal(a.scale_inv.view(torch.int32).cpu(), b.scale_inv.view(torch.int32).cpu())
    assert torch.equal(as_bytes(a.data).cpu(), as_bytes(b.data).cpu())


def assert_same_delta(a: Delta | None, b: Delta | None) -> None:
    assert a is not None
    assert b is not None
    assert a.numel == b.numel
    assert torch.equal(a.gaps.cpu().int(), b.gaps.cpu().int())
    assert torch.equal(a.differences.cpu(), b.differences.cpu())


@of_each_gpu_kernel
@EACH_FORMAT
@EACH_DTYPE
@EACH_BLOCK
def test_bits_are_those_of_the_specification(block, dtype, scale_format, kernel):
    if kernel == "te" and scale_format == "fp32" and torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("Transformer Engine has no fp32 scales on this GPU")
    shapes = [(1, 1), (1, 128), (128, 128), (300, 303), (256, 272), (2, 384, 512), (3, 129, 257), (1000, 2048)]
    for shape, kind in product(shapes, ["bits", "1e-38", "1e-20", "0.02", "30000"]):
        x = values(shape, dtype, kind)
        if len(shape) == 3:
            x[:, :128, :128] *= 0
        expected = quantize_blockwise(x, block=block, scale_format=scale_format, kernel="reference")
        assert_same(quantize_blockwise(x.cuda(), block=block, scale_format=scale_format, kernel=kernel), expected)


@of_each_gpu_kernel
@EACH_BLOCK
def test_views_of_any_strides_are_quantized_as_their_copies(block, kernel):
    base = values((2, 300, 280), torch.bfloat16)
    for view in (
        lambda x: x.transpose(1, 2),
        lambda x: x[:, ::2, 3::3],
        lambda x: x[:, 5:, 7:].transpose(1, 2),
        lambda x: x[:, :1].expand(2, 130, 280),
        lambda x: x[:1].expand(3, 300, 280),
        lambda x: x.permute(2, 0, 1)[:3],
    ):
        expected = quantize_blockwise(view(base), block=block, kernel="reference")
        assert_same(quantize_blockwise(view(base.cuda()), block=block, kernel=kernel), expected)


@on_gpu
@EACH_FORMAT
def test_every_bfloat16_in_blocks_of_every_magnitude_gets_the_byte_of_the_specification(scale_format):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    patterns = torch.cat([patterns[patterns.isfinite()], torch.zeros(515 * 127 - 65280).bfloat16()]).view(515, 127)
    for exponent, mantissa in product(range(-133, 128), (1.0, 1.75, 1.7578125)):
        amax = torch.tensor(mantissa * 2.0**exponent).bfloat16()
        x = torch.cat([amax.expand(515, 1), torch.where(patterns.abs() <= amax, patterns, 0)], 1)
        expected = quantize_blockwise(x, block=ALONG_LAST, scale_format=scale_format, kernel="cpu")
        quantized = quantize_blockwise(x.cuda(), block=ALONG_LAST, scale_format=scale_format, kernel="triton")
        assert_same(quantized, expected)


@on_gpu
@EACH_FORMAT
def test_the_specification_itself_gives_the_same_bits_on_a_gpu_as_on_a_cpu(scale_format):
    for dtype, block in product(DTYPES, BLOCKS):
        x = values((300, 303), dtype)
        on_cpu = quantize_blockwise(x, block=block, scale_format=scale_format, kernel="reference")
        assert_same(quantize_blockwise(x.cuda(), block=block, scale_format=scale_format, kernel="reference"), on_cpu)


@on_gpu
@pytest.mark.parametrize("block", [(1, 1), (3, 5), (1, 300), (200, 3), (64, 64), (4096, 1), (128, 256)])
def test_triton_takes_other_blocks(block):
    x = values((2, 300, 303), torch.bfloat16)
    expected = quantize_blockwise(x, block=block, kernel="reference")
    assert_same(quantize_blockwise(x.cuda(), block=block, kernel="triton"), expected)


@on_gpu
def test_auto_is_triton_on_a_gpu():
    pytest.importorskip("triton")
    assert kernels.resolve("auto", "cuda") == "triton"


@of_each_gpu_kernel
@EACH_BLOCK
def test_values_that_are_not_finite_are_marked_in_their_block_and_refused(block, kernel):
    x = values((2, 260, 300), torch.bfloat16, "1").cuda()
    x[0, 3, 130], x[1, 259, 5], x[1, 7, 7] = torch.nan, torch.inf, -torch.inf
    finite = reference.to_blocks(x, block).isfinite().all(4).all(2)
    data, scale_inv = torch.empty(x.shape, dtype=E4M3, device=x.device), torch.empty(finite.shape, device=x.device)
    kernels.load(kernel, x.device.type).quantize(x, block, "pow2", data, scale_inv)
    assert torch.equal(scale_inv.isfinite(), finite)
    assert scale_inv[~finite].isnan().all()
    with pytest.raises(NonFiniteError, match=r"3 of 156000 .*\[0, 3, 130\]"):
        quantize_blockwise(x, block=block, kernel=kernel)


@of_each_gpu_kernel
@EACH_BLOCK
@pytest.mark.parametrize("share", [0.0, 0.004, 0.1])
def test_delta_is_the_one_between_the_bytes_in_every_run(share, block, kernel):
    x = values((2, 1000, 1300), torch.bfloat16, "0.02").cuda()
    base = quantize_blockwise(x, block=block, kernel=kernel).data
    changed = (torch.rand(x.numel(), generator=torch.Generator().manual_seed(0)) < share).nonzero()[:, 0].cuda()
    as_bytes(base)[changed] += 1 + (changed % 255).to(torch.uint8)
    kept = base.clone()
    for _ in range(3):  # programs append in another order each time
        quantized, delta = quantize_delta(x, base, block=block, kernel=kernel)
        assert_same_delta(delta, Delta.between(base, quantized.data))
        assert torch.equal(as_bytes(base), as_bytes(kept))


@of_each_gpu_kernel
@EACH_BLOCK
def test_delta_is_none_above_an_eighth_of_the_bytes_and_complete_at_it(block, kernel):
    x = values((1, 520, 400), torch.bfloat16, "1").cuda()
    expected = quantize_blockwise(x, block=block, kernel="reference").data
    places, limit = torch.randperm(x.numel(), generator=torch.Generator().manual_seed(0)).cuda(), x.numel() // 8
    for changes in (0, 1, limit, limit + 1, x.numel()):
        base = expected.clone()
        as_bytes(base)[places[:changes]] += 1
        _, delta = quantize_delta(x, base, block=block, kernel=kernel)
        if changes > limit:
            assert delta is None
        else:
            assert_same_delta(delta, Delta.between(base, expected))


@of_each_gpu_kernel
@EACH_BLOCK
def test_empty_tensors_give_empty_bytes_and_an_empty_delta(block, kernel):
    for shape in ((0, 4), (4, 0), (0, 4, 4), (2, 0, 4), (2, 4, 0)):
        x = torch.zeros(shape).cuda()
        quantized, delta = quantize_delta(x, x.to(E4M3), block=block, kernel=kernel)
        assert_same(quantized, quantize_blockwise(x, block=block, kernel="reference"))
        assert delta is not None
        assert delta.changed_bytes == 0


@on_gpu
@EACH_BLOCK
@pytest.mark.parametrize("shape", [(40_000, 60_000), (9_000_000, 130), (130, 9_000_000), (70_000, 130, 130)], ids=str)
def test_values_beyond_2_to_the_31_and_tiles_beyond_65535_are_reached(shape, block):
    numel = torch.Size(shape).numel()
    if torch.cuda.mem_get_info()[0] < 8 * numel:
        pytest.skip("needs 8 bytes of free GPU memory a value")
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    quantized = quantize_blockwise(x, block=block, kernel="triton")
    base, places = quantized.data.clone(), torch.tensor([0, 12345, numel // 2, numel - 2, numel - 1])
    as_bytes(base)[places.cuda()] += 1
    again, delta = quantize_delta(x, base, block=block, kernel="triton", out=quantized)
    assert_same_delta(delta, Delta.from_positions(places, torch.full((5,), 255, dtype=torch.uint8), numel))
    stacks = (x, again.data, again.scale_inv)
    matrix, data, scale_inv = (stack if x.dim() == 2 else stack[-1] for stack in stacks)
    below, right = (size // 128 * 128 for size in shape[-2:])  # the last blocks, which are ragged
    for rows, columns in product((slice(0, 256), slice(below, None)), (slice(0, 256), slice(right, None))):
        part = BlockScaled(
            data[rows, columns].contiguous(),
            scale_inv[
                slice(rows.start // block[0], rows.stop and -(-rows.stop // block[0])),
                slice(columns.start // block[1], columns.stop and -(-columns.stop // block[1])),
            ],
            block,
        )
        assert_same(part, quantize_blockwise(matrix[rows, columns], block=block, kernel="reference"))


class StandIn:
    """Float8BlockQuantizer's results in its layouts (tensor/float8_blockwise_tensor.py), with NaN as the padding."""

    def __init__(
        self, fp8_dtype, *, rowwise, columnwise, amax_epsilon=0.0, force_pow_2_scales=True, block_scaling_dim=2
    ):
        assert (fp8_dtype, amax_epsilon) == ("E4M3", 0.0)
        self.rowwise, self.columnwise, self.square = rowwise, columnwise, block_scaling_dim == 2
        self.scale_format = "pow2" if force_pow_2_scales else "fp32"

    def __call__(self, x: Tensor) -> SimpleNamespace:
        assert x.is_contiguous()
        rows = self.quantized(x, BLOCK if self.square else ALONG_LAST)
        columns = self.quantized(x, BLOCK if self.square else ALONG_TOKENS)
        return SimpleNamespace(
            _rowwise_data=as_bytes(rows.data).view(x.shape) if self.rowwise else None,
            _rowwise_scale_inv=padded(rows.scale_inv if self.square else rows.scale_inv.t()),
            _columnwise_data=as_bytes(columns.data).view(x.shape).t().contiguous() if self.columnwise else None,
            _columnwise_scale_inv=padded(columns.scale_inv.t() if self.square else columns.scale_inv),
        )

    def quantized(self, x: Tensor, block: tuple[int, int]) -> BlockScaled:
        finite = torch.where(x.isfinite(), x, 0)
        return quantize_blockwise(finite, block=block, scale_format=self.scale_format, kernel="reference")


def padded(scales: Tensor) -> Tensor:
    return torch.nn.functional.pad(scales, (0, -scales.size(1) % 4), value=torch.nan)


@pytest.fixture
def te() -> Iterator[ModuleType]:
    """The te module on the stand-in, on the CPU."""
    names = ["transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.tensor"]
    fake = {name: ModuleType(name) for name in names}
    fake["transformer_engine_torch"] = SimpleNamespace(DType=SimpleNamespace(kFloat8E4M3="E4M3"))
    fake[f"{names[-1]}.float8_blockwise_tensor"] = SimpleNamespace(Float8BlockQuantizer=StandIn)
    with (
        mock.patch.dict(sys.modules, fake),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)),
    ):
        real = sys.modules.pop(f"{kernels.__name__}.te", None)
        yield importlib.import_module(f"{kernels.__name__}.te")
    if real is None:
        sys.modules.pop(f"{kernels.__name__}.te", None)
        vars(kernels).pop("te", None)


@EACH_FORMAT
@EACH_BLOCK
def test_layouts_of_transformer_engine_become_those_of_the_contract(te, block, scale_format):
    for shape, dtype in product([(1, 1, 1), (1, 128, 128), (2, 300, 130), (3, 131, 513), (2, 4, 0), (0, 4, 4)], DTYPES):
        x = values(shape, dtype).transpose(1, 2)
        expected = quantize_blockwise(x, block=block, scale_format=scale_format, kernel="reference")
        out = BlockScaled(torch.zeros_like(expected.data), torch.zeros_like(expected.scale_inv), block)
        te.quantize(x, block, scale_format, out.data, out.scale_inv)
        assert_same(out, expected)


@EACH_BLOCK
def test_te_marks_the_blocks_in_which_transformer_engine_passes_over_nan_and_infinity(te, block):
    x = values((2, 130, 300), torch.bfloat16, "1")
    x[0, 3, 299], x[1, 129, 5] = torch.nan, -torch.inf
    finite = reference.to_blocks(x, block).isfinite().all(4).all(2)
    data, scale_inv = torch.empty(x.shape, dtype=E4M3), torch.empty(finite.shape)
    assert te.quantize_delta(x, block, "pow2", torch.zeros_like(data), data, scale_inv) is None
    assert torch.equal(scale_inv.isnan(), ~finite)


@pytest.mark.parametrize(
    ("shape", "block", "scale_format", "message"),
    [
        ((1, 4, 4), (64, 64), "pow2", "in blocks of 128x128"),
        ((1, 128 * 65535 + 1, 4), BLOCK, "pow2", "up to 8388480 rows"),
        ((1, 4, 4), BLOCK, "fp32", "Blackwell"),
    ],
)
def test_te_refuses_what_transformer_engine_cannot_do(te, monkeypatch, shape, block, scale_format, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    x = torch.empty(shape, device="meta")
    with pytest.raises(ValueError, match=message):
        te.quantize(x, block, scale_format, x, x)
