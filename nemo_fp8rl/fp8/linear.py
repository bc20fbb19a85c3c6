"""An emulated linear layer in a quantized format: its three matmuls quantize their operands as Transformer Engine does.

For FP8 (TransformerEngine common/recipe/__init__.py, Float8BlockScaling), and likewise with the blocks of MXFP8:

    fprop   y  = Q[1x128](x)      @ Q[128x128](w)^T       blocks along K
    dgrad   dx = Q[1x128](dy)     @ Q[128x128](w)         blocks along N
    wgrad   dw = Q[128x1](dy)^T   @ Q[128x1](x)           blocks along the tokens, from the high-precision tensors

With pow2 scales an operand is exact in bfloat16, so the matmul is a plain bfloat16 one, the same in trainer and engine.
With fp32 scales, and on a CPU that is slow at bfloat16, the matmul runs in float32. The backend accumulates in float32,
in an order of its own.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from nemo_fp8rl.fp8.formats import FP8, Format
from nemo_fp8rl.fp8.names import ScaleFormat
from nemo_fp8rl.fp8.quantize import fake_quantize, fake_quantize_tokens

Backward = Literal["native", "dequantized", "high_precision"]
"""What the gradients' matmuls multiply: operands quantized for them; the forward's, with gradients in high precision;
or everything in high precision."""


@dataclass(frozen=True)
class LinearRecipe:
    """How a linear layer multiplies.

    backward: see `Backward`
    """

    format: Format = FP8
    scale_format: ScaleFormat = "pow2"
    backward: Backward = "native"

    def __post_init__(self) -> None:
        if self.backward not in get_args(Backward):
            raise ValueError(f"there is no backward {self.backward!r}; there are {', '.join(get_args(Backward))}")

    def operand_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return a dtype that holds a dequantized operand exactly and in which this machine multiplies fast.

        dtype: of the activations
        """
        exact = dtype is torch.bfloat16 and self.format.is_exact_in_bf16(self.scale_format)
        return torch.bfloat16 if exact and is_bf16_matmul_fast() else torch.float32

    def weight_values(self, w: Tensor, dtype: torch.dtype, encode: Tensor | None = None) -> Tensor:
        """Return the values of the quantized weight [N, K] in `dtype`. encode: see `fake_quantize`."""
        return fake_quantize(
            w,
            format=self.format,
            block=self.format.weight_block,
            scale_format=self.scale_format,
            encode=encode,
            flush=self.scale_format == "pow2",
            dtype=dtype,
        )


def is_bf16_matmul_fast() -> bool:
    """Return whether bfloat16 matmuls are fast: on a CPU without AVX-512 they take ten times as long as float32."""
    return torch.cuda.is_available() or torch.cpu._is_avx512_supported()


def fprop(x: Tensor, w_dequantized: Tensor, recipe: LinearRecipe, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return y = Q(x) @ w^T, [..., N].

    x:             [..., K], in high precision
    w_dequantized: [N, K], the values of a quantized weight
    out_dtype:     dtype of y, by default x's; float32 leaves the sums unrounded, for partial sums over K
    """
    x2 = x.reshape(-1, x.size(-1))
    xq = fake_quantize_tokens(x2, recipe.format, recipe.scale_format, w_dequantized.dtype)
    if out_dtype is torch.float32:
        xq, w_dequantized = xq.float(), w_dequantized.float()
    return (xq @ w_dequantized.t()).to(out_dtype or x.dtype).view(*x.shape[:-1], w_dequantized.size(0))


def quantized_linear(
    x: Tensor, w: Tensor, recipe: LinearRecipe, out_dtype: torch.dtype | None = None, encode: Tensor | None = None
) -> Tensor:
    """Return y = Q(x) @ Q(w)^T, [..., N], with gradients.

    x, w:      [..., K] and [N, K], in high precision
    out_dtype: see `fprop`
    encode:    the factor of the weight's global scale, in a format that has one; see `quantize_blockwise`
    """
    if torch.is_grad_enabled():
        return QuantizedLinear.apply(x, w, recipe, out_dtype, encode)
    return fprop(x, recipe.weight_values(w, recipe.operand_dtype(x.dtype), encode), recipe, out_dtype)


class QuantizedLinear(torch.autograd.Function):
    """Compute apply(x [..., K], w [N, K], recipe, out_dtype, encode) -> [..., N], as `quantized_linear`.

    Gradients have the dtypes of x and w.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        recipe: LinearRecipe,
        out_dtype: torch.dtype | None = None,
        encode: Tensor | None = None,
    ) -> Tensor:
        wq = recipe.weight_values(w, recipe.operand_dtype(x.dtype), encode)
        if any(ctx.needs_input_grad):
            QuantizedLinear.keep_operands(ctx, x, w, wq, recipe)
        return fprop(x, wq, recipe, out_dtype)

    @staticmethod
    def keep_operands(ctx: Any, x: Tensor, w: Tensor, w_dequantized: Tensor, recipe: LinearRecipe) -> None:
        """Keep what the backward multiplies."""
        x2 = x.reshape(-1, x.size(-1))
        if recipe.backward == "high_precision":
            operands = x2, w
        elif recipe.backward == "dequantized":
            operands = fake_quantize_tokens(x2, recipe.format, recipe.scale_format, w_dequantized.dtype), w_dequantized
        else:
            operands = _gradient_operand(x2, recipe.format.column_block, recipe, w_dequantized.dtype), w_dequantized
        ctx.save_for_backward(*operands)
        ctx.recipe, ctx.dtypes = recipe, (x.dtype, w.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, w = ctx.saved_tensors
        recipe, dy = ctx.recipe, grads[0]
        dy2 = dy.reshape(-1, dy.size(-1))
        if recipe.backward == "native":
            rows = _gradient_operand(dy2, recipe.format.line_block, recipe, w.dtype)
            columns = _gradient_operand(dy2, recipe.format.column_block, recipe, w.dtype)
        else:
            rows, columns = dy2.to(w.dtype), dy2.to(x.dtype)
        dx = (rows @ w).to(ctx.dtypes[0]).view(*dy.shape[:-1], w.size(1))
        dw = (columns.t() @ x).to(ctx.dtypes[1])
        return dx, dw, None, None, None


def _gradient_operand(x: Tensor, block: tuple[int, int], recipe: LinearRecipe, dtype: torch.dtype) -> Tensor:
    return fake_quantize(x, format=recipe.format, block=block, scale_format=recipe.scale_format, dtype=dtype)
