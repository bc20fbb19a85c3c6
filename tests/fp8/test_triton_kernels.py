"""The Triton kernels without a GPU: their bits under Triton's interpreter, and what they compile to.

The interpreter replaces Triton as a whole when that is imported, so it has a process to itself. It does not run the
GPU's own conversion to E4M3, whose rounding it gets wrong; that one is looked for in the PTX here and run in
`test_gpu_kernels`.
"""

import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_fp8rl.fp8 import FORMATS as ALL_FORMATS
from nemo_fp8rl.fp8 import FP8, MXFP8, NVFP4, Delta, Matrices, NonFiniteError, encode_scale, kernels, quantize_blockwise
from nemo_fp8rl.fp8.block_scaled import E4M3, scale_shape
from nemo_fp8rl.fp8.delta import MAX_CHANGED, as_bytes
from nemo_fp8rl.fp8.kernels import reference
from tests.fp8.test_matrices import LAYOUTS, lay_out
from tests.fp8.values import BLOCKS, DTYPES, EACH_BLOCK, EACH_DTYPE, EACH_FORMAT, FORMATS, random_values

# Not importorskip, because the interpreter's process imports this module first and Triton only then.
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


Block = tuple[int, int]
Result = tuple[Tensor, Tensor, Delta | None]


def _start() -> None:
    """In the interpreter's process."""
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"


def packed(value: object) -> bytes:
    """torch's own pickle keeps strides and knows float8 and uint16."""
    torch.save(value, buffer := io.BytesIO())
    return buffer.getvalue()


def unpacked(message: bytes) -> Any:
    return torch.load(io.BytesIO(message), weights_only=False)


def _call(function: Callable, message: bytes) -> bytes:
    """In the interpreter's process."""
    with np.errstate(all="ignore"):  # 448 / denormal is meant to overflow
        return packed(function(*unpacked(message)))


def run(kernel: str, x: Tensor, block: Block, scale_format: str, base: Tensor | None = None) -> Result:
    """(data, scale_inv, delta) of x [E, N, K], without the checks that come before and after a kernel."""
    data, scale_inv = torch.empty(x.shape, dtype=E4M3), torch.empty(scale_shape(x.shape, block))
    chosen, delta = kernels.load(kernel, "cpu"), None
    if base is None:
        chosen.quantize(x, block, scale_format, data, scale_inv)
    else:
        delta = chosen.quantize_delta(x, block, scale_format, base, data, scale_inv)
    return data, scale_inv, delta


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable]:
    """interpreted(function, *arguments): its result where "triton" is the interpreted kernel."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_start) as process:
        yield lambda function, *arguments: unpacked(process.submit(_call, function, packed(arguments)).result())


def same_bits(a: Tensor, b: Tensor) -> bool:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(integer), b.view(integer))


def same_delta(a: Delta | None, b: Delta | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.numel == b.numel and same_bits(a.gaps, b.gaps) and same_bits(a.differences, b.differences)


def assert_equals_reference(
    interpreted: Callable, x: Tensor, block: Block, scale_format: str, base: Tensor | None = None
) -> Delta | None:
    data, scale_inv, delta = interpreted(run, "triton", x, block, scale_format, base)
    expected, expected_inv, expected_delta = run("reference", x, block, scale_format, base)
    assert same_bits(scale_inv, expected_inv)
    assert same_bits(data, expected)
    assert same_delta(delta, expected_delta)
    return delta


@st.composite
def inputs(draw: st.DrawFn) -> Tensor:
    """[E, N, K] of any strides, with zeros of either sign in some."""
    sizes = st.one_of(st.integers(1, 9), st.sampled_from([31, 64, 127, 128, 129, 200]))
    experts, n, k = draw(st.sampled_from([1, 1, 2])), draw(sizes), draw(sizes)
    kind = draw(st.sampled_from(["1e-44", "1e-38", "1e-6", "1", "30000", "3e38", "bits", "bits", "denormal"]))
    dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**32))
    strides = draw(st.sampled_from(["contiguous", "transposed", "sliced", "row", "last"]))
    if strides == "transposed":
        x = random_values((experts, k, n), dtype, kind, seed).transpose(1, 2)
    elif strides == "sliced":
        x = random_values((experts, 2 * n + 3, 3 * k + 1), dtype, kind, seed)[:, 3::2, 1::3]
    elif strides == "row":
        return random_values((experts, 1, k), dtype, kind, seed).expand(experts, n, k)
    elif strides == "last":
        x = random_values((n, k, experts), dtype, kind, seed).permute(2, 0, 1)
    else:
        x = random_values((experts, n, k), dtype, kind, seed)
    if draw(st.booleans()):
        x[:, :128, :128] *= draw(st.sampled_from([0.0, -0.0]))
    return x


@settings(deadline=None, max_examples=50)
@given(inputs(), st.sampled_from([*BLOCKS, (32, 32), (1, 32)]), st.sampled_from([*FORMATS, "e8m0"]))
def test_bits_are_those_of_the_specification(interpreted, x, block, scale_format):
    assert_equals_reference(interpreted, x, block, scale_format)


@EACH_FORMAT
@EACH_DTYPE
@EACH_BLOCK
def test_ragged_experts_in_a_strided_view_with_every_magnitude(interpreted, block, dtype, scale_format):
    x = random_values((2, 140, 131), dtype, "bits").transpose(1, 2)
    x[1, 128:, :128] = 0
    assert_equals_reference(interpreted, x, block, scale_format)


def run_fp4(kernel: str, x: Tensor, block: Block, encode: Tensor, flush: bool) -> tuple[Tensor, Tensor]:
    """(packed codes, scale_inv) of x [E, N, K], without the checks that come before and after a kernel."""
    data, scale_inv = torch.empty(NVFP4.data_shape(x.shape), dtype=torch.uint8), scale_shape(x.shape, block)
    scales = torch.empty(scale_inv, dtype=E4M3)
    kernels.load_fp4(kernel, "cpu").quantize_fp4(x, block, encode, flush, data, scales)
    return data, scales


@settings(deadline=None, max_examples=50)
@given(
    inputs(),
    st.sampled_from([(16, 16), (1, 16), (16, 2), (3, 6), (1, 64)]),
    st.sampled_from(FORMATS),
    st.booleans(),
    st.booleans(),
)
def test_fp4_bits_are_those_of_the_specification(interpreted, x, block, scale_format, flush, by_row):
    x = x[..., : x.size(2) // 2 * 2]
    amax = x.abs().amax(2) if x.size(2) else x.new_zeros(x.shape[:2])
    encode = encode_scale(amax if by_row and block[0] == 1 else amax.amax(1, keepdim=True), scale_format)
    data, scale_inv = interpreted(run_fp4, "triton", x, block, encode, flush)
    expected, expected_inv = run_fp4("reference", x, block, encode, flush)
    assert same_bits(scale_inv, expected_inv)
    assert same_bits(data, expected)


def test_fp4_blocks_with_a_value_that_is_not_finite_and_no_others_get_the_scale_nan(interpreted):
    x = random_values((2, 40, 64), torch.bfloat16, "1")
    x[0, 3, 33], x[1, 39, 5], x[1, 7, 7] = torch.nan, torch.inf, -torch.inf
    for block in ((16, 16), (1, 16)):
        _, scale_inv = interpreted(run_fp4, "triton", x, block, torch.full((2, 1), 512.0), True)
        assert same_bits(scale_inv, run_fp4("reference", x, block, torch.full((2, 1), 512.0), True)[1])
        assert scale_inv.float().isnan().sum() == 3


@pytest.mark.parametrize("block", [(16, 1), (1, 5), (256, 256)])
def test_fp4_blocks_that_cannot_be_packed_or_held_are_refused(interpreted, block):
    with pytest.raises(ValueError, match="even number of columns and of up to 32768 values"):
        interpreted(run_fp4, "triton", torch.zeros(1, 4, 4), block, torch.ones(1, 1), True)


@EACH_BLOCK
@pytest.mark.parametrize("kernel", ["triton", "cpu", "reference"])
def test_scales_of_any_strides_are_written_in_place(interpreted, kernel, block):
    x = random_values((2, 131, 260), torch.bfloat16, "1")
    expected, expected_inv, _ = run("reference", x, block, "fp32")
    data, scale_inv, untouched = interpreted(_with_scales_in_columns, kernel, x, block)
    assert same_bits(data, expected)
    assert same_bits(scale_inv, expected_inv)
    assert untouched


def _with_scales_in_columns(kernel: str, x: Tensor, block: Block) -> tuple[Tensor, Tensor, bool]:
    experts, n, k = scale_shape(x.shape, block)
    data, memory = torch.empty(x.shape, dtype=E4M3), torch.full((k, experts, n + 3), -1.0)
    scale_inv = memory.permute(1, 2, 0)[:, :n]
    kernels.load(kernel, "cpu").quantize(x, block, "fp32", data, scale_inv)
    return data, scale_inv.contiguous(), bool((memory[:, :, n:] == -1).all())


@pytest.mark.parametrize("block", [(1, 1), (3, 5), (5, 1), (1, 300), (200, 3), (64, 64), (4096, 1), (128, 256)])
def test_blocks_of_any_shape_are_taken_up_to_the_registers_limit(interpreted, block):
    assert_equals_reference(interpreted, random_values((2, 9, 11), torch.bfloat16, "bits"), block, "pow2")
    assert_equals_reference(interpreted, random_values((1, 201, 4), torch.float32, "1"), block, "fp32")


@pytest.mark.parametrize("block", [(129, 256), (1, 65536), (8192, 8)])
def test_a_block_that_registers_cannot_hold_is_refused(interpreted, block):
    with pytest.raises(ValueError, match="blocks of up to 32768 values"):
        interpreted(run, "triton", torch.zeros(1, 2, 2), block, "pow2")


@EACH_FORMAT
def test_every_bfloat16_in_blocks_of_every_magnitude_gets_the_byte_of_the_specification(interpreted, scale_format):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    patterns = torch.cat([patterns[patterns.isfinite()], torch.zeros(2 * 32767 - 65280, dtype=torch.bfloat16)])
    amax = torch.tensor([m * 2.0**e for e in range(-133, 128, 7) for m in (1.0, 1.75, 1.7578125)]).bfloat16()
    x = torch.zeros(len(amax), 2, 32768, dtype=torch.bfloat16)
    x[:, :, 0] = amax[:, None]
    x[:, :, 1:] = torch.where(patterns.abs() <= amax[:, None], patterns, 0).view(len(amax), 2, 32767)
    assert_equals_reference(interpreted, x, (1, 32768), scale_format)


def test_float32_on_every_border_of_e4m3_and_beside_it_goes_to_the_right_side(interpreted):
    codes = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()  # 0 ... 448
    ties = (codes[1:] + codes[:-1]) / 2
    borders = torch.cat([ties, torch.nextafter(ties, codes[1:]), torch.nextafter(ties, codes[:-1]), codes])
    x = torch.cat([borders, -borders])[None, None]  # its scale is 1
    data, scale_inv, _ = interpreted(run, "triton", x, (1, 1024), "pow2")
    assert scale_inv.item() == 1
    even = codes[(torch.arange(0x7E) + 1) // 2 * 2]
    assert torch.equal(data.float()[0, 0, : len(borders)], torch.cat([even, codes[1:], codes[:-1], codes]))
    assert_equals_reference(interpreted, x, (1, 1024), "pow2")


@EACH_FORMAT
@EACH_DTYPE
def test_zero_denormal_and_largest_values_get_the_specified_scales(interpreted, dtype, scale_format):
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    x = torch.tensor([0.0, smallest, 3 * smallest, info.smallest_normal, 1.75, info.max], dtype=torch.float64)
    x = x.to(dtype)[None, :, None]
    _, scale_inv, _ = interpreted(run, "triton", x, (1, 128), scale_format)
    assert_equals_reference(interpreted, x, (1, 128), scale_format)
    assert scale_inv[0, 0] == 1
    if dtype is not torch.float16 and scale_format == "pow2":
        assert scale_inv[0, 1] == 2.0**-127  # denormal: the inverse of the largest power of two


@EACH_DTYPE
@EACH_BLOCK
def test_blocks_with_a_value_that_is_not_finite_and_no_others_get_scale_inv_nan(interpreted, block, dtype):
    x = random_values((2, 130, 131), dtype, "1")
    x[0, 3, 130], x[1, 129, 5], x[1, 7, 7] = torch.nan, torch.inf, -torch.inf
    data, scale_inv, _ = interpreted(run, "triton", x, block, "pow2")
    finite = reference.to_blocks(x, block).isfinite().all(4).all(2)
    assert torch.equal(scale_inv.isfinite(), finite)
    assert scale_inv[~finite].isnan().all()
    assert same_bits(scale_inv[finite], run("reference", x, block, "pow2")[1][finite])
    base = data.clone()
    as_bytes(base)[[0, 500, x.numel() - 1]] += 1
    _, _, delta = interpreted(run, "triton", x, block, "pow2", base)  # must not fail before the values are refused
    assert delta is not None
    delta.apply_(base)
    assert same_bits(base, data)


def test_quantize_blockwise_takes_the_kernel_by_name_and_refuses_what_is_not_finite(interpreted):
    x = random_values((130, 200), torch.bfloat16, "1")
    expected = quantize_blockwise(x, kernel="reference")
    quantized = interpreted(_quantize_blockwise, x)
    assert same_bits(quantized.data, expected.data)
    assert same_bits(quantized.scale_inv, expected.scale_inv)
    x[129, 3] = torch.nan
    with pytest.raises(NonFiniteError, match=r"1 of 26000 .*\[129, 3\]"):
        interpreted(_quantize_blockwise, x)


def _quantize_blockwise(x: Tensor):
    return quantize_blockwise(x, kernel="triton")


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from([(3, 130, 136), (2, 5, 8), (1, 128, 256)]),
    st.sampled_from(DTYPES),
    st.sampled_from([FP8, MXFP8, NVFP4]),
    st.sampled_from(LAYOUTS),
    st.integers(0, 2**32),
)
def test_separate_matrices_get_the_bytes_of_one_stack(interpreted, shape, dtype, format, layout, seed):
    values = random_values(shape, dtype, "bits", seed)
    seen = interpreted(_quantize_separate, values, layout, format.name)
    expected = quantize_blockwise(values, format=format, kernel="reference")
    assert same_bits(seen.data, expected.data)
    assert same_bits(seen.scale_inv, expected.scale_inv)


def _quantize_separate(values: Tensor, layout: str, format: str):
    return quantize_blockwise(Matrices(lay_out(values, layout)), format=ALL_FORMATS[format], kernel="triton")


@EACH_FORMAT
@EACH_BLOCK
@settings(deadline=None, max_examples=5)
@given(x=inputs(), share=st.sampled_from([0.0, 0.004, 0.1, MAX_CHANGED, 0.2, 1.0]), seed=st.integers(0, 2**32))
def test_delta_is_the_one_between_the_bytes(interpreted, block, scale_format, x, share, seed):
    base = run("reference", x, block, scale_format)[0]
    places = torch.rand(x.numel(), generator=torch.Generator().manual_seed(seed)) < share
    as_bytes(base)[places] += 1 + (torch.arange(x.numel())[places] % 255).to(torch.uint8)
    assert_equals_reference(interpreted, x, block, scale_format, base)


@EACH_BLOCK
@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_empty_tensors_give_empty_bytes_and_an_empty_delta(interpreted, shape, block):
    x = torch.zeros(shape)
    assert_equals_reference(interpreted, x, block, "pow2")
    delta = assert_equals_reference(interpreted, x, block, "pow2", torch.empty(shape, dtype=E4M3))
    assert delta is not None
    assert delta.changed_bytes == 0


# What the kernels compile to. ptxas comes with Triton, so this needs neither a GPU nor a CUDA toolkit.

POINTER = {torch.int16: "*i16", torch.float16: "*fp16", torch.float32: "*fp32", torch.uint8: "*u8", torch.int64: "*i64"}


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable:
    """compiled(arch, x, block): PTX and ptxas' report of the program that is launched for x on such a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from nemo_fp8rl.fp8.kernels import triton_kernels

    if triton_kernels.IS_INTERPRETED:
        pytest.skip("TRITON_INTERPRET is set, so nothing is compiled")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")

    def program(arch: int, module: Any, name: str, launch: Callable[[], None]) -> tuple[str, str]:
        with (
            mock.patch.object(module, name) as launched,
            mock.patch.object(torch.cuda, "get_device_capability", lambda device: divmod(arch, 10)),
        ):
            launch()
        arguments, options = launched.__getitem__.return_value.call_args
        source = ASTSource(getattr(module, name), *specialized(getattr(module, name), arguments))
        with redirect_stdout(io.StringIO()) as report:
            made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        return made.asm["ptx"], report.getvalue()

    def compile_for(arch: int, x: Tensor, block: Block) -> tuple[str, str]:
        data = torch.empty(x.shape, dtype=E4M3, device=x.device)
        outputs = data, torch.empty(scale_shape(x.shape, block), device=x.device)
        return program(
            arch, triton_kernels, "quantize_tile", lambda: triton_kernels.quantize(x, block, "pow2", *outputs)
        )

    compile_for.program = program  # type: ignore[attr-defined]
    return compile_for


def specialized(kernel: Any, arguments: tuple) -> tuple[dict, dict, dict]:
    """(types, constants, multiples of 16) of a launch, by Triton's rules: an integer 1 is a constant as well."""
    types: dict[str, str] = {}
    constants: dict[tuple[int], object] = {}
    multiples: dict[tuple[int], list] = {}
    for i, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            types[parameter.name], constants[(i,)] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            types[parameter.name] = POINTER[value.dtype]
        else:
            types[parameter.name] = "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
        address = value.data_ptr() if isinstance(value, Tensor) else value
        if isinstance(address, int) and address % 16 == 0:
            multiples[(i,)] = [["tt.divisibility", 16]]
    return types, constants, multiples


def assert_keeps_every_bit(ptx: str) -> None:
    assert set(re.findall(r"\bdiv\S*\.f32", ptx)) == {"div.rn.f32"}
    assert set(re.findall(r"\bmul\S*\.f32", ptx)) == {"mul.rn.f32"}
    assert "fma" not in ptx
    assert "ftz" not in ptx
    assert "approx" not in ptx


@pytest.mark.parametrize("block", [(16, 16), (1, 16)])
@pytest.mark.parametrize("arch", [90, 100])
def test_fp4_programs_for_real_gpus_divide_exactly_and_write_packed_bytes(compiled, arch, block):
    from nemo_fp8rl.fp8.kernels import triton_fp4

    x = torch.zeros(2, 256, 512, dtype=torch.bfloat16)
    data, scales = torch.empty(NVFP4.data_shape(x.shape), dtype=torch.uint8), scale_shape(x.shape, block)
    encode, scale_inv = torch.ones(2, 1), torch.empty(scales, dtype=E4M3)
    ptx, report = compiled.program(
        arch, triton_fp4, "quantize_fp4_tile", lambda: triton_fp4.quantize_fp4(x, block, encode, True, data, scale_inv)
    )
    assert_keeps_every_bit(ptx)
    loads = set(re.findall(r"\bld\.global\S*", ptx))
    assert loads & {"ld.global.v4.b32", "ld.global.v2.b32"}
    assert loads <= {"ld.global.v4.b32", "ld.global.v2.b32", "ld.global.b32"}  # the last reads the factor
    assert int(re.search(r"(\d+) bytes spill stores", report)[1]) <= 32


@EACH_BLOCK
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [(80, torch.bfloat16), (90, torch.float16), (90, torch.bfloat16), (90, torch.float32), (100, torch.bfloat16)],
)
def test_programs_for_real_gpus_divide_exactly_round_in_hardware_and_read_whole_lines(compiled, arch, dtype, block):
    ptx, report = compiled(arch, torch.zeros(2, 256, 512, dtype=dtype), block)
    assert_keeps_every_bit(ptx)
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (arch >= 89)
    assert set(re.findall(r"\bld\.global\S*", ptx)) <= {"ld.global.v4.b32", "ld.global.v2.b32"}
    assert int(re.search(r"(\d+) bytes spill stores", report)[1]) <= 32


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("block", [*BLOCKS, (16, 16)])
def test_programs_for_separate_matrices_read_whole_lines_as_well(compiled, arch, block):
    from nemo_fp8rl.fp8.kernels import triton_fp4, triton_kernels

    x = Matrices([torch.zeros(512, 512, dtype=torch.bfloat16)[256:] for _ in range(3)])
    scale_inv = torch.empty(scale_shape(x.shape, block))
    if block == (16, 16):
        data, factor = torch.empty(NVFP4.data_shape(x.shape), dtype=torch.uint8), torch.ones(3, 1)
        call = triton_fp4, "quantize_fp4_tile"
        ptx, _ = compiled.program(
            arch, *call, lambda: triton_fp4.quantize_fp4(x, block, factor, True, data, scale_inv.to(E4M3))
        )
    else:
        data = torch.empty(x.shape, dtype=E4M3)
        call = triton_kernels, "quantize_tile"
        ptx, _ = compiled.program(arch, *call, lambda: triton_kernels.quantize(x, block, "pow2", data, scale_inv))
    assert_keeps_every_bit(ptx)
    loads = set(re.findall(r"\bld\.global\S*", ptx))
    assert loads & {"ld.global.v4.b32", "ld.global.v2.b32"}
    assert loads <= {"ld.global.v4.b32", "ld.global.v2.b32", "ld.global.b64", "ld.global.b32"}  # address and factor


@EACH_BLOCK
def test_programs_for_a_transposed_matrix_read_whole_lines_as_well(compiled, block):
    ptx, _ = compiled(90, torch.zeros(2, 512, 256, dtype=torch.bfloat16).transpose(1, 2), block)
    assert_keeps_every_bit(ptx)
    assert set(re.findall(r"\bld\.global\S*", ptx)) == {"ld.global.v4.b32"}


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 2**31 + 128), (3, 2**31 // 64 + 1, 130)])
def test_programs_for_matrices_of_one_and_of_billions_of_values_compile(compiled, shape):
    assert_keeps_every_bit(compiled(90, torch.empty(shape, dtype=torch.bfloat16, device="meta"), (128, 128))[0])
