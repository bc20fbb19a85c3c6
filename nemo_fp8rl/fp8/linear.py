"""An emulated blockwise FP8 linear layer: its three matmuls quantize their operands as Transformer Engine does.

    fprop   y  = Q[1x128](x)      @ Q[128x128](w)^T       blocks along K
    dgrad   dx = Q[1x128](dy)     @ Q[128x128](w)         blocks along N
    wgrad   dw = Q[128x1](dy)^T   @ Q[128x1](x)           blocks along the tokens, from the high-precision tensors

(TransformerEngine common/recipe/__init__.py, Float8BlockScaling: activations and gradients 1x128, weights 128x128.)
With pow2 scales an operand is exact in bfloat16, so the matmul is a plain bfloat16 one, the same in trainer and engine.
With fp32 scales, and on a CPU that is slow at bfloat16, the matmul runs in float32. The backend accumulates in float32,
in an order of its own.
"""

from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.fp8.format import ALONG_LAST, ALONG_TOKENS
from nemo_fp8rl.fp8.names import BLOCK, ScaleFormat
from nemo_fp8rl.fp8.quantize import fake_quantize


def operand_dtype(dtype: torch.dtype, scale_format: ScaleFormat) -> torch.dtype:
    """Return a dtype that holds a dequantized operand exactly and in which this machine multiplies fast."""
    exact = dtype is torch.bfloat16 and scale_format == "pow2"
    return torch.bfloat16 if exact and is_bf16_matmul_fast() else torch.float32


def is_bf16_matmul_fast() -> bool:
    """Return whether bfloat16 matmuls are fast: on a CPU without AVX-512 they take ten times as long as float32."""
    return torch.cuda.is_available() or torch.cpu._is_avx512_supported()


def fprop(x: Tensor, w_dequantized: Tensor, scale_format: ScaleFormat, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return y = Q(x) @ w^T, [..., N].

    x:             [..., K], in high precision
    w_dequantized: [N, K], the values of an FP8 weight
    out_dtype:     dtype of y, by default x's; float32 leaves the sums unrounded, for partial sums over K
    """
    x2 = x.reshape(-1, x.size(-1))
    xq = fake_quantize(x2, block=ALONG_LAST, scale_format=scale_format, dtype=w_dequantized.dtype)
    if out_dtype is torch.float32:
        xq, w_dequantized = xq.float(), w_dequantized.float()
    return (xq @ w_dequantized.t()).to(out_dtype or x.dtype).view(*x.shape[:-1], w_dequantized.size(0))


def blockwise_fp8_linear(
    x: Tensor, w: Tensor, scale_format: ScaleFormat, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return y = Q(x) @ Q(w)^T, [..., N], with gradients.

    x, w:      [..., K] and [N, K], in high precision
    out_dtype: see `fprop`
    """
    if torch.is_grad_enabled():
        return BlockwiseFp8Linear.apply(x, w, scale_format, out_dtype)
    return fprop(x, _quantize_dequantize_weight(x, w, scale_format), scale_format, out_dtype)


def _quantize_dequantize_weight(x: Tensor, w: Tensor, scale_format: ScaleFormat) -> Tensor:
    return fake_quantize(w, block=BLOCK, scale_format=scale_format, dtype=operand_dtype(x.dtype, scale_format))


class BlockwiseFp8Linear(torch.autograd.Function):
    """Compute apply(x [..., K], w [N, K], scale_format, out_dtype) -> [..., N]; gradients in the dtypes of x and w."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, scale_format: ScaleFormat, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        wq = _quantize_dequantize_weight(x, w, scale_format)
        if any(ctx.needs_input_grad):
            BlockwiseFp8Linear.keep_operands(ctx, x, w, wq, scale_format)
        return fprop(x, wq, scale_format, out_dtype)

    @staticmethod
    def keep_operands(ctx: Any, x: Tensor, w: Tensor, w_dequantized: Tensor, scale_format: ScaleFormat) -> None:
        """Keep what the backward multiplies."""
        x2 = x.reshape(-1, x.size(-1))
        xq = fake_quantize(x2, block=ALONG_TOKENS, scale_format=scale_format, dtype=w_dequantized.dtype)
        ctx.save_for_backward(xq, w_dequantized)
        ctx.scale_format, ctx.dtypes = scale_format, (x.dtype, w.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        xq, wq = ctx.saved_tensors
        dy = grads[0]
        dy2 = dy.reshape(-1, dy.size(-1))
        dy_rows = fake_quantize(dy2, block=ALONG_LAST, scale_format=ctx.scale_format, dtype=wq.dtype)
        dy_columns = fake_quantize(dy2, block=ALONG_TOKENS, scale_format=ctx.scale_format, dtype=wq.dtype)
        dx = (dy_rows @ wq).to(ctx.dtypes[0]).view(*dy.shape[:-1], wq.size(1))
        dw = (dy_columns.t() @ xq).to(ctx.dtypes[1])
        return dx, dw, None, None
