"""Layers of the trainer that compute by the operations of `ops`, as an aligned engine on a GPU does.

The residual stream has the layers' dtype: the sum x + residual is rounded once, and the norm reads the rounded sum.
"""

import functools
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_fp8rl.fp8 import BLOCK, ScaleFormat, quantize_blockwise
from nemo_fp8rl.fp8.linear import LinearRecipe, QuantizedLinear
from nemo_fp8rl.ops.activation import silu_mul
from nemo_fp8rl.ops.matmul import fp8_linear, linear
from nemo_fp8rl.ops.norm import rms_norm
from nemo_fp8rl.policy.layers.aligned_layers import norm_weight
from nemo_fp8rl.policy.layers.linears import CustomMatmul, Fp8MatmulLayer
from nemo_fp8rl.policy.layers.shared_ops.rank_sum import RankOrderSum


class SharedRMSNorm(torch.nn.Module):
    """RMSNorm over the last dimension, by `ops.norm`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = norm_weight(config, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class SharedSiluMul(torch.nn.Module):
    """Megatron's slot for an activation of gate and up, [..., 2 * I] -> [..., I] (`use_te_activation_func`)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)


class SharedMatmul(CustomMatmul):
    """The product of `ops.matmul`, with the bias before its one rounding."""

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        return linear(x, weight, bias)


class SharedFp8Matmul(Fp8MatmulLayer, CustomMatmul):
    """The FP8 product of `ops.matmul`; gradients are those of `fp8.linear`. A bias is added to the rounded product."""

    kernel_name = "ops.fp8_linear"
    scale_format: ScaleFormat

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        output = SharedFp8Linear.apply(x, weight, LinearRecipe(scale_format=self.scale_format))
        return output if bias is None else output + bias


class SharedFp8Linear(QuantizedLinear):
    """`QuantizedLinear` with the forward of `ops.matmul`: apply(x [..., K], w [N, K], recipe), in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, recipe: LinearRecipe) -> Tensor:  # type: ignore[override]
        scale_format = recipe.scale_format
        quantized = quantize_blockwise(w, block=BLOCK, scale_format=scale_format)
        if any(ctx.needs_input_grad):
            dequantized = quantized.dequantize(recipe.operand_dtype(x.dtype))
            QuantizedLinear.keep_operands(ctx, x, w, None, dequantized, recipe)
        return fp8_linear(x, quantized.data, quantized.scale_inv, scale_format == "pow2")


class SharedColumnParallelLinear(SharedMatmul, ColumnParallelLinear):
    pass


class SharedRowParallelLinear(RankOrderSum, SharedMatmul, RowParallelLinear):
    pass


def linears() -> tuple[type, type]:
    """Return the column- and row-parallel layers that multiply in the weights' precision."""
    return SharedColumnParallelLinear, SharedRowParallelLinear


@functools.cache
def fp8_linears(scale_format: ScaleFormat, mismatches: tuple[str, ...] = ()) -> tuple[type, type]:
    """Return the column- and row-parallel layers that multiply in FP8.

    mismatches:  matrices in which Transformer Engine has other bits, which is why these layers stand for its own
    """
    reason = f" (Transformer Engine has other bits in {', '.join(mismatches)})" if mismatches else ""
    attributes = {"scale_format": scale_format, "kernel_name": SharedFp8Matmul.kernel_name + reason}
    return (
        type("SharedFp8ColumnParallelLinear", (SharedFp8Matmul, ColumnParallelLinear), attributes),
        type("SharedFp8RowParallelLinear", (RankOrderSum, SharedFp8Matmul, RowParallelLinear), attributes),
    )
