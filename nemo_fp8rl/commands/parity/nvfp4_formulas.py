"""The published formulas of NVFP4, with one global scale for a matrix and block scales of 1x16.

They differ in the order of products and in what becomes of zero and of scales that E4M3 cannot hold. With `pow2` a
formula is given a global scale that is a power of two, which engines and checkpoints can hold as well.
"""

from functools import partial

import torch
from torch import Tensor

from nemo_fp8rl.commands.parity import transformer_engine
from nemo_fp8rl.commands.parity.formulas import block_amax, cut_whole_blocks
from nemo_fp8rl.commands.parity.implementation import Implementation, Quantize
from nemo_fp8rl.fp8 import NVFP4, Block, ScaleFormat, with_lines
from nemo_fp8rl.fp8.block_scaled import E2M1_MAX, E4M3, E4M3_MAX, BlockScaled

LINES = with_lines(NVFP4)
LARGEST = E2M1_MAX * E4M3_MAX
SMALLEST_E4M3 = 2.0**-9
COMPRESSED_TENSORS_EPS = 0.125
"""The block scale of compressed-tensors in the place of zero."""


def encode_factor(x: Tensor, scale_format: ScaleFormat) -> Tensor:
    """Return 2688 / amax of a matrix, float32 [1], or the power of two not above it; 1 if amax is 0."""
    amax = x.abs().amax().float().view(1)
    encode = torch.where(amax > 0, torch.div(torch.full_like(amax, LARGEST), amax), 1.0)
    return torch.ldexp(torch.ones(1), torch.frexp(encode).exponent - 1) if scale_format == "pow2" else encode


def vllm_emulation(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
    """vLLM, nvfp4_emulation_utils.py, ref_nvfp4_quant: Transformer Engine's formula, and 0 for the inverse of 0."""
    return _vllm(x, block, scale_format, ulps=0)


def _vllm(x: Tensor, block: Block, scale_format: ScaleFormat, ulps: int) -> BlockScaled:
    """Compute vLLM's formula. ulps: error of the last reciprocal, in units of its last bit."""
    blocks, encode = cut_whole_blocks(x, block), encode_factor(x, scale_format)
    scales = _to_e4m3(encode * (block_amax(blocks) * (1 / E2M1_MAX)))
    inverse = (scales.float() * encode.reciprocal()).reciprocal()
    inverse = (inverse.view(torch.int32) + ulps).view(torch.float32).masked_fill(scales.float() == 0, 0.0)
    return _result(blocks * inverse, scales, encode.reciprocal(), x)


def modelopt(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
    """ModelOpt, qtensor/nvfp4_tensor.py, NVFP4QTensor.quantize with dynamic scales.

    The global scale multiplies, amax / 2688; a block of zeros has the scale 1, and no scale is below 2^-9.
    """
    blocks = cut_whole_blocks(x, block)
    fp32 = x.abs().amax().float().view(1) / LARGEST
    global_scale = fp32 if scale_format == "fp32" else encode_factor(x, scale_format).reciprocal()
    scales = block_amax(blocks) / (E2M1_MAX * global_scale)
    scales = scales.masked_fill(scales == 0, 1.0).clamp(min=SMALLEST_E4M3).to(E4M3)
    return _result(blocks / (scales.float() * global_scale), scales, global_scale, x)


def compressed_tensors(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
    """compressed-tensors, quantization/utils/helpers.py, generate_gparam and calculate_qparams.

    Largest values are in x's dtype, and so are the global scale, 2688 / amax, and amax / 6 of a block. A block scale of
    zero becomes 1/8. The global scale divides.
    """
    blocks = cut_whole_blocks(x, block)
    amax = x.abs().amax().clamp(min=torch.finfo(x.dtype).tiny).view(1)
    encode = (LARGEST / amax).float() if scale_format == "fp32" else encode_factor(x, scale_format)
    scales = _to_e4m3(encode * (block_amax(blocks).to(x.dtype) / E2M1_MAX)).float()
    scales = scales.masked_fill(scales == 0, COMPRESSED_TENSORS_EPS)
    return _result(blocks / (scales / encode), scales.to(E4M3), 1 / encode, x)


def _to_e4m3(scales: Tensor) -> Tensor:
    return scales.clamp(max=E4M3_MAX).to(E4M3)


def _result(scaled: Tensor, scales: Tensor, global_scale: Tensor, x: Tensor) -> BlockScaled:
    """Round `scaled` [N, 1, K/16, 16] to E2M1; scales, E4M3 [N, 1, K/16, 1]."""
    codes = transformer_engine.e2m1_codes(scaled.reshape(x.shape).numpy())
    data = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
    return BlockScaled(data, scales[:, 0, :, 0].contiguous(), LINES.weight_block, LINES, global_scale.view(()))


TE = "TransformerEngine transformer_engine/common/cast/nvfp4/core_nvfp4.cuh"
EMULATION = "vLLM vllm/model_executor/layers/quantization/utils/nvfp4_emulation_utils.py"
CUDA = "vLLM csrc/libtorch_stable/quantization/fp4/nvfp4_utils.cuh"
MODELOPT = "ModelOpt modelopt/torch/quantization/qtensor/nvfp4_tensor.py"
COMPRESSED_TENSORS = "compressed-tensors quantization/utils/helpers.py"
BLOCKS = (NVFP4.weight_block, LINES.weight_block)


def _lines(name: str, source: str, quantize: Quantize) -> Implementation:
    return Implementation(name, source, quantize, BLOCKS[1:], format=NVFP4)


FORMULAS = (
    Implementation("Transformer Engine", TE, transformer_engine.nvfp4, BLOCKS, format=NVFP4),
    _lines("vLLM emulation", EMULATION, vllm_emulation),
    _lines("vLLM CUDA, 1/x 1 ulp up", CUDA, partial(_vllm, ulps=1)),
    _lines("vLLM CUDA, 1/x 1 ulp down", CUDA, partial(_vllm, ulps=-1)),
    _lines("ModelOpt", MODELOPT, modelopt),
    _lines("compressed-tensors", COMPRESSED_TENSORS, compressed_tensors),
)
"""vLLM's CUDA kernels take the processor's approximate reciprocal, which is off by at most 1 ulp."""
