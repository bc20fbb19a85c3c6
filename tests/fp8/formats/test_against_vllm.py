"""MXFP8 and NVFP4 against vLLM's own quantizers in torch: what plain vLLM would make of the same values.

With float32 globals vLLM's emulation of NVFP4 multiplies a block's scale in another order, which moves a scale now and
then, by one code; everything else is compared to the bit.
"""

import pytest
import torch
from torch import Tensor

from nemo_fp8rl.fp8 import MXFP8, NVFP4, encode_scale, quantize_blockwise, with_lines
from nemo_fp8rl.fp8.block_scaled import E4M3, e2m1_values
from tests.fp8.values import EACH_FORMAT, every_amax, random_values

pytest.importorskip("vllm")
MXFP8_LINES, NVFP4_LINES = with_lines(MXFP8), with_lines(NVFP4)
KINDS = ["0.02", "1", "1e-6", "bits"]


def assert_mxfp8_is_vllms(x: Tensor) -> None:
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import _mxfp8_e4m3_quantize_torch

    ours = quantize_blockwise(x, format=MXFP8_LINES)
    data, scales = _mxfp8_e4m3_quantize_torch(x)
    assert torch.equal(ours.scale_inv, scales)
    assert torch.equal(ours.data.view(torch.uint8), data.view(torch.uint8))


def test_mxfp8_is_vllms_on_every_bf16_amax():
    assert_mxfp8_is_vllms(every_amax(1, 32).squeeze(1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mxfp8_is_vllms_on_random_values(dtype, kind):
    assert_mxfp8_is_vllms(random_values((64, 512), dtype, kind))


def vllms_nvfp4(x: Tensor, encode: Tensor) -> tuple[Tensor, Tensor]:
    """Return vLLM's values of the codes, float32 [N, K], and its scales, E4M3 [N, K/16]."""
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant

    values, scales = ref_nvfp4_quant(x, encode, 16)
    return values, scales.to(E4M3)


def assert_nvfp4_is_vllms(x: Tensor, encode: Tensor, scale_format: str) -> None:
    """Codes may differ in blocks whose scale is zero, where every code is worth zero."""
    ours = quantize_blockwise(x, format=NVFP4_LINES, scale_format="fp32", encode=encode)  # fp32: without our flush
    values, scales = vllms_nvfp4(x, encode)
    apart = (ours.scale_inv.view(torch.uint8).int() - scales.view(torch.uint8).int()).abs()
    assert apart.max() <= (scale_format == "fp32")
    assert (apart != 0).float().mean() < 0.02
    counted = ((scales.float() != 0) & (apart == 0)).repeat_interleave(16, 1)
    codes = e2m1_values(ours.data)
    assert torch.equal(codes[counted], values[counted])
    assert torch.equal(torch.signbit(codes)[counted & (codes != 0)], torch.signbit(values)[counted & (codes != 0)])


@EACH_FORMAT
@pytest.mark.parametrize("kind", ["0.02", "1", "1e-6"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nvfp4_is_vllms_on_random_values(dtype, kind, scale_format):
    x = random_values((64, 512), dtype, kind)
    assert_nvfp4_is_vllms(x, encode_scale(x.abs().amax(), scale_format), scale_format)


@EACH_FORMAT
def test_nvfp4_is_vllms_where_scales_of_blocks_underflow(scale_format):
    x = random_values((64, 512), torch.bfloat16, "1")
    x *= 2.0 ** -torch.arange(64).view(-1, 1)  # scales down to zero, through E4M3's subnormal values
    encode = encode_scale(x.abs().amax(), scale_format)
    assert (vllms_nvfp4(x, encode)[1].float() == 0).any()
    assert_nvfp4_is_vllms(x, encode, scale_format)


def test_nvfp4_with_pow2_globals_is_vllms_for_every_bf16_amax_of_a_tensor():
    """A tensor of two blocks for every seventh amax, which meets all mantissas."""
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant

    x = every_amax(1, 32)[::7].squeeze(1)
    encode = encode_scale(x.abs().amax(1), "pow2")
    normal = (encode > 2.0**-100) & (encode < 2.0**100)  # vLLM has no guard where the factor overflows
    x, encode = x[normal], encode[normal]
    ours = quantize_blockwise(x[:, None], format=NVFP4_LINES, scale_format="fp32", encode=encode)
    for i in range(0, len(x), 8):
        values, scales = ref_nvfp4_quant(x[i : i + 1], encode[i].view(1), 16)
        assert torch.equal(ours.scale_inv[i].float(), scales)
        assert torch.equal(e2m1_values(ours.data[i]), values)


def test_nvfp4_values_are_those_that_vllm_dequantizes():
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

    x = random_values((64, 512), torch.bfloat16, "0.02")
    for block_format in (NVFP4_LINES, NVFP4):
        ours = quantize_blockwise(x, format=block_format)
        scales = ours.scale_inv.repeat_interleave(block_format.weight_block[0], 0)
        theirs = dequantize_to_dtype(ours.data, scales, ours.global_scale, torch.bfloat16, block_size=16, swizzle=False)
        assert torch.equal(ours.dequantize(torch.bfloat16), theirs)
