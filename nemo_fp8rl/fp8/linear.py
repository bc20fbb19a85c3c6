"""An emulated linear layer in a quantized format: its three matmuls quantize their operands as Transformer Engine does.

The native backward of FP8 (TransformerEngine common/recipe/__init__.py, Float8BlockScaling), and likewise with the
blocks of MXFP8:

    fprop   y  = Q[1x128](x)      @ Q[128x128](w)^T       blocks along K
    dgrad   dx = Q[1x128](dy)     @ Q[128x128](w)         blocks along N
    wgrad   dw = Q[128x1](dy)^T   @ Q[128x1](x)           blocks along the tokens, from the high-precision tensors

That of NVFP4 (NVFP4BlockScaling, arXiv 2509.25149); H is the transform of `fp4_training.hadamard`, S rounds
stochastically:

    dgrad   dx = S[1x16](dy)      @ Q[16x16](w)
    wgrad   dw = S[1x16](H dy^T)  @ Q[1x16](H x^T)^T      blocks along the tokens, which are padded to 16 with zeros

Weights with blocks of one row are quantized again along N for dgrad. The other backwards are those of `Backward`.

With pow2 scales an operand is exact in bfloat16, so the matmul is a plain bfloat16 one, the same in trainer and engine.
With fp32 scales, and on a CPU that is slow at bfloat16, the matmul runs in float32. The backend accumulates in float32,
in an order of its own.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from nemo_fp8rl.fp8.block_scaled import BlockScaled
from nemo_fp8rl.fp8.formats import FP8, Format
from nemo_fp8rl.fp8.fp4_training.gradient_estimator import weight_slope
from nemo_fp8rl.fp8.fp4_training.hadamard import transform_tokens
from nemo_fp8rl.fp8.fp4_training.outliers import split_outliers
from nemo_fp8rl.fp8.fp4_training.random_bits import CallBits, LayerBits
from nemo_fp8rl.fp8.fp4_training.stochastic_rounding import fake_quantize_stochastically
from nemo_fp8rl.fp8.names import Backward, Block, Estimator, ScaleFormat
from nemo_fp8rl.fp8.quantize import encode_scale, fake_quantize, fake_quantize_tokens, largest_magnitude

DGRAD, WGRAD = range(2)
"""The uses of a gradient, which round it by different draws."""


@dataclass(frozen=True)
class LinearRecipe:
    """How a linear layer multiplies.

    backward:             see `Backward`; auto becomes the format's default
    hadamard:             the native backward in FP4 transforms the operands of a weight's gradient
    stochastic_rounding:  the native backward in FP4 rounds gradients stochastically
    estimator:            see `Estimator`; of formats in FP4
    clamp_quantile:       see `fp4_training.outliers`; None does not clamp
    Raises:               ValueError for a combination that the format does not have
    """

    format: Format = FP8
    scale_format: ScaleFormat = "pow2"
    backward: Backward | Literal["auto"] = "auto"
    hadamard: bool = False
    stochastic_rounding: bool = False
    estimator: Estimator = "straight_through"
    clamp_quantile: float | None = None

    def __post_init__(self) -> None:
        if self.backward == "auto":
            object.__setattr__(self, "backward", self.format.default_backward)
        for name, value, known in (("backward", self.backward, Backward), ("estimator", self.estimator, Estimator)):
            if value not in get_args(known):
                raise ValueError(f"there is no {name} {value!r}; there are {', '.join(get_args(known))}")
        if self.backward == "native" and not self.format.has_native_backward:
            raise ValueError(f"{self.format.name} has no native backward: its activations are not quantized")
        is_native_fp4 = self.backward == "native" and self.format.is_fp4
        if (self.hadamard or self.stochastic_rounding) and not is_native_fp4:
            raise ValueError(f"hadamard and stochastic_rounding are of native FP4, not of {self.backward} {self.name}")
        if self.estimator == "differentiable" and not self.format.is_fp4:
            raise ValueError(f"the differentiable estimator is of FP4, not of {self.name}")
        if self.clamp_quantile is not None and not (self.format.is_fp4 and self.format.token_block):
            raise ValueError(f"clamp_quantile is of activations in FP4, which {self.name} does not have")

    @property
    def name(self) -> str:
        return self.format.name

    def operand_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return a dtype that holds a dequantized operand exactly and in which this machine multiplies fast.

        dtype: of the activations
        """
        exact = dtype is torch.bfloat16 and self.format.is_exact_in_bf16(self.scale_format)
        return torch.bfloat16 if exact and self.clamp_quantile is None and is_bf16_matmul_fast() else torch.float32

    def weight_values(self, w: Tensor, dtype: torch.dtype, encode: Tensor | None = None) -> Tensor:
        """Return the values of the quantized weight [N, K] in `dtype`. encode: see `fake_quantize`."""
        return self._weight_values(w, self.format.weight_block, dtype, encode)

    def dgrad_weight(self, w: Tensor, w_dequantized: Tensor, encode: Tensor | None) -> Tensor:
        """Return the weight [N, K] that the native dgrad multiplies, which has blocks along N.

        w_dequantized: `weight_values` of w
        """
        if self.format.weight_block[0] > 1:
            return w_dequantized
        return self._weight_values(w, self.format.column_block, w_dequantized.dtype, encode)

    def token_values(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the activations [M, K] that the forward multiplies, in `dtype`; float32 where they are clamped."""
        if self.clamp_quantile is None:
            return fake_quantize_tokens(x, self.format, self.scale_format, dtype)
        clamped, rest = split_outliers(x.detach(), self.clamp_quantile)
        return fake_quantize_tokens(clamped, self.format, self.scale_format, torch.float32) + rest

    def line_operand(self, dy: Tensor, dtype: torch.dtype, bits: CallBits | None) -> Tensor:
        """Return the gradient [M, N] that the native dgrad multiplies."""
        return self._quantize(dy, self.format.line_block, dtype, bits, DGRAD)

    def column_operand(self, x: Tensor, dtype: torch.dtype, bits: CallBits | None = None) -> Tensor:
        """Return the operand [T, C] of the native wgrad, of x [M, C]; T is M or, transformed, a multiple of 16.

        bits: of a gradient that is rounded stochastically
        """
        if not self.hadamard:
            return self._quantize(x, self.format.column_block, dtype, bits, WGRAD)
        return self._quantize(transform_tokens(x), self.format.line_block, dtype, bits, WGRAD).t()

    def slope(self, w: Tensor, encode: Tensor | None) -> Tensor:
        """Return the estimated slope of the rounding of a weight [N, K], float32."""
        encode = encode_scale(largest_magnitude(w), self.scale_format) if encode is None else encode
        return weight_slope(w, self.format.weight_block, encode, self.scale_format == "pow2")

    def _weight_values(self, w: Tensor, block: Block, dtype: torch.dtype, encode: Tensor | None) -> Tensor:
        return fake_quantize(
            w,
            format=self.format,
            block=block,
            scale_format=self.scale_format,
            encode=encode,
            flush=self.scale_format == "pow2",
            dtype=dtype,
        )

    def _quantize(self, x: Tensor, block: Block, dtype: torch.dtype, bits: CallBits | None, use: int) -> Tensor:
        if bits is None or not x.numel():
            return fake_quantize(x, format=self.format, block=block, scale_format=self.scale_format, dtype=dtype)
        encode = encode_scale(largest_magnitude(x), self.scale_format)
        return fake_quantize_stochastically(x, block, encode, bits.draw(use, tuple(x.shape), x.device), dtype)


def is_bf16_matmul_fast() -> bool:
    """Return whether bfloat16 matmuls are fast: on a CPU without AVX-512 they take ten times as long as float32."""
    return torch.cuda.is_available() or torch.cpu._is_avx512_supported()


def is_matmul_fast(dtype: torch.dtype) -> bool:
    """Return True if matmuls in a dtype are at least as fast as in float32; those in float16 are on a GPU alone."""
    if dtype is torch.float16:
        return torch.cuda.is_available()
    return dtype is not torch.bfloat16 or is_bf16_matmul_fast()


def fprop(x: Tensor, w_dequantized: Tensor, recipe: LinearRecipe, out_dtype: torch.dtype | None = None) -> Tensor:
    """Return y = Q(x) @ w^T, [..., N].

    x:             [..., K], in high precision
    w_dequantized: [N, K], the values of a quantized weight
    out_dtype:     dtype of y, by default x's; float32 leaves the sums unrounded, for partial sums over K
    """
    xq = recipe.token_values(x.reshape(-1, x.size(-1)), w_dequantized.dtype)
    return _multiply(x, xq, w_dequantized, out_dtype)


def _multiply(x: Tensor, xq: Tensor, w_dequantized: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    if out_dtype is torch.float32:
        xq, w_dequantized = xq.float(), w_dequantized.float()
    return (xq @ w_dequantized.t()).to(out_dtype or x.dtype).view(*x.shape[:-1], w_dequantized.size(0))


def quantized_linear(
    x: Tensor,
    w: Tensor,
    recipe: LinearRecipe,
    out_dtype: torch.dtype | None = None,
    encode: Tensor | None = None,
    bits: LayerBits | None = None,
) -> Tensor:
    """Return y = Q(x) @ Q(w)^T, [..., N], with gradients.

    x, w:      [..., K] and [N, K], in high precision
    out_dtype: see `fprop`
    encode:    the factor of the weight's global scale, in a format that has one; see `quantize_blockwise`
    bits:      the layer's random bits, for a recipe that rounds stochastically
    """
    if torch.is_grad_enabled():
        return QuantizedLinear.apply(x, w, recipe, out_dtype, encode, bits)
    return fprop(x, recipe.weight_values(w, recipe.operand_dtype(x.dtype), encode), recipe, out_dtype)


class QuantizedLinear(torch.autograd.Function):
    """Compute apply(x [..., K], w [N, K], recipe, out_dtype, encode, bits) -> [..., N], as `quantized_linear`.

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
        bits: LayerBits | None = None,
    ) -> Tensor:
        if recipe.stochastic_rounding and bits is None and any(ctx.needs_input_grad):
            raise ValueError("stochastic rounding needs random bits of the layer")
        wq = recipe.weight_values(w, recipe.operand_dtype(x.dtype), encode)
        xq = recipe.token_values(x.reshape(-1, x.size(-1)), wq.dtype)
        if any(ctx.needs_input_grad):
            QuantizedLinear.keep_operands(ctx, x, w, xq, wq, recipe, encode, bits)
        return _multiply(x, xq, wq, out_dtype)

    @staticmethod
    def keep_operands(
        ctx: Any,
        x: Tensor,
        w: Tensor,
        x_quantized: Tensor | None,
        w_dequantized: Tensor,
        recipe: LinearRecipe,
        encode: Tensor | None = None,
        bits: LayerBits | None = None,
    ) -> None:
        """Keep what the backward multiplies.

        x_quantized: `recipe.token_values` of x; None if they have not been computed
        """
        x2, dtype = x.reshape(-1, x.size(-1)), w_dequantized.dtype
        if recipe.backward == "high_precision":
            operands = x2, w
        elif recipe.backward == "dequantized":
            operands = recipe.token_values(x2, dtype) if x_quantized is None else x_quantized, w_dequantized
        else:
            operands = recipe.column_operand(x2, dtype), recipe.dgrad_weight(w, w_dequantized, encode)
        estimated = (w, encode) if recipe.estimator == "differentiable" else (None, None)
        ctx.save_for_backward(*operands, *estimated)
        ctx.recipe, ctx.bits, ctx.dtypes = recipe, bits, (x.dtype, w.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w, estimated_weight, encode = ctx.saved_tensors
        recipe, dy = ctx.recipe, grads[0]
        dy2 = dy.reshape(-1, dy.size(-1))
        if recipe.backward == "native":
            bits = ctx.bits.start_call() if recipe.stochastic_rounding else None
            rows, columns = recipe.line_operand(dy2, w.dtype, bits), recipe.column_operand(dy2, w.dtype, bits)
        else:
            rows, columns = dy2.to(w.dtype), dy2.to(x.dtype)
        dx = (rows @ w).to(ctx.dtypes[0]).view(*dy.shape[:-1], w.size(1))
        dw = columns.t() @ x
        if estimated_weight is not None:
            dw = dw.float() * recipe.slope(estimated_weight, encode)
        return dx, dw.to(ctx.dtypes[1]), *(None for _ in ctx.needs_input_grad[2:])


def frozen_linear(
    x: Tensor,
    base: BlockScaled,
    recipe: LinearRecipe,
    out_dtype: torch.dtype | None = None,
    bits: LayerBits | None = None,
) -> Tensor:
    """Return y = Q(x) @ w^T, [..., N], with the gradient of x: the values of `quantized_linear` for w = Q(w).

    x:         [..., K], in high precision
    base:      the quantized weight [N, K], which is not trained
    out_dtype: see `fprop`
    bits:      see `quantized_linear`
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _FrozenLinear.apply(x, base, recipe, out_dtype, bits)
    return fprop(x, base.dequantize(recipe.operand_dtype(x.dtype)), recipe, out_dtype)


class _FrozenLinear(torch.autograd.Function):
    """Keep nothing for the backward but the weight's bytes, which are there anyway."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        base: BlockScaled,
        recipe: LinearRecipe,
        out_dtype: torch.dtype | None,
        bits: LayerBits | None,
    ) -> Tensor:
        ctx.base, ctx.recipe, ctx.bits, ctx.dtype = base, recipe, bits, x.dtype
        return fprop(x, base.dequantize(recipe.operand_dtype(x.dtype)), recipe, out_dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy, recipe = grads[0], ctx.recipe
        w, dy2 = ctx.base.dequantize(recipe.operand_dtype(ctx.dtype)), dy.reshape(-1, dy.size(-1))
        if recipe.backward == "native":
            bits = ctx.bits.start_call() if recipe.stochastic_rounding else None
            rows, w = recipe.line_operand(dy2, w.dtype, bits), recipe.dgrad_weight(w, w, None)
        else:
            rows = dy2.to(w.dtype)
        return (rows @ w).to(ctx.dtype).view(*dy.shape[:-1], w.size(1)), None, None, None, None
