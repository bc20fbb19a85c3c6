"""The NVFP4 training recipe against Transformer Engine's own reference: its quantizer and its `qgemm`, in torch."""

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.fp8 import NVFP4, LinearRecipe, encode_scale, quantize_blockwise, quantized_linear, with_lines
from nemo_fp8rl.fp8.fp4_training.hadamard import transform_tokens

pytestmark = pytest.mark.transformer_engine
TOKENS, K, N = 64, 128, 96


def operands(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((TOKENS, K, 1.0), (N, K, 0.02), (TOKENS, N, 1e-3))
    x, w, dy = (torch.randn(n, k, generator=generator) * scale for n, k, scale in shapes)
    if kind == "outliers":
        x[:, 3] *= 50
        dy[7] *= 100
    return x.bfloat16(), w.bfloat16(), dy.bfloat16()


def quantizers(row_scaled: bool = False):
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef as Reference

    tokens = Reference(dtype=None, quant_tile_shape=(1, 16), with_rht=True)
    rows = Reference(dtype=None, quant_tile_shape=(1, 16), row_scaled_nvfp4=row_scaled)
    return tokens, rows, Reference(dtype=None, quant_tile_shape=(16, 16))


@pytest.mark.parametrize("kind", ["plain", "outliers"])
def test_columns_after_the_hadamard_transform_have_transformer_engines_bytes(kind):
    tokens, _, _ = quantizers()
    for values in (operands(kind)[0], operands(kind)[2]):
        expected = tokens.quantize(values)
        ours = quantize_blockwise(transform_tokens(values), format=with_lines(NVFP4), scale_format="fp32")
        assert torch.equal(ours.data, expected.data_t)
        assert torch.equal(ours.scale_inv.view(torch.uint8), expected.scale_t.view(torch.uint8))


@pytest.mark.parametrize("kind", ["plain", "outliers"])
def test_the_three_matmuls_are_those_of_qgemm(kind):
    """fprop with a global scale for each token, as engines quantize; gradients with one for each tensor."""
    from transformer_engine.pytorch.custom_recipes.gemm import GEMMType

    x, w, dy = operands(kind)
    tokens, rows, weights = quantizers(row_scaled=True)
    x_rows, x_all, w_all, dy_all = rows.quantize(x), tokens.quantize(x), weights.quantize(w), tokens.quantize(dy)

    def qgemm(kind: GEMMType, a: object, b: object) -> Tensor:
        columns_a, columns_b = kind is GEMMType.WGRAD, kind is not GEMMType.FPROP
        data = a.data_t if columns_a else a.data, b.data_t if columns_b else b.data
        scales = a.scale_t if columns_a else a.scale, b.scale_t if columns_b else b.scale
        return tokens.qgemm(*data, None, torch.float32, *scales, gemm_type=kind, qresult_x=a, qresult_w=b)

    leaves = x.float().requires_grad_(), w.float().requires_grad_()
    recipe = LinearRecipe(NVFP4, "fp32", backward="native", hadamard=True)
    y = quantized_linear(*leaves, recipe, encode=encode_scale(w.abs().amax(), "fp32"))
    y.backward(dy.float())
    expected = (
        qgemm(GEMMType.FPROP, x_rows, w_all),
        qgemm(GEMMType.DGRAD, dy_all, w_all),
        qgemm(GEMMType.WGRAD, dy_all, x_all),
    )
    for ours, theirs in zip((y.detach(), leaves[0].grad, leaves[1].grad), expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()
