"""The published formulas of MXFP8, in blocks of 1x32: everybody rounds scales up but OCP's specification.

vLLM's torch path, FlashInfer and ModelOpt take ceil(log2(amax / 448)) for the exponent of the scale, which is
Transformer Engine's rule. compressed-tensors adds a quarter to the mantissa of amax and takes its exponent less 8: the
same again, but where the mantissa is exactly 1.75, for which it takes a scale twice as large.
"""

import torch
from torch import Tensor

from nemo_fp8rl.commands.parity import transformer_engine
from nemo_fp8rl.commands.parity.formulas import block_amax, cut_whole_blocks
from nemo_fp8rl.commands.parity.implementation import Implementation, Quantize
from nemo_fp8rl.fp8 import MXFP8, Block, ScaleFormat, with_lines
from nemo_fp8rl.fp8.block_scaled import E4M3, E4M3_MAX, E8M0_BIAS, BlockScaled

LINES = with_lines(MXFP8)
ELEMENT_EXPONENT = 8
"""The exponent of 448, the largest E4M3 value."""


def vllm_torch(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
    """vLLM, mxfp8_utils.py, _mxfp8_e4m3_quantize_torch; ModelOpt, qtensor/mxfp8_tensor.py, has the same rule."""
    blocks = cut_whole_blocks(x, block)
    amax = block_amax(blocks).clamp(min=torch.finfo(torch.float32).tiny)
    return _result(blocks, (amax / E4M3_MAX).log2().ceil(), x)


def compressed_tensors(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
    """compressed-tensors, quantization/utils/mxfp_utils.py, generate_mx_scales and round_to_power_2."""
    blocks = cut_whole_blocks(x, block)
    amax = block_amax(blocks)
    rounds_up = torch.frexp(amax).mantissa >= 1.75 / 2
    return _result(blocks, _exponent(amax) + rounds_up, x)


def ocp(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
    """OCP Microscaling Formats specification 1.0, section 6.3: exponent of amax less that of 448, elements saturate."""
    blocks = cut_whole_blocks(x, block)
    return _result(blocks, _exponent(block_amax(blocks)), x)


def _exponent(amax: Tensor) -> Tensor:
    """Return the exponent of amax less that of 448, as floats."""
    return torch.where(amax > 0, torch.frexp(amax).exponent - 1.0 - ELEMENT_EXPONENT, -E8M0_BIAS)


def _result(blocks: Tensor, exponent: Tensor, x: Tensor) -> BlockScaled:
    """Return `blocks` [N, 1, K/32, 32] over 2^exponent in E4M3, saturated; exponent [N, 1, K/32, 1]."""
    exponent = exponent.clamp(-E8M0_BIAS, E8M0_BIAS)
    data = (blocks / exponent.exp2()).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).view(x.shape)
    scales = (exponent[:, 0, :, 0] + E8M0_BIAS).to(torch.uint8)
    return BlockScaled(data, scales, LINES.weight_block, LINES)


TE = "TransformerEngine transformer_engine/common/util/ptx_arch_spec.cuh"
VLLM = "vLLM vllm/model_executor/layers/quantization/utils/mxfp8_utils.py"
MODELOPT = "ModelOpt modelopt/torch/quantization/qtensor/mxfp8_tensor.py"
COMPRESSED_TENSORS = "compressed-tensors quantization/utils/mxfp_utils.py"
OCP = "OCP Microscaling Formats (MX) specification 1.0"
BLOCKS = (MXFP8.weight_block, LINES.weight_block)


def _lines(name: str, source: str, quantize: Quantize) -> Implementation:
    return Implementation(name, source, quantize, BLOCKS[1:], ("pow2",), format=MXFP8)


FORMULAS = (
    Implementation("Transformer Engine", TE, transformer_engine.mxfp8, BLOCKS, ("pow2",), format=MXFP8),
    _lines("vLLM torch", VLLM, vllm_torch),
    _lines("ModelOpt", MODELOPT, vllm_torch),
    _lines("compressed-tensors", COMPRESSED_TENSORS, compressed_tensors),
    _lines("OCP, rounding down", OCP, ocp),
)
