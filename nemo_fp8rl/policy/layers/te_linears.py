"""Linear layers of Transformer Engine, which a policy on CUDA multiplies with.

Megatron's own wrappers, but for three things. A layer enters the FP8 context itself, so `fp8.layers` alone says which
do, as it does for the engine. Tokens are padded with zeros to as many as FP8 GEMMs take: a scale of activations or
gradients is that of 128 values of one token, or of one column of 128 tokens, and zeros raise no maximum. (Under
sequence parallelism the pipeline pads, with tokens that are computed: they enter the scales of columns.) And a bias is
added to the rounded product, as the engine's FP8 linear adds it.

`fp8.linear` emulates what these compute on a CPU; `tests/transformer_engine` holds one against the other, with
Transformer Engine's kernels replaced by the contract's.
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
from nemo_fp8rl.policy.layers.linears import MultipliesInFp8

TAKES_COUNTS_OF_HOST = Version("2.15")


@contextmanager
def _weights(layer: Any, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A block in which a layer is built with the options that it gives, so that it holds its weights as it says."""
    if not layer.fp8_param:
        yield options
        return
    on_gpu = copy.copy(options["config"])
    on_gpu.use_cpu_initialization = False  # only there can they be quantized; their values come with `load_hf`
    with te.quantized_model_init(recipe=layer.recipe, preserve_high_precision_init_val=True):
        yield {**options, "config": on_gpu, "init_method": torch.nn.init.zeros_}


def block_scaling(scale_format: ScaleFormat) -> Float8BlockScaling:
    """E4M3 for activations, weights and gradients, 1x128 and 128x128, without a floor under the maxima."""
    rule = QParams(power_2_scale=scale_format == "pow2", amax_epsilon=0.0)
    recipe = Float8BlockScaling(fp8_format=Format.E4M3)
    recipe.fp8_quant_fwd_inp = recipe.fp8_quant_fwd_weight = recipe.fp8_quant_bwd_grad = rule
    return recipe


def why_no_fp8(scale_format: ScaleFormat) -> str:
    """Why FP8 block scaling is not there on this GPU and CUDA; empty where it is."""
    available, reason = te.is_fp8_block_scaling_available(return_reason=True)
    if available and scale_format == "fp32" and torch.cuda.get_device_capability() >= BLACKWELL:
        return "it emulates blocks with MXFP8's on Blackwell, whose scales are powers of two"
    return "" if available else reason


def backward_override() -> str | None:
    """What NVTE_BACKWARD_OVERRIDE, which 2.15 and later read when they are imported, makes of every recipe's backward;
    None: what the recipe says. (common/recipe/__init__.py)
    """
    return getattr(Float8BlockScaling, "backward_override", None)


def why_no_allgather() -> str:
    """Why Megatron's dispatcher of that name, which has the count of tokens on the host, cannot hand it to Transformer
    Engine's permutation; empty where it can. (Triton refuses a tensor of the host: token_dispatcher.py, and
    pytorch/triton/permutation.py, which makes a number of it from 2.15 on.)
    """
    if Version(transformer_engine.__version__) >= TAKES_COUNTS_OF_HOST:
        return ""
    return f"Transformer Engine {transformer_engine.__version__} cannot permute its tokens"


class TransformerEngineFp8(MultipliesInFp8):
    """Mixed into a column- or row-parallel layer. x [..., K] -> ([..., N], None), or what `skip_bias_add` gives."""

    recipe: Float8BlockScaling
    fp8_param: bool
    sequence_parallel: bool

    def __init__(self, *sizes: Any, skip_bias_add: bool, **options: Any) -> None:
        with _weights(self, options) as own:
            super().__init__(*sizes, skip_bias_add=True, **own)  # type: ignore[call-arg]
        self.adds_bias = not skip_bias_add

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        tokens = x.flatten(0, -2)
        missing = -len(tokens) % FP8_TOKENS
        assert not (missing and self.sequence_parallel), "ranks would gather one another's padding"
        if missing:  # else it would be a copy
            tokens = F.pad(tokens, (0, 0, 0, missing))
        with te.autocast(recipe=self.recipe):
            output, bias = super().forward(tokens)  # type: ignore[misc]
        if missing:
            output = output[:-missing]
        output = output.view(-1, *x.shape[1:-1], output.size(-1))
        return (output, bias) if bias is None or not self.adds_bias else (output + bias, None)


class TransformerEngineFp8Experts(MultipliesInFp8):
    """Mixed into layers of experts. x [tokens, K], `m_splits` rows for each expert -> ([tokens, N], None)."""

    recipe: Float8BlockScaling
    fp8_param: bool

    def __init__(self, *sizes: Any, **options: Any) -> None:
        with _weights(self, options) as own:
            super().__init__(*sizes, **own)  # type: ignore[call-arg]

    def forward(self, x: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        missing, nothing = [-n % FP8_TOKENS for n in m_splits], x.new_zeros(FP8_TOKENS, x.size(1))
        parts = zip(x.split(list(m_splits)), missing, strict=True)
        tokens = torch.cat([piece for part, n in parts for piece in (part, nothing[:n])])
        padded = [n + more for n, more in zip(m_splits, missing, strict=True)]
        with te.autocast(recipe=self.recipe):
            output, bias = super().forward(tokens, padded)  # type: ignore[misc]
        both = [n for pair in zip(m_splits, missing, strict=True) for n in pair]
        return torch.cat(output.split(both)[::2]), bias


@functools.cache
def te_linears(scale_format: ScaleFormat, fp8_param: bool = False) -> tuple[type, type]:
    """Column- and row-parallel layers that multiply in FP8. fp8_param: and hold their weights in it alone."""
    return _mixed(TransformerEngineFp8, scale_format, fp8_param, TEColumnParallelLinear, TERowParallelLinear)


@functools.cache
def te_experts(scale_format: ScaleFormat | None, fp8_param: bool = False) -> tuple[type, type]:
    """The same for all experts of a rank in one; scale_format None: in the weights' own precision."""
    column, row = TEColumnParallelGroupedLinear, TERowParallelGroupedLinear
    if scale_format is None:
        return column, row
    return _mixed(TransformerEngineFp8Experts, scale_format, fp8_param, column, row)


def _mixed(mixin: type, scale_format: ScaleFormat, fp8_param: bool, column: type, row: type) -> tuple[type, type]:
    kernel = "Transformer Engine" + (", weights held in FP8" if fp8_param else "")
    chosen = {"recipe": block_scaling(scale_format), "fp8_param": fp8_param, "kernel_name": kernel}
    return type(f"Fp8{column.__name__}", (mixin, column), chosen), type(f"Fp8{row.__name__}", (mixin, row), chosen)
