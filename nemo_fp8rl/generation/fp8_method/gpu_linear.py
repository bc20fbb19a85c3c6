"""FP8 linear layers of an engine on a GPU: `nemo_fp8rl.fp8` quantizes activations, vLLM's block kernels multiply.

vLLM chooses among more kernels. Kernels that would multiply other numbers than the trainer's are left out: FlashInfer's
kernel quantizes small batches by itself, Marlin and Humming leave activations in bfloat16. DeepGEMM is used on Hopper
alone: on Blackwell it needs scales of one byte, for which vLLM quantizes the weights again.
"""

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear import is_supported_and_can_implement_kernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8Static128BlockSym
from vllm.platforms import current_platform

from nemo_fp8rl.fp8 import quantize_activations
from nemo_fp8rl.fp8.block_scaled import E4M3
from nemo_fp8rl.generation.fp8_method.stored_weights import QuantizedLinearMethod

HOPPER = 90


class BlockKernel(NamedTuple):
    """One of vLLM's kernels for linear layers.

    module, name:  where the class is (model_executor/kernels/linear/scaled_mm/)
    rows:          0: the kernel takes the scales of activations, [M, K/128], row by row; else column by column, with
                   columns padded to a multiple of `rows`
    """

    module: str
    name: str
    rows: int


KERNELS = (
    BlockKernel("deep_gemm", "DeepGemmFp8BlockScaledMMKernel", 4),
    BlockKernel("cutlass", "CutlassFp8BlockScaledMMKernel", 1),
    BlockKernel("triton", "TritonFp8BlockScaledMMKernel", 0),
)
"""The fastest first."""


@register_weight_loader_v2_supported_method
class NativeFp8LinearMethod(QuantizedLinearMethod):
    """Multiplies the stored weights themselves."""

    def prepare(self, layer: Any, dtype: torch.dtype) -> None:
        self.kernel, self.rows = _kernel(tuple(layer.weight.shape), dtype)
        self.kernel_name = type(self.kernel).__name__

    def process_weights_after_loading(self, layer: Any) -> None:
        """Derive nothing. vLLM 0.32 compiles DeepGEMM's kernels at start for layers with this attribute."""
        layer.deep_gemm_warmup_provider = self.kernel

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x2 = x.reshape(-1, x.size(-1))
        data, scale_inv = torch.ops.nemo_fp8rl.quantize_activations(x2, self.scale_format == "pow2", self.rows)
        y = self.kernel.apply_block_scaled_mm(A=data, B=layer.weight, As=scale_inv, Bs=layer.weight_scale_inv)
        return (y if bias is None else y + bias).view(*x.shape[:-1], y.size(-1))


def _kernel(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Any, int]:
    """Return a kernel for weights [N, K], and its `rows`. Raises ValueError, with reasons, where there is none."""
    config = FP8ScaledMMLinearLayerConfig(
        weight_quant_key=kFp8Static128BlockSym,
        activation_quant_key=kFp8Dynamic128Sym,
        weight_shape=shape,
        input_dtype=dtype,
        out_dtype=dtype,
    )
    reasons = []
    for kind in KERNELS:
        module = importlib.import_module(f"vllm.model_executor.kernels.linear.scaled_mm.{kind.module}")
        kernel_class = getattr(module, kind.name)
        can, reason = is_supported_and_can_implement_kernel(kernel_class, config, None)
        if can and not (reason := _why_unsuitable(kind, shape)):
            kernel = kernel_class(config)
            kernel.use_deep_gemm_e8m0 = False  # the scales are float32, whatever their values
            return kernel, kind.rows
        reasons.append(reason)
    raise ValueError(f"no FP8 kernel for a linear layer {list(shape)}: {' '.join(reasons)}")


def is_deep_gemm(kernel: Any) -> bool:
    """True for an instance of vLLM's kernel class for DeepGEMM."""
    return type(kernel).__name__ == KERNELS[0].name


def _why_unsuitable(kind: BlockKernel, shape: tuple[int, int]) -> str:
    """Return why we cannot use a kernel that vLLM would accept; empty where we can."""
    if kind.module == "deep_gemm" and not current_platform.is_device_capability(HOPPER):
        return f"{kind.name} is used on Hopper alone."
    if kind.module == "cutlass" and any(size % 128 for size in shape):  # some GPUs refuse others at run time
        return f"{kind.name} is used for whole blocks alone."
    return ""


@torch.library.custom_op("nemo_fp8rl::quantize_activations", mutates_args=())
def _quantize_activations(x: Tensor, pow2: bool, rows: int) -> tuple[Tensor, Tensor]:
    """Quantize x [M, K] to E4M3 [M, K] and scales [M, ceil(K/128)]. torch.compile needs it as one operation."""
    scale_inv = _scales_like(x, rows)
    return quantize_activations(x, "pow2" if pow2 else "fp32", scale_inv).data, scale_inv


@_quantize_activations.register_fake
def _(x: Tensor, pow2: bool, rows: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=E4M3), _scales_like(x, rows)


def _scales_like(x: Tensor, rows: int) -> Tensor:
    """Return unwritten scales, float32 [M, ceil(K/128)], for x [M, K], in the layout of `BlockKernel.rows`."""
    m, k = x.size(0), -(-x.size(1) // 128)
    if not rows:
        return x.new_empty((m, k), dtype=torch.float32)
    return x.new_empty((k, -(-m // rows) * rows), dtype=torch.float32).t()[:m]
