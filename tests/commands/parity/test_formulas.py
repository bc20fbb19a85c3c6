"""The published formulas against the libraries that are installed, against plain Python, and against our contract."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from nemo_fp8rl.commands.parity import formulas, libraries, sample_matrices, transformer_engine
from nemo_fp8rl.commands.parity.comparison_table import Difference, compare
from nemo_fp8rl.commands.parity.implementation import BOTH, FORMATS, Implementation, UnsupportedShapeError
from nemo_fp8rl.fp8 import BLOCK, BlockScaled, quantize_blockwise
from nemo_fp8rl.fp8.block_scaled import ALONG_LAST, E4M3

NONE = Difference(0.0, 0.0, 0.0)
FORMULAS = {formula.name: formula for formula in formulas.FORMULAS}
SIZE = 512
WEIGHTS, ACTIVATIONS = sample_matrices.weights(SIZE, seed=1), sample_matrices.activations(SIZE, seed=1)


def inputs(block: tuple[int, int]) -> dict[str, torch.Tensor]:
    return WEIGHTS if block == BLOCK else ACTIVATIONS


def from_ours(name: str, x: torch.Tensor, block: tuple[int, int], scale_format: str) -> Difference:
    ours = quantize_blockwise(x, block=block, scale_format=scale_format)
    return compare(FORMULAS[name].quantize(x, block, scale_format), ours)


def any_bits(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every exponent, denormals too; nothing that is not finite."""
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    span = 2 ** (8 * dtype.itemsize - 1)
    x = torch.randint(-span, span, shape, generator=torch.Generator().manual_seed(seed)).to(integers).view(dtype)
    return torch.where(x.isfinite(), x, 0)


def at_every_magnitude(dtype: torch.dtype) -> torch.Tensor:
    """[6, 256 * 128]: in each block of 1x128 the values have about one magnitude."""
    magnitudes = 2.0 ** torch.linspace(-149, 127, 256).repeat_interleave(128)
    x = torch.randn(6, 256 * 128, generator=torch.Generator().manual_seed(0)).clamp(-1.9, 1.9) * magnitudes
    x = x.to(dtype)
    return torch.where(x.isfinite(), x, 0)


# Transformer Engine


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("block", BOTH)
@pytest.mark.parametrize("kind", sample_matrices.KINDS)
def test_transformer_engine_in_integers_equals_the_contract_bit_for_bit(kind, block, scale_format):
    assert from_ours("Transformer Engine", inputs(block)[kind], block, scale_format) == NONE


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_transformer_engine_equals_the_contract_at_every_magnitude(dtype, scale_format):
    for x in (at_every_magnitude(dtype), any_bits((130, 260), dtype, seed=2)):
        for block in BOTH:
            assert from_ours("Transformer Engine", x, block, scale_format) == NONE


def test_its_long_division_is_the_correctly_rounded_quotient():
    amaxes = any_bits((1, 300), torch.float32, seed=3).abs().numpy().reshape(-1)
    amaxes = np.concatenate([amaxes, np.float32([1.75, np.nextafter(np.float32(1.75), 2), 448, 1])])
    scales = transformer_engine._scale(amaxes.astype(np.float64), largest=1.0)
    for amax, scale in zip(amaxes, scales, strict=True):
        if amax and scale != 1.0:
            exact = Fraction(448) / Fraction(float(amax))
            spacing = Fraction(2) ** (math.frexp(float(scale))[1] - 24)
            assert abs(Fraction(float(scale)) - exact) <= spacing / 2


def test_its_e4m3_bytes_are_those_of_a_search_for_the_nearest_value():
    codes = torch.arange(127, dtype=torch.uint8)
    values = codes.view(E4M3).double().numpy()  # 0 ... 448
    middles = (values[1:] + values[:-1]) / 2
    beside = [np.nextafter(middles.astype(np.float32), np.float32(to)) for to in (0, 1000)]
    tried = np.concatenate([values, middles, *beside, [500.0, 1e30, 1e-30, 1e-45]]).astype(np.float32)
    distance = np.abs(np.minimum(tried.astype(np.float64), 448)[:, None] - values)
    nearest = distance == distance.min(1, keepdims=True)
    even = nearest & (np.arange(127) % 2 == 0)
    expected = np.where(nearest.sum(1) == 2, even.argmax(1), nearest.argmax(1))
    np.testing.assert_array_equal(transformer_engine.e4m3_bytes(tried), expected)
    np.testing.assert_array_equal(transformer_engine.e4m3_bytes(-tried), expected + 128)


# pow2: everybody agrees, but for what is documented


@pytest.mark.parametrize("block", BOTH)
@pytest.mark.parametrize("name", [name for name, made in FORMULAS.items() if "pow2" in made.formats])
def test_in_pow2_every_formula_agrees_with_ours_on_normal_weights(name, block):
    if block in FORMULAS[name].blocks:
        assert from_ours(name, inputs(block)["normal"], block, "pow2") == NONE


def test_in_pow2_zero_blocks_differ_by_their_scale_alone():
    for name, made in FORMULAS.items():
        if "pow2" in made.formats and BLOCK in made.blocks:
            difference = from_ours(name, WEIGHTS["zero blocks"], BLOCK, "pow2")
            agrees = name in ("Transformer Engine", "NeMo RL")
            assert difference == Difference(0.0, 0.0 if agrees else 0.5, 0.0), name


def test_infir2s_caster_has_our_bytes_on_a_million_blocks():
    """Of bfloat16 weights of every magnitude that its float16 scales can hold; smaller ones lose their scale."""
    for seed in range(10):
        x = torch.randn(100_000, 128, generator=torch.Generator().manual_seed(seed))
        x *= torch.linspace(-14, 14, 100_000).exp2()[:, None]
        x = x.bfloat16()
        assert compare(formulas.infir2(x, ALONG_LAST, "pow2"), quantize_blockwise(x, block=ALONG_LAST)) == NONE
    small = formulas.infir2(torch.full((128, 128), 2.0**-20), BLOCK, "pow2")
    assert small.scale_inv.tolist() == [[0.0]]


def test_deepgemm_quantizes_tiny_weights_to_other_bytes():
    for name in ("DeepGEMM, on CPU", "DeepGEMM, on CUDA"):
        difference = from_ours(name, WEIGHTS["tiny"], BLOCK, "pow2")
        assert difference.bytes > 0.99
        assert difference.scales == 1.0


def test_nemo_rl_pads_a_ragged_edge_with_the_last_element():
    assert from_ours("NeMo RL", WEIGHTS["ragged"], BLOCK, "pow2") == NONE  # the last element is no block's largest
    x = torch.full((200, 300), 2.0**-10)
    x[-1, -1] = 1.0
    quantized = formulas.nemo_rl(x, BLOCK, "pow2")
    assert quantized.scale_inv.tolist() == [[2.0**-18, 2.0**-18, 2.0**-8], [2.0**-8] * 3]
    assert quantize_blockwise(x).scale_inv.tolist() == [[2.0**-18] * 3, [2.0**-18, 2.0**-18, 2.0**-8]]
    edge = 1 - 128 * 256 / (200 * 300)
    outlier = from_ours("NeMo RL", x, BLOCK, "pow2")
    assert 0.9 * edge - 72 * 44 / (200 * 300) < outlier.bytes <= edge  # one edge block has the outlier itself


def test_logarithms_miss_the_exponent_of_float32_just_above_a_power_of_two():
    """amax = 1.75 * 2^k and a few ulp: bf16 weights never have it, float32 master weights can."""
    ulps = torch.arange(1, 9, dtype=torch.int32)
    wrong = {name: 0 for name in ("NeMo RL", "vLLM CUDA", "vLLM Triton", "vLLM UE8M0", "DeepGEMM, on CPU")}
    for exponent in range(-12, 20):  # below, DeepGEMM's floor decides
        amax = (torch.tensor(1.75 * 2.0**exponent).view(torch.int32) + ulps).view(torch.float32)
        x = (amax[:, None] * torch.ones(128)).contiguous()
        ours = quantize_blockwise(x, block=ALONG_LAST)
        assert compare(transformer_engine.quantize(x, ALONG_LAST, "pow2"), ours) == NONE
        for name in wrong:
            theirs = FORMULAS[name].quantize(x, ALONG_LAST, "pow2")
            wrong[name] += int((theirs.scale_inv != ours.scale_inv).sum())
    assert wrong["vLLM UE8M0"] == wrong["DeepGEMM, on CPU"] == 0  # these take the exponent from the bits
    assert min(wrong[name] for name in ("NeMo RL", "vLLM CUDA", "vLLM Triton")) >= 8 * 32 / 4


# fp32: who agrees, and how far the others are off


@pytest.mark.parametrize("kind", sample_matrices.KINDS)
def test_verl_torch_equals_ours_in_fp32(kind):
    assert from_ours("verl torch", WEIGHTS[kind], BLOCK, "fp32") == NONE


def test_fp32_scales_differ_as_often_as_measured():
    x = sample_matrices.weights(2048, seed=0)["normal"]
    measured = {
        "NeMo RL": 0.13,
        "verl Triton": 0.41,
        "DeepGEMM, on CPU": 0.41,
        "DeepGEMM, on CUDA": 0.57,
        "vLLM CUDA": 0.41,
        "vLLM Triton": 0.57,
    }
    for name, scales in measured.items():
        assert from_ours(name, x, BLOCK, "fp32").scales == pytest.approx(scales, abs=0.06), name


def test_nemo_rls_reciprocal_is_what_torch_makes_of_the_python_expression():
    amax = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) + 1e-3
    assert torch.equal(448.0 / amax, amax.reciprocal() * 448.0)
    assert not torch.equal(448.0 / amax, torch.div(448.0, amax))
    assert torch.equal(torch.div(448.0, amax), torch.div(torch.full_like(amax, 448.0), amax))


# What vLLM does to weights that it was given


def test_requantizing_keeps_the_values_of_pow2_and_changes_those_of_fp32():
    x = sample_matrices.weights(1024, seed=0)["heavy-tailed"]
    kept, changed = (from_ours("vLLM requantizing ours", x, BLOCK, scale_format) for scale_format in FORMATS)
    assert kept.values == 0
    assert changed.values > 0.9
    halved = torch.full((128, 128), 230.0)  # 230 * 1 rounds to 224, the largest value that half the scale can carry
    assert from_ours("vLLM requantizing ours", halved, BLOCK, "pow2") == Difference(1.0, 1.0, 0.0)


# Shapes


@pytest.mark.parametrize("name", ["vLLM CUDA", "vLLM Triton", "vLLM UE8M0"])
def test_vllms_kernels_take_whole_groups_of_activations_only(name):
    with pytest.raises(UnsupportedShapeError, match="1100"):
        FORMULAS[name].quantize(torch.ones(4, 1100), ALONG_LAST, "pow2")
    assert FORMULAS[name].quantize(torch.ones(4, 1100), BLOCK, "pow2").scale_inv.shape == (1, 9)


# The libraries themselves, where they are installed


@pytest.fixture(scope="module")
def vllm() -> dict[str, Implementation]:
    pytest.importorskip("vllm")
    return {made.name: made for made in libraries.vllm()}


def assert_library_equals_formula(library: Implementation) -> None:
    for block in library.blocks:
        for scale_format in library.formats:
            for kind, x in inputs(block).items():
                with libraries.silence_stdout():
                    theirs = library.quantize(x, block, scale_format)
                cpu = BlockScaled(theirs.data.cpu(), theirs.scale_inv.cpu(), block)
                formula = FORMULAS[str(library.formula)].quantize(x, block, scale_format)
                assert compare(cpu, formula) == NONE, (library.name, block, scale_format, kind)


@pytest.mark.parametrize("name", ["vLLM per_block_cast_to_fp8", "vLLM requantizing ours", "vLLM native"])
def test_the_installed_vllm_equals_its_formula_bit_for_bit(vllm, name):
    assert_library_equals_formula(vllm[name])


def test_vllms_own_cast_takes_the_exponent_by_logarithm_where_deepgemm_takes_the_bits(vllm):
    """The formula beside it is DeepGEMM's newest; they part where log2 is not exact, which bf16 amaxes do not reach."""
    amax = torch.tensor(1.75).view(torch.int32).add(1).view(torch.float32)
    x = amax * torch.ones(128, 128)
    theirs = vllm["vLLM per_block_cast_to_fp8"].quantize(x, BLOCK, "pow2")
    assert theirs.scale_inv.item() == 2.0**-8
    assert formulas.deepgemm(x, BLOCK, "pow2").scale_inv.item() == 2.0**-7


@pytest.mark.parametrize("name", [pytest.param("NeMo RL", marks=pytest.mark.nemo_rl), "verl", "DeepGEMM"])
def test_others_equal_their_formulas_bit_for_bit(name):
    try:
        found = libraries.LOADERS[name]()
    except libraries.UnavailableError as why:
        pytest.skip(f"{name}: {why}")
    for library in found:
        assert_library_equals_formula(library)
