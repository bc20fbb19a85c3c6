"""Megatron's parallel linear layers with another matmul. A spec holds classes, so the choice is made in a class."""

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_fp8rl.fp8 import ScaleFormat, blockwise_fp8_linear
from nemo_fp8rl.fp8.linear import is_bf16_matmul_fast


class MultipliesInFp8:
    """Marks such a layer: `build_model` counts them. One whose experts are together counts once.

    kernel_name: of what multiplies.
    """

    kernel_name: str


class OwnMatmul:
    """Mixed into a Megatron linear layer: replaces its matmul, and nothing else of it."""

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """x [..., K], weight [N, K], bias [N], all in the activations' dtype -> [..., N] in out_dtype."""
        raise NotImplementedError

    def out_dtype(self, x: Tensor) -> torch.dtype:
        return x.dtype

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        **_: Any,
    ) -> Tensor:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        return self.matmul(input, weight, bias, self.out_dtype(input))


class Fp8Forward(MultipliesInFp8, OwnMatmul):
    """The contract's FP8 matmul; a bias is added to the rounded product, as the engine's linear does."""

    kernel_name = "fp8.linear (emulated)"
    scale_format: ScaleFormat

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        output = blockwise_fp8_linear(x, weight, self.scale_format, out_dtype)
        return output if bias is None else output + bias


class FusedBias(OwnMatmul):
    """torch's own linear, which adds the bias before the one rounding, as vLLM's CPU linear does."""

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        x, weight = x.to(out_dtype), weight.to(out_dtype)
        if out_dtype is torch.float32 or is_bf16_matmul_fast():
            return F.linear(x, weight, bias)
        return Float32Backward.apply(x, weight, bias)


class Float32Backward(torch.autograd.Function):
    """apply(x [..., K], weight [N, K], bias [N] or None) -> [..., N]: torch's linear in bfloat16, as the engine's, with
    gradients multiplied in float32 and then rounded, for a CPU on which they would take longer than all the rest.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        dy = grads[0].float()
        rows = dy.reshape(-1, dy.size(-1))
        dw = rows.t() @ x.reshape(-1, x.size(-1)).float()
        db = rows.sum(0).to(x.dtype) if ctx.has_bias else None
        return (dy @ weight.float()).to(x.dtype), dw.to(weight.dtype), db


class QkvByKind:
    """Mixed into `linear_qkv` where its rows are all queries, then all keys, then all values (`Layout.qkv_by_kind`).

    x [T, B, H] -> ([T, B, rows], bias): Megatron's order, each key-value group's queries, key and value.
    """

    config: TransformerConfig

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(x)  # type: ignore[misc]
        groups = self.config.num_query_groups // self.config.tensor_model_parallel_size
        keys = groups * self.config.kv_channels
        by_kind = output.split([output.size(-1) - 2 * keys, keys, keys], -1)
        return torch.cat([part.unflatten(-1, (groups, -1)) for part in by_kind], -1).flatten(-2), bias


@functools.cache
def qkv_by_kind(linear: type) -> type:
    return type(f"{linear.__name__}ByKind", (QkvByKind, linear), {})


class RoundedOnce:
    """Mixed into a row-parallel layer: ranks add up float32 products and round the sum, as one rank would.

    Megatron rounds each rank's product before the sum. Products of one expert's parts stay in float32: `align_moe` adds
    them up.
    """

    input_size: int
    input_size_per_partition: int
    explicit_expert_comm: bool

    @property
    def is_part(self) -> bool:
        return self.input_size_per_partition < self.input_size

    def out_dtype(self, x: Tensor) -> torch.dtype:
        return torch.float32 if self.is_part else x.dtype

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)  # type: ignore[misc]
        return output if self.explicit_expert_comm else output.to(input_.dtype), bias


@functools.cache
def fp8_linears(scale_format: ScaleFormat, aligned: bool) -> tuple[type, type]:
    """Column- and row-parallel layers that multiply in FP8."""
    chosen = {"scale_format": scale_format}
    row = (RoundedOnce,) if aligned else ()
    return (
        type("Fp8ColumnParallelLinear", (Fp8Forward, ColumnParallelLinear), chosen),
        type("Fp8RowParallelLinear", (*row, Fp8Forward, RowParallelLinear), chosen),
    )


class AlignedColumnParallelLinear(FusedBias, ColumnParallelLinear):
    pass


class AlignedRowParallelLinear(RoundedOnce, FusedBias, RowParallelLinear):
    pass


def bf16_linears(aligned: bool) -> tuple[type, type]:
    """The same in the weights' own precision."""
    ours = AlignedColumnParallelLinear, AlignedRowParallelLinear
    return ours if aligned else (ColumnParallelLinear, RowParallelLinear)
