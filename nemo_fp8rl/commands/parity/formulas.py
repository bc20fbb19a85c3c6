"""The published formulas of blockwise FP8, operation by operation, in float32: amax, scale rounding, product.

Each is written from the source that it names, for torch on a CPU, where division, reciprocal and product are IEEE
operations. The docstring of a formula says what a GPU computes differently. The functions that all formulas share are
at the end of the file.

    published for                 function
    weights                       transformer_engine.quantize, nemo_rl, verl_torch, verl_triton, deepgemm,
                                  infir2, vllm_requantization
    activations                   transformer_engine.quantize, deepgemm, vllm_cuda, vllm_triton, vllm_ue8m0, vllm_native

The table also applies the arithmetic of vLLM's activation kernels to 128x128 blocks, as a trainer would that quantizes
its weights like the engine's activations.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_fp8rl.commands.parity import transformer_engine
from nemo_fp8rl.commands.parity.implementation import Implementation, UnsupportedShapeError
from nemo_fp8rl.fp8 import BLOCK, Block, ScaleFormat
from nemo_fp8rl.fp8.block_scaled import ALONG_LAST, E4M3, E4M3_MAX, BlockScaled
from nemo_fp8rl.fp8.quantize import quantize_blockwise

VERL_EPS = VLLM_EPS = 1e-10
DEEPGEMM_EPS = 1e-4
VLLM_NATIVE_MIN_SCALE = 1 / (E4M3_MAX * 512)


def nemo_rl(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
    """NeMo RL, nemo_rl/models/generation/vllm/quantization/fp8.py, cast_tensor_to_fp8_blockwise.

    - Ragged edges are filled with the matrix's last element, which then contributes to the amax of every edge block.
    - fp32: 448 / amax with a Python number, which torch computes as the reciprocal times 448, with two roundings.
    - pow2: the exponent is ceil(log2(amax / 448)), stored as a uint8 of bias 127, where 0 stands for scale 1.
    """
    blocks = cut_into_blocks(x, block, fill=float(x[-1, -1]))
    amax = block_amax(blocks)
    if scale_format == "fp32":
        scale = amax.reciprocal() * E4M3_MAX
        scale = scale.masked_fill(amax == 0, 1.0)
    else:
        stored = (amax / E4M3_MAX).log2().ceil().clamp(-127, 127) + 127
        scale = torch.where(stored == 0, 1.0, (127 - stored).exp2())
    return _result((blocks * scale).clamp(-E4M3_MAX, E4M3_MAX), scale.reciprocal(), x, block)


def verl_torch(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
    """verl, verl/utils/kernel/fp8_kernel.py, _scaled_fp8_blockwise_pytorch: torch.div, a true division. fp32 only."""
    blocks = cut_into_blocks(x, block)
    amax = block_amax(blocks)
    scale = torch.div(E4M3_MAX, amax).masked_fill(amax == 0, 1.0)
    return _result((blocks * scale).clamp(-E4M3_MAX, E4M3_MAX), scale.reciprocal(), x, block)


def verl_triton(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
    """verl, verl/utils/kernel/fp8_kernel.py, _blockwise_cast_to_fp8_kernel, the default with Triton. fp32 only.

    It stores amax / 448, not the inverse of the multiplier: the former rounds once, the multiplier twice. On a GPU
    Triton's `/` is an approximate division, up to 2 ulp off, so real figures can be worse.
    """
    blocks = cut_into_blocks(x, block)
    scale_inv = block_amax(blocks).clamp(min=VERL_EPS) / E4M3_MAX
    return _result((blocks * (1.0 / scale_inv)).clamp(-E4M3_MAX, E4M3_MAX), scale_inv, x, block)


def deepgemm(x: Tensor, block: Block, scale_format: ScaleFormat, on_gpu: bool = False) -> BlockScaled:
    """DeepGEMM, deep_gemm/utils/math.py, per_block_cast_to_fp8 and per_token_cast_to_fp8.

    - amax is never below 1e-4, so blocks of very small weights use only the bottom of E4M3.
    - pow2: the exponent of amax / 448, plus one if any mantissa bit is set, within 1 ... 254.
    - There is no saturation before the cast; none is needed, as amax * (1 / scale_inv) rounds to at most 448.
    - on_gpu: torch on CUDA divides by a Python number by multiplying with its reciprocal
      (aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu), which in many cases gives another number.
    """
    blocks = cut_into_blocks(x, block)
    amax = block_amax(blocks).clamp(min=DEEPGEMM_EPS)
    scale_inv = amax * (1 / E4M3_MAX) if on_gpu else amax / E4M3_MAX
    if scale_format == "pow2":
        scale_inv = _next_power(scale_inv)
    return _result(blocks * (1.0 / scale_inv), scale_inv, x, block)


def deepgemm_on_gpu(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
    """Compute `deepgemm` as torch does on CUDA."""
    return deepgemm(x, block, scale_format, on_gpu=True)


def vllm_cuda(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
    """vLLM, csrc/libtorch_stable/quantization/w8a8/fp8/per_token_group_quant.cu, per_token_group_quant_8bit.

    Values are divided by the stored scale instead of multiplied by an inverse. pow2 goes through log2, ceil and exp2.
    """
    blocks = _vllm_groups(x, block)
    scale_inv = block_amax(blocks).clamp(min=VLLM_EPS) / E4M3_MAX
    if scale_format == "pow2":
        scale_inv = _ceil_log2(scale_inv.clamp(min=1e-10))
    return _result((blocks / scale_inv).clamp(-E4M3_MAX, E4M3_MAX), scale_inv, x, block)


def vllm_triton(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
    """vLLM, vllm/model_executor/layers/quantization/utils/fp8_utils.py, _per_token_group_quant_fp8.

    amax is multiplied by 1 / 448 as float32 has it; values are divided by the scale, on a GPU by Triton's approximate
    division. pow2 goes through log2, ceil and exp2.
    """
    blocks = _vllm_groups(x, block)
    scale_inv = block_amax(blocks).clamp(min=VLLM_EPS) * (1 / E4M3_MAX)
    if scale_format == "pow2":
        scale_inv = _ceil_log2(scale_inv)
    return _result((blocks / scale_inv).clamp(-E4M3_MAX, E4M3_MAX), scale_inv, x, block)


def vllm_ue8m0(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
    """vLLM, per_token_group_quant.cu, per_token_group_quant_8bit_packed_register_kernel. pow2 only.

    This is the quantizer in front of DeepGEMM on Blackwell, where scales are UE8M0 bytes. Of vLLM's UE8M0 paths only
    this one differs from `vllm_cuda`: the exponent comes from the bits, without a logarithm, and values are multiplied.
    `vllm_requantization` shows what vLLM does to weights for UE8M0.
    """
    blocks = _vllm_groups(x, block)
    scale_inv = _next_power((block_amax(blocks).clamp(min=VLLM_EPS) / E4M3_MAX).clamp(min=1e-10))
    return _result((blocks * (1.0 / scale_inv)).clamp(-E4M3_MAX, E4M3_MAX), scale_inv, x, block)


def vllm_native(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
    """vLLM, vllm/model_executor/layers/quantization/input_quant_fp8.py, QuantFP8._quantize_group_native.

    vLLM compiles this code into the graph if the custom op is switched off (`-quant_fp8`; it is on by default for block
    quantized models). The scale, not amax, has a floor, 1 / (448 * 512): groups with an amax below 1/512 differ, and
    with pow2 the floor itself is not a power of two.
    """
    blocks = cut_into_blocks(x, block)
    scale_inv = block_amax(blocks) / E4M3_MAX
    if scale_format == "pow2":
        scale_inv = _ceil_log2(scale_inv)
    scale_inv = scale_inv.clamp(min=VLLM_NATIVE_MIN_SCALE)
    return _result((blocks / scale_inv).clamp(-E4M3_MAX, E4M3_MAX), scale_inv, x, block)


def vllm_requantization(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
    """vLLM, fp8_utils.py, requant_weight_ue8m0_inplace: applied to weights that we quantized in `scale_format`.

    When DeepGEMM runs with UE8M0 scales (the default on Hopper and Blackwell), vLLM dequantizes the loaded weights and
    casts them again with pow2 scales, by DeepGEMM's formula with the exponent from ceil(log2).
    """
    loaded = quantize_blockwise(x, block=block, scale_format=scale_format).dequantize()
    blocks = cut_into_blocks(loaded, block)
    scale_inv = _ceil_log2(block_amax(blocks).clamp(min=DEEPGEMM_EPS) / E4M3_MAX)
    return _result(blocks * (1.0 / scale_inv), scale_inv, loaded, block)


def infir2(x: Tensor, block: Block, scale_format: ScaleFormat) -> BlockScaled:
    """InfiR2, tools/bf16_cast_fp8.py, _blockwise_cast_to_fp8_triton: the caster of its engine's weights.

    - amax is never below 1e-10. pow2 goes through log2, ceil and exp2.
    - Scales are saved in float16: those of fp32 lose bits, and a power of two below 2^-24 becomes 0.
    - Its option `--force-pow-2-scale False` still gives pow2: argparse's `type=bool` takes every text but "" as true.
      Its training script asks Transformer Engine for fp32 scales, so that trainer and engine would not agree.
    """
    blocks = cut_into_blocks(x, block)
    scale_inv = block_amax(blocks).clamp(min=VLLM_EPS) / E4M3_MAX
    if scale_format == "pow2":
        scale_inv = _ceil_log2(scale_inv)
    stored = scale_inv.half().float()
    return _result((blocks * (1.0 / scale_inv)).clamp(-E4M3_MAX, E4M3_MAX), stored, x, block)


def cut_into_blocks(x: Tensor, block: Block, fill: float = 0.0) -> Tensor:
    """Return x [N, K] as float32 [N/b0, b0, K/b1, b1], with incomplete blocks filled with `fill`."""
    (n, k), (b0, b1) = x.shape, block
    padded = F.pad(x.float(), (0, -k % b1, 0, -n % b0), value=fill)
    return padded.view(padded.size(0) // b0, b0, padded.size(1) // b1, b1)


def _vllm_groups(x: Tensor, block: Block) -> Tensor:
    """Return `cut_into_blocks`, for kernels that refuse activation rows of incomplete groups."""
    return cut_whole_blocks(x, block) if block == ALONG_LAST else cut_into_blocks(x, block)


def cut_whole_blocks(x: Tensor, block: Block) -> Tensor:
    """Return `cut_into_blocks`. Raises UnsupportedShapeError if a row is not made of whole blocks."""
    check_whole_blocks(x, block)
    return cut_into_blocks(x, block)


def check_whole_blocks(x: Tensor, block: Block) -> None:
    """Raise UnsupportedShapeError if a row is not made of whole blocks."""
    if x.size(1) % block[1]:
        raise UnsupportedShapeError(f"a row of {x.size(1)} values is not made of whole groups of {block[1]}")


def block_amax(blocks: Tensor) -> Tensor:
    """Return the largest magnitude of each block, [N/b0, 1, K/b1, 1]."""
    return blocks.abs().amax((1, 3), keepdim=True)


def _next_power(v: Tensor) -> Tensor:
    """Return the smallest power of two that is not below v, from v's bits; at least 2^-126, at most 2^127."""
    bits = v.view(torch.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF != 0)
    return (exponent.clamp(1, 254) << 23).view(torch.float32)


def _ceil_log2(v: Tensor) -> Tensor:
    """Return the same by logarithm; half of it if log2 rounds to an integer, for v just above a power of two."""
    return v.log2().ceil().exp2()


def _result(scaled: Tensor, scale_inv: Tensor, x: Tensor, block: Block) -> BlockScaled:
    """Round `scaled` [N/b0, b0, K/b1, b1] to E4M3 and cut the padding off; scale_inv [N/b0, 1, K/b1, 1]."""
    a, b0, c, b1 = scaled.shape
    data = scaled.to(E4M3).view(a * b0, c * b1)[: x.size(0), : x.size(1)].contiguous()
    return BlockScaled(data, scale_inv[:, 0, :, 0].contiguous(), block)


GROUP_QUANT = "vLLM csrc/libtorch_stable/quantization/w8a8/fp8/per_token_group_quant.cu"
FP8_UTILS = "vLLM vllm/model_executor/layers/quantization/utils/fp8_utils.py"
INPUT_QUANT = "vLLM vllm/model_executor/layers/quantization/input_quant_fp8.py"
VERL = "verl verl/utils/kernel/fp8_kernel.py"
DEEPGEMM = "DeepGEMM deep_gemm/utils/math.py"
TE = "TransformerEngine transformer_engine/common/recipe/recipe_common.cuh"
INFIR2 = "InfiR2 tools/bf16_cast_fp8.py"
NEMO_RL = "NeMo RL nemo_rl/models/generation/vllm/quantization/fp8.py"

FORMULAS = (
    Implementation("Transformer Engine", TE, transformer_engine.quantize),
    Implementation("NeMo RL", NEMO_RL, nemo_rl, (BLOCK,)),
    Implementation("verl torch", VERL, verl_torch, (BLOCK,), ("fp32",)),
    Implementation("verl Triton", VERL, verl_triton, (BLOCK,), ("fp32",)),
    Implementation("DeepGEMM, on CPU", DEEPGEMM, deepgemm),
    Implementation("DeepGEMM, on CUDA", DEEPGEMM, deepgemm_on_gpu),
    Implementation("vLLM CUDA", GROUP_QUANT, vllm_cuda),
    Implementation("vLLM Triton", FP8_UTILS, vllm_triton),
    Implementation("vLLM UE8M0", GROUP_QUANT, vllm_ue8m0, formats=("pow2",)),
    Implementation("vLLM native", INPUT_QUANT, vllm_native, (ALONG_LAST,)),
    Implementation("InfiR2", INFIR2, infir2, (BLOCK,)),
    Implementation("vLLM requantizing ours", FP8_UTILS, vllm_requantization, (BLOCK,)),
)
