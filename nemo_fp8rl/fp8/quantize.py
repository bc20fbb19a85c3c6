"""The quantizer that everything calls: checks the input, runs the kernel."""

import torch
from torch import Tensor

from nemo_fp8rl.fp8.format import BLOCK, BlockScaled, NonFiniteError, ScaleFormat
from nemo_fp8rl.fp8.kernels import emulate, reference


def quantize_blockwise(x: Tensor, *, block: tuple[int, int] = BLOCK, scale_format: ScaleFormat = "pow2") -> BlockScaled:
    """Quantize x [N, K] (bf16, fp16 or fp32; any strides) to E4M3 with one scale a block.

    Raises NonFiniteError with the count and the place of the first value when x holds NaN or infinity: such a weight
    must not be shipped (Transformer Engine would drop the NaN silently).
    """
    if x.dim() != 2:
        raise ValueError(f"quantize_blockwise takes a matrix, got shape {tuple(x.shape)}; reshape it to [N, K]")
    if not torch.isfinite(x).all():
        bad = (~torch.isfinite(x)).nonzero()
        raise NonFiniteError(f"{len(bad)} of {x.numel()} values are not finite, the first at {bad[0].tolist()}")
    data, scale_inv = reference.quantize(x, block, scale_format)
    return BlockScaled(data, scale_inv, block)


def fake_quantize(
    x: Tensor, *, block: tuple[int, int], scale_format: ScaleFormat = "pow2", dtype: torch.dtype | None = None
) -> Tensor:
    """`quantize_blockwise(x).dequantize(dtype)` in one fast pass; dtype defaults to x's. Non-finite values stay so."""
    return emulate.quantize_dequantize(x, block, scale_format, dtype or x.dtype)
