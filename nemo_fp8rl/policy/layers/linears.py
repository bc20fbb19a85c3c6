"""Megatron's parallel linear layers with another matmul.

Megatron's layer specs hold classes and not instances, so each choice of a matmul is a class here.
"""

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

from nemo_fp8rl.fp8 import BlockScaled, LinearRecipe, quantize_blockwise, quantized_linear
from nemo_fp8rl.fp8.fp4_training.random_bits import GradientBits, LayerBits
from nemo_fp8rl.fp8.linear import frozen_linear, is_matmul_fast
from nemo_fp8rl.policy.weights.hf_names import parameters_by_hf_name
from nemo_fp8rl.policy.weights.layout import EXPERT, Layout


class Fp8MatmulLayer:
    """Marks a layer that multiplies in FP8, so that `build_model` can count them; a layer of many experts counts once.

    kernel_name:  the name of the kernel that multiplies
    """

    kernel_name: str


class CustomMatmul:
    """A mixin that replaces the matmul of a Megatron linear layer, and nothing else."""

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """Multiply: x [..., K], weight [N, K], bias [N] or None, in the activations' dtype -> [..., N] in out_dtype."""
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


class QuantizedMatmul(Fp8MatmulLayer, CustomMatmul):
    """The matmul of `fp8.linear`; it adds a bias to the rounded product, as the engine's linear does.

    weight_encode:  float32 [], the factor of the weight's global scale, in a format that has one (`GlobalScales`)
    gradient_bits:  for a recipe that rounds gradients stochastically (`give_gradient_bits`)
    base:           the quantized weight of a layer whose weight is frozen (`freeze`); `weight` is then empty
    """

    kernel_name = "fp8.linear (emulated)"
    recipe: LinearRecipe
    weight_encode: Tensor | None
    gradient_bits: LayerBits | None = None
    base: BlockScaled | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        encode = torch.ones((), dtype=torch.float32) if self.recipe.format.has_global else None
        self.register_buffer("weight_encode", encode, persistent=False)  # type: ignore[attr-defined]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Leave the factor in float32 where Megatron casts the whole model; it is 1 until then."""
        super()._apply(*args, **kwargs)  # type: ignore[misc]
        if self.weight_encode is not None:
            self.weight_encode = self.weight_encode.float()
        return self

    @torch.no_grad()
    def freeze(self) -> None:
        """Keep the quantized weight alone; nothing trains it."""
        weight: torch.nn.Parameter = self.weight  # type: ignore[attr-defined]
        format, scale_format = self.recipe.format, self.recipe.scale_format
        self.base = quantize_blockwise(weight, format=format, scale_format=scale_format, encode=self.weight_encode)
        weight.data = weight.data.new_empty(0)

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        if self.base is not None:
            output = frozen_linear(x, self.base, self.recipe, out_dtype, self.gradient_bits)
        else:
            output = quantized_linear(x, weight, self.recipe, out_dtype, self.weight_encode, self.gradient_bits)
        return output if bias is None else output + bias


def freeze_base(model: torch.nn.Module) -> None:
    """Keep the weights of quantized layers in their format alone."""
    for layer in model.modules():
        if isinstance(layer, QuantizedMatmul):
            layer.freeze()


def give_gradient_bits(model: torch.nn.Module, layout: Layout, trainer: GradientBits) -> None:
    """Give random bits to the layers of a rank that round gradients stochastically.

    Ranks with other tokens, and those that split the rows of a matrix and so have other columns of its output, draw
    bits of their own. Ranks that split its columns have the same gradient of the output, and round it alike.
    """
    modules = dict(model.named_modules())
    for hf_name, name in parameters_by_hf_name(layout, model).items():
        layer = modules[name.rpartition(".")[0]]
        if not (isinstance(layer, QuantizedMatmul) and layer.recipe.stochastic_rounding) or layer.gradient_bits:
            continue
        tokens = (layout.expert_data,) if EXPERT.search(hf_name) else (layout.data, layout.context)
        split = (layout.sharing_axis(hf_name),) if isinstance(layer, ColumnParallelLinear) else ()
        ranks = [axis.rank for axis in (*tokens, *split)]
        layer.gradient_bits = LayerBits(trainer, " ".join([hf_name, *map(str, ranks)]))


class FusedBiasMatmul(CustomMatmul):
    """torch's linear, which adds the bias before its single rounding, as vLLM's CPU linear does."""

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        x, weight = x.to(out_dtype), weight.to(out_dtype)
        if is_matmul_fast(out_dtype):
            return F.linear(x, weight, bias)
        return Float32Backward.apply(x, weight, bias)


class Float32Backward(torch.autograd.Function):
    """torch's linear in 16 bits, as the engine's, with gradients that are multiplied in float32 and then rounded.

    It is for CPUs with slow matmuls of that dtype, on which gradients would take longer than everything else.

    apply(x [..., K], weight [N, K], bias [N] or None) -> [..., N]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dy = grads[0].float()
        rows, dw, db = dy.reshape(-1, dy.size(-1)), None, None
        if ctx.needs_input_grad[1]:
            dw = (rows.t() @ x.reshape(-1, x.size(-1)).float()).to(weight.dtype)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            db = rows.sum(0).to(x.dtype)
        return (dy @ weight.float()).to(x.dtype), dw, db


class QkvByKind:
    """A mixin of `linear_qkv` whose rows are all queries, then all keys, then all values (`Layout.qkv_by_kind`).

    forward: x [T, B, H] -> ([T, B, rows], bias) in Megatron's order: for each key-value group its queries, key, value.
    """

    config: TransformerConfig

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(x)  # type: ignore[misc]
        groups = self.config.num_query_groups // self.config.tensor_model_parallel_size
        keys = groups * self.config.kv_channels
        by_kind = output.split([output.size(-1) - 2 * keys, keys, keys], -1)
        return torch.cat([part.unflatten(-1, (groups, -1)) for part in by_kind], -1).flatten(-2), bias


@functools.cache
def make_qkv_by_kind(linear: type) -> type:
    return type(f"{linear.__name__}ByKind", (QkvByKind, linear), {})


class SingleRounding:
    """A mixin of a row-parallel layer: ranks sum float32 products and round the sum once, as a single rank does.

    Megatron rounds each rank's product before the sum. The products of an expert's parts stay in float32, because
    `aligned_experts` sums them.
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
def quantized_linears(recipe: LinearRecipe, aligned: bool) -> tuple[type, type]:
    """Return the column- and row-parallel layers that multiply as the recipe says."""
    attributes = {"recipe": recipe}
    row = (SingleRounding,) if aligned else ()
    return (
        type("QuantizedColumnParallelLinear", (QuantizedMatmul, ColumnParallelLinear), attributes),
        type("QuantizedRowParallelLinear", (*row, QuantizedMatmul, RowParallelLinear), attributes),
    )


class AlignedColumnParallelLinear(FusedBiasMatmul, ColumnParallelLinear):
    pass


class AlignedRowParallelLinear(SingleRounding, FusedBiasMatmul, RowParallelLinear):
    pass


def bf16_linears(aligned: bool) -> tuple[type, type]:
    """Return the column- and row-parallel layers that multiply in the weights' precision."""
    aligned_layers = AlignedColumnParallelLinear, AlignedRowParallelLinear
    return aligned_layers if aligned else (ColumnParallelLinear, RowParallelLinear)
