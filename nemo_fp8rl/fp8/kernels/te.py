"""Transformer Engine's own quantizer as a kernel: to check the contract against it, not for speed.

Source (2.3 to 2.18): common/transpose/quantize_transpose_{square,vector}_blockwise.cu for the values, and
tensor/float8_blockwise_tensor.py for the layouts, which its GEMMs need. For a matrix [N, K]:

128x128   data [N, K]                scales [ceil(N/128), ceil(K/128) rounded up to a multiple of 4]
1x128     data [N, K]                scales [ceil(K/128), N rounded up]: transposed
128x1     data [K, N]: transposed    scales [ceil(N/128), K rounded up]

Rounding up adds padding of any value. Transformer Engine accepts every [N, K] of bf16, fp16 or fp32; experts are
quantized one by one. It ignores NaN and infinity: fmaxf drops a NaN, and a block with infinity gets scale 1. So this
module searches for them.
"""

import torch
import transformer_engine.pytorch  # noqa: F401  loads the libraries that transformer_engine_torch needs
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

from nemo_fp8rl.fp8.block_scaled import ALONG_LAST, ALONG_TOKENS
from nemo_fp8rl.fp8.gpu_support import BLACKWELL
from nemo_fp8rl.fp8.kernels.compare_bytes import make_quantize_delta
from nemo_fp8rl.fp8.kernels.matrices import Stack, as_tensor
from nemo_fp8rl.fp8.kernels.reference import to_blocks
from nemo_fp8rl.fp8.names import BLOCK, Block, ScaleRule

MAX_ROWS = 128 * 65535
"""Most rows of a matrix: each 128 rows are a step in the second dimension of Transformer Engine's grid."""


def quantize(x: Stack, block: Block, rule: ScaleRule, data: Tensor, scale_inv: Tensor) -> None:
    """Quantize x; see `Kernel`.

    Raises: ValueError for a block, shape or scale format that Transformer Engine does not support
    """
    _refuse_unsupported(x, block, rule)
    if x.numel() == 0:
        return
    quantizer = Float8BlockQuantizer(
        fp8_dtype=tex.DType.kFloat8E4M3,
        rowwise=True,  # with 128x1 as well: versions up to 2.7 refuse columns alone
        columnwise=block == ALONG_TOKENS,
        amax_epsilon=0.0,
        force_pow_2_scales=rule == "pow2",
        block_scaling_dim=2 if block == BLOCK else 1,
    )
    with torch.cuda.device_of(x):
        for matrix, codes, scales in zip(x, data.view(torch.uint8), scale_inv, strict=True):
            quantized = quantizer(matrix.contiguous())
            if block == ALONG_TOKENS:
                codes.copy_(quantized._columnwise_data.t())
                scales.copy_(quantized._columnwise_scale_inv[:, : scales.size(1)])
            elif block == ALONG_LAST:
                codes.copy_(quantized._rowwise_data)
                scales.copy_(quantized._rowwise_scale_inv[:, : scales.size(0)].t())
            else:
                codes.copy_(quantized._rowwise_data)
                scales.copy_(quantized._rowwise_scale_inv[:, : scales.size(1)])
    scale_inv.masked_fill_(~to_blocks(as_tensor(x), block).isfinite().all(4).all(2), torch.nan)


quantize_delta = make_quantize_delta(quantize)


def _refuse_unsupported(x: Stack, block: Block, rule: ScaleRule) -> None:
    if rule == "e8m0":
        raise ValueError("the te kernel quantizes to blockwise FP8 alone; take reference, cpu or triton for MXFP8")
    if block not in (BLOCK, ALONG_LAST, ALONG_TOKENS):
        raise ValueError(f"Transformer Engine quantizes in blocks of 128x128, 1x128 and 128x1, not of {block}")
    if x.size(1) > MAX_ROWS:
        raise ValueError(f"Transformer Engine quantizes matrices of up to {MAX_ROWS} rows, not of {x.size(1)}")
    if rule == "fp32" and torch.cuda.get_device_capability(x.device) >= BLACKWELL:
        raise ValueError("Transformer Engine has no fp32 scales on Blackwell, where it emulates blocks with MXFP8's")
