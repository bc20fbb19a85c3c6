"""MXFP8 and NVFP4 against Transformer Engine's own references in torch, to the bit.

NVFP4's reference is in the released package. MXFP8's is in the tests of the repository alone: `TRANSFORMER_ENGINE_SRC`
names a checkout, and without it that test is skipped; `tests/commands/parity` has the rule in integers.
"""

import ast
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.fp8 import MXFP8, NVFP4, BlockScaled, Format, encode_scale, quantize_blockwise, with_lines
from nemo_fp8rl.fp8.block_scaled import E2M1_MAX, E4M3_MAX
from tests.fp8.values import every_amax, random_values

pytestmark = pytest.mark.transformer_engine
NVFP4_LINES = with_lines(NVFP4)
KINDS = ["0.02", "1", "1e-6", "underflow"]
SOURCE = "TRANSFORMER_ENGINE_SRC"


@pytest.fixture(scope="module")
def reference():
    """NVFP4QuantizerRef, which older releases have elsewhere."""
    return pytest.importorskip("transformer_engine.pytorch.custom_recipes.reference_nvfp4").NVFP4QuantizerRef


def values(kind: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return [128, 256] without -0.0, whose sign the reference drops."""
    if kind != "underflow":
        return random_values((128, 256), dtype, kind)
    x = random_values((128, 256), dtype, "1") * 2.0 ** -torch.arange(128).view(-1, 1).to(dtype)
    return torch.where(x == 0, 0, x)


def assert_equal(ours: BlockScaled, data: Tensor, scales: Tensor) -> None:
    """Compare with the reference's bytes, and with its scales, of which it has a row for each row of the matrix."""
    rows = ours.scale_inv.repeat_interleave(ours.block[0], 0)[: scales.size(0)]
    assert torch.equal(ours.data, data)
    assert torch.equal(rows.view(torch.uint8), scales.view(torch.uint8))


@pytest.mark.parametrize("form", [NVFP4_LINES, NVFP4], ids=lambda form: form.name)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nvfp4_with_fp32_globals_is_the_reference(reference, form: Format, kind, dtype):
    x = values(kind, dtype)
    quantizer = reference(dtype=None, rowwise=True, columnwise=True, quant_tile_shape=form.weight_block)
    data, scales, columns, column_scales, amax, _ = quantizer._quantize(x)
    ours = quantize_blockwise(x, format=form, scale_format="fp32")
    assert_equal(ours, data, scales)
    assert torch.equal(ours.global_scale, 1 / encode_scale(amax[0], "fp32"))
    assert_equal(quantize_blockwise(x.T, format=form, scale_format="fp32"), columns, column_scales)


@pytest.mark.parametrize("form", [NVFP4_LINES, NVFP4], ids=lambda form: form.name)
@pytest.mark.parametrize("kind", KINDS)
def test_nvfp4_with_pow2_globals_is_the_reference_given_another_amax(reference, form: Format, kind):
    """With 2688 * 2^k for the amax, the reference's global scale is a power of two; it has no flush of small scales."""
    x = values(kind)
    encode = encode_scale(x.abs().amax(), "pow2")
    rows, columns = form.weight_block
    data, scales = reference._quantize_blockwise_reference(
        x, (E2M1_MAX * E4M3_MAX / encode).view(1), columns, rows, pow_2_scales=False, eps=0.0
    )
    assert_equal(quantize_blockwise(x, format=form, scale_format="fp32", encode=encode), data, scales)
    flushed = quantize_blockwise(x, format=form)
    kept = flushed.scale_inv.repeat_interleave(rows, 0).float() != 0
    assert torch.equal(kept, scales.float() >= 2.0**-6)
    assert torch.equal(flushed.data[kept.repeat_interleave(columns // 2, 1)], data[kept.repeat_interleave(8, 1)])


@pytest.mark.parametrize("kind", KINDS)
def test_nvfp4_with_a_global_for_each_row_is_the_row_scaled_reference(reference, kind):
    x = values(kind)
    quantizer = reference(dtype=None, columnwise=False, quant_tile_shape=(1, 16), row_scaled_nvfp4=True)
    data, scales, *_, amax, _ = quantizer._quantize(x)
    encode = encode_scale(x.abs().amax(1), "fp32")
    ours = quantize_blockwise(x[:, None], format=NVFP4_LINES, scale_format="fp32", encode=encode)
    assert torch.equal(ours.data.squeeze(1), data)
    assert torch.equal(ours.scale_inv.squeeze(1).view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(encode, encode_scale(amax, "fp32"))


def test_mxfp8_in_32x32_is_the_reference_on_every_bf16_amax():
    quantize = mxfp8_reference()
    for x in every_amax(32, 32).split(4096):
        blocks = x.permute(1, 0, 2).reshape(32, -1)  # side by side: a block for each amax
        data, scales, *_ = quantize(blocks)
        ours = quantize_blockwise(blocks, format=MXFP8)
        assert torch.equal(ours.data.view(torch.uint8), data.view(torch.uint8))
        assert torch.equal(ours.scale_inv, scales.view(torch.uint8)[: ours.scale_inv.size(0), : len(x)])


def mxfp8_reference():
    """Return `_mxfp8_2d_quantize_reference` of Transformer Engine's tests, which import its compiled half."""
    if not (root := os.environ.get(SOURCE)):
        pytest.skip(f"{SOURCE} names no checkout of Transformer Engine")
    name = "_mxfp8_2d_quantize_reference"
    (path,) = (path for path in Path(root, "tests/pytorch").rglob("*.py") if f"def {name}(" in path.read_text())
    needed = {name, "_float_to_e8m0", "_e8m0_to_scale_inv", "MXFP8_BLOCK_SIZE", "FP8_E4M3_MAX"}
    scope = {"torch": torch}
    for node in ast.parse(path.read_text()).body:
        names = (
            {node.name} if isinstance(node, ast.FunctionDef) else {ast.unparse(t) for t in getattr(node, "targets", ())}
        )
        if names & needed:
            exec(compile(ast.Module([node], []), str(path), "exec"), scope)
    return scope[name]
