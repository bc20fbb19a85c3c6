"""The published formulas of MXFP8 and NVFP4 against the installed libraries, and against our contract."""

import numpy as np
import pytest
import torch

from nemo_fp8rl.commands.parity import libraries, mxfp8_formulas, nvfp4_formulas, transformer_engine
from nemo_fp8rl.commands.parity.comparison_table import SECTIONS, Difference, Section, compare
from nemo_fp8rl.commands.parity.implementation import UnsupportedShapeError
from nemo_fp8rl.fp8 import FP8, MXFP8, with_lines
from nemo_fp8rl.fp8.block_scaled import E2M1_VALUES
from tests.fp8.values import every_amax

NONE = Difference(0.0, 0.0, 0.0)
NEW = [section for section in SECTIONS if section.format != FP8]
LINES = [section for section in NEW if not section.is_of_weights]
FORMULAS = {
    (made.format.name, made.name): made for module in (mxfp8_formulas, nvfp4_formulas) for made in module.FORMULAS
}
MATRICES = {section.title: section.matrices(256, seed=1) for section in NEW}
each_line = pytest.mark.parametrize("section", LINES, ids=lambda section: section.title)


def from_ours(section: Section, name: str, kind: str, scale_format: str) -> Difference:
    x = MATRICES[section.title][kind]
    other = FORMULAS[section.format.name, name].quantize(x, section.block, scale_format)
    return compare(other, section.contract(x, scale_format))


@pytest.mark.parametrize("section", NEW, ids=lambda section: section.title)
def test_transformer_engine_in_integers_equals_the_contract_bit_for_bit(section):
    for scale_format in section.scale_formats:
        for kind in MATRICES[section.title]:
            is_flushed = section.title == "nvfp4 weights 16x16" and (kind, scale_format) == ("wide range", "pow2")
            difference = from_ours(section, "Transformer Engine", kind, scale_format)
            assert (difference == NONE) != is_flushed, (kind, scale_format)


def test_transformer_engine_in_integers_makes_our_mxfp8_of_every_bf16_amax():
    section = Section(MXFP8, with_lines(MXFP8).weight_block)
    x = every_amax(1, 32).squeeze(1)
    assert compare(transformer_engine.mxfp8(x, section.block, "pow2"), section.contract(x, "pow2")) == NONE


def test_its_e2m1_codes_are_those_of_a_search_for_the_nearest_value():
    values = np.array(E2M1_VALUES)
    middles = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(middles, np.float32(to)) for to in (0, 100)]
    tried = np.concatenate([values, middles, *beside, [7.0, 1e30, 1e-30, 1e-45]]).astype(np.float32)
    distance = np.abs(np.minimum(tried.astype(np.float64), 6)[:, None] - values)
    nearest = distance == distance.min(1, keepdims=True)
    even = nearest & (np.arange(8) % 2 == 0)
    expected = np.where(nearest.sum(1) == 2, even.argmax(1), nearest.argmax(1))
    np.testing.assert_array_equal(transformer_engine.e2m1_codes(tried), expected)
    np.testing.assert_array_equal(transformer_engine.e2m1_codes(-tried), expected + 8)


def test_rounding_scales_down_saturates_and_the_other_rules_of_mxfp8_keep_our_values():
    (section,) = (section for section in LINES if section.format == MXFP8)
    for kind in ("normal", "heavy-tailed", "zero blocks", "wide range"):
        assert from_ours(section, "vLLM torch", kind, "pow2") == NONE
        beside = from_ours(section, "compressed-tensors", kind, "pow2")
        assert beside.values == 0, kind
        assert beside.scales < 0.02, kind
        down = from_ours(section, "OCP, rounding down", kind, "pow2")
        assert 0.05 < down.scales < 0.3, kind
        assert 0 < down.values < 0.02, kind


def test_with_pow2_globals_vllms_emulation_of_nvfp4_makes_our_values():
    (section,) = (section for section in LINES if section.format != MXFP8)
    for kind in ("normal", "heavy-tailed", "zero blocks", "tiny"):
        assert from_ours(section, "vLLM emulation", kind, "pow2") == NONE, kind
        assert from_ours(section, "vLLM emulation", kind, "fp32").scales < 0.02, kind
        for nearly in ("vLLM CUDA, 1/x 1 ulp up", "vLLM CUDA, 1/x 1 ulp down", "ModelOpt", "compressed-tensors"):
            assert 0 < from_ours(section, nearly, kind, "pow2").values < 0.02, (nearly, kind)
    wide = from_ours(section, "vLLM emulation", "wide range", "pow2")
    assert wide.bytes > 0.1, "codes of blocks whose scale is zero"
    assert (wide.scales, wide.values) == (0, 0)


@each_line
def test_rows_of_incomplete_blocks_are_refused(section):
    for (name, formula), made in FORMULAS.items():
        if name == section.format.name and formula != "Transformer Engine":
            with pytest.raises(UnsupportedShapeError, match="40"):
                made.quantize(torch.ones(4, 40), section.block, "pow2")


@pytest.mark.parametrize("loader", ["vLLM MXFP8", "vLLM NVFP4", "compressed-tensors"])
def test_the_installed_libraries_equal_their_formulas_bit_for_bit(loader):
    pytest.importorskip("vllm" if "vLLM" in loader else "compressed_tensors")
    for library in libraries.LOADERS[loader]():
        (section,) = (section for section in LINES if section.has(library))
        formula = FORMULAS[section.format.name, str(library.formula)]
        for scale_format in library.formats:
            for kind, x in MATRICES[section.title].items():
                if "ragged" not in kind:
                    theirs = library.quantize(x, section.block, scale_format)
                    ours = formula.quantize(x, section.block, scale_format)
                    assert compare(theirs, ours) == NONE, (library.name, kind, scale_format)
