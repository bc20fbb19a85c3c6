"""Linear layers of Transformer Engine, for a policy on CUDA.

They are Megatron's wrappers with three changes:
- A layer enters the FP8 context itself, so that `fp8.layers` alone decides which layers do, as for the engine.
- Tokens are padded with zeros to a number that FP8 GEMMs take. A scale of activations or gradients covers 128 values of
  one token, or one column of 128 tokens, and zeros raise no maximum. (Under sequence parallelism the pipeline pads with
  tokens that are computed, and these do enter the scales of columns.)
- A bias is added to the rounded product, as the engine's FP8 linear adds it.

`fp8.linear` emulates these layers on a CPU. `tests/transformer_engine` compares the two, with Transformer Engine's
kernels replaced by those of `fp8`.
"""

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import transformer_engine
import transformer_engine.pytorch as te
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelGroupedLinear,
    TEColumnParallelLinear,
    TERowParallelGroupedLinear,
    TERowParallelLinear,
)
from packaging.version import Version
from torch import Tensor
from transformer_engine.common.recipe import Float8BlockScaling, Format, QParams

from nemo_fp8rl.fp8 import FP8_TOKENS, ScaleFormat
from nemo_fp8rl.fp8.gpu_support import BLACKWELL
from nemo_fp8rl.policy.layers.linears import Fp8MatmulLayer

HOST_COUNTS_VERSION = Version("2.15")
"""The first Transformer Engine whose permutation takes token counts from the host."""


@contextmanager
def _weight_options(layer: Any, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the options with which to build the layer inside the block, so that its weights are FP8 if `fp8_param`."""
    if not layer.fp8_param:
        yield options
        return
    on_gpu = copy.copy(options["config"])
    on_gpu.use_cpu_initialization = False  # only a GPU can quantize them; `load_hf` sets their values
    with te.quantized_model_init(recipe=layer.recipe, preserve_high_precision_init_val=True):
        yield {**options, "config": on_gpu, "init_method": torch.nn.init.zeros_}


def block_scaling(scale_format: ScaleFormat) -> Float8BlockScaling:
    """Return the recipe: E4M3 for activations, weights and gradients, 1x128 and 128x128, no floor under maxima."""
    rule = QParams(power_2_scale=scale_format == "pow2", amax_epsilon=0.0)
    recipe = Float8BlockScaling(fp8_format=Format.E4M3)
    recipe.fp8_quant_fwd_inp = recipe.fp8_quant_fwd_weight = recipe.fp8_quant_bwd_grad = rule
    return recipe


def why_no_fp8(scale_format: ScaleFormat) -> str:
    """Return why this GPU and CUDA have no FP8 block scaling; "" if they have it."""
    available, reason = te.is_fp8_block_scaling_available(return_reason=True)
    if available and scale_format == "fp32" and torch.cuda.get_device_capability() >= BLACKWELL:
        return "on Blackwell it emulates these blocks with MXFP8, whose scales are powers of two"
    return "" if available else reason


def backward_override() -> str | None:
    """Return the value of NVTE_BACKWARD_OVERRIDE, which replaces every recipe's backward; None if it is not set.

    Transformer Engine 2.15 and later read the variable at import (common/recipe/__init__.py).
    """
    return getattr(Float8BlockScaling, "backward_override", None)


def why_no_allgather() -> str:
    """Return why Megatron's "allgather" dispatcher cannot use Transformer Engine's permutation; "" if it can.

    The dispatcher has the token counts on the host (token_dispatcher.py), and Triton refuses a tensor of the host.
    pytorch/triton/permutation.py converts it to a number from 2.15 on.
    """
    if Version(transformer_engine.__version__) >= HOST_COUNTS_VERSION:
        return ""
    return f"Transformer Engine {transformer_engine.__version__} cannot permute its tokens"


class TransformerEngineFp8(Fp8MatmulLayer):
    """A mixin of a column- or row-parallel layer.

    forward: x [..., K] -> ([..., N], None), or ([..., N], bias) with `skip_bias_add`.
    """

    recipe: Float8BlockScaling
    fp8_param: bool
    sequence_parallel: bool

    def __init__(self, *sizes: Any, skip_bias_add: bool, **options: Any) -> None:
        with _weight_options(self, options) as layer_options:
            super().__init__(*sizes, skip_bias_add=True, **layer_options)  # type: ignore[call-arg]
        self.adds_bias = not skip_bias_add

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        tokens = x.flatten(0, -2)
        missing = -len(tokens) % FP8_TOKENS
        assert not (missing and self.sequence_parallel), "ranks would gather one another's padding"
        if missing:  # padding by 0 would copy
            tokens = F.pad(tokens, (0, 0, 0, missing))
        with te.autocast(recipe=self.recipe):
            output, bias = super().forward(tokens)  # type: ignore[misc]
        if missing:
            output = output[:-missing]
        output = output.view(-1, *x.shape[1:-1], output.size(-1))
        return (output, bias) if bias is None or not self.adds_bias else (output + bias, None)


class TransformerEngineFp8Experts(Fp8MatmulLayer):
    """A mixin of a layer of experts.

    forward: x [tokens, K], `m_splits` rows for each expert -> ([tokens, N], None).
    """

    recipe: Float8BlockScaling
    fp8_param: bool

    def __init__(self, *sizes: Any, **options: Any) -> None:
        with _weight_options(self, options) as layer_options:
            super().__init__(*sizes, **layer_options)  # type: ignore[call-arg]

    def forward(self, x: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        missing, zeros = [-n % FP8_TOKENS for n in m_splits], x.new_zeros(FP8_TOKENS, x.size(1))
        parts = zip(x.split(list(m_splits)), missing, strict=True)
        tokens = torch.cat([piece for part, n in parts for piece in (part, zeros[:n])])
        padded = [n + padding for n, padding in zip(m_splits, missing, strict=True)]
        with te.autocast(recipe=self.recipe):
            output, bias = super().forward(tokens, padded)  # type: ignore[misc]
        sizes = [n for pair in zip(m_splits, missing, strict=True) for n in pair]
        return torch.cat(output.split(sizes)[::2]), bias


def fp8_product(x: Tensor, weight: Tensor, pow2: bool) -> Tensor:
    """Return x [M, K] @ weight [N, K]^T as these layers multiply, for a fingerprint; both are bf16."""
    layer = te.Linear(weight.size(1), weight.size(0), bias=False, params_dtype=weight.dtype, device=weight.device)
    layer.weight.data.copy_(weight)
    missing = -len(x) % FP8_TOKENS
    with torch.no_grad(), te.autocast(recipe=block_scaling("pow2" if pow2 else "fp32")):
        return layer(F.pad(x, (0, 0, 0, missing)))[: len(x)]


def fp8_expert_product(x: Tensor, weight: Tensor, pow2: bool) -> Tensor:
    """Return x [M, K] @ weight [N, K]^T as an expert of `te_experts` multiplies, beside one without rows; both bf16."""
    sizes = weight.size(1), weight.size(0)
    layer = te.GroupedLinear(2, *sizes, bias=False, params_dtype=weight.dtype, device=weight.device)
    layer.weight0.data.copy_(weight)
    rows = F.pad(x, (0, 0, 0, -len(x) % FP8_TOKENS))
    with torch.no_grad(), te.autocast(recipe=block_scaling("pow2" if pow2 else "fp32")):
        return layer(rows, [len(rows), 0])[: len(x)]


@functools.cache
def te_linears(scale_format: ScaleFormat, fp8_param: bool = False, rank_order: bool = False) -> tuple[type, type]:
    """Return the column- and row-parallel layers that multiply in FP8.

    fp8_param:   True keeps their weights only in FP8
    rank_order:  True sums over ranks as an aligned engine (`shared_ops.rank_sum`)
    """
    column, row = TEColumnParallelLinear, TERowParallelLinear
    column, row = _mix_classes(TransformerEngineFp8, scale_format, fp8_param, column, row)
    if not rank_order:
        return column, row
    from nemo_fp8rl.policy.layers.shared_ops.rank_sum import TransformerEngineRankOrderSum

    return column, type(row.__name__, (TransformerEngineRankOrderSum, row), {})


@functools.cache
def te_experts(scale_format: ScaleFormat | None, fp8_param: bool = False) -> tuple[type, type]:
    """Return the column- and row-parallel layers that hold all experts of a rank.

    scale_format:  None multiplies in the weights' precision
    fp8_param:     True keeps their weights only in FP8
    """
    column, row = TEColumnParallelGroupedLinear, TERowParallelGroupedLinear
    if scale_format is None:
        return column, row
    return _mix_classes(TransformerEngineFp8Experts, scale_format, fp8_param, column, row)


def _mix_classes(mixin: type, scale_format: ScaleFormat, fp8_param: bool, column: type, row: type) -> tuple[type, type]:
    kernel = "Transformer Engine" + (", weights held in FP8" if fp8_param else "")
    attributes = {"recipe": block_scaling(scale_format), "fp8_param": fp8_param, "kernel_name": kernel}
    return type(f"Fp8{column.__name__}", (mixin, column), attributes), type(
        f"Fp8{row.__name__}", (mixin, row), attributes
    )
