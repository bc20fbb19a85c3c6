"""Linear layers by Blackwell's own matmuls of MXFP8 and NVFP4: `nemo_fp8rl.fp8` quantizes activations."""

from typing import Any

import torch
from torch import Tensor
from vllm._custom_ops import cutlass_scaled_fp4_mm
from vllm.model_executor.kernels.linear.mxfp8.flashinfer import FlashInferCutlassMxfp8LinearKernel
from vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel import Mxfp8LinearLayerConfig
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.utils.nvfp4_utils import cutlass_fp4_supported
from vllm.utils import flashinfer as vllm_flashinfer

from nemo_fp8rl.generation.fp8_method.gpu_formats import activations  # noqa: F401 (registers operations)
from nemo_fp8rl.generation.fp8_method.gpu_formats.derived import keep, row_scales, swizzle
from nemo_fp8rl.generation.fp8_method.gpu_formats.marlin_linear import check_activations
from nemo_fp8rl.generation.fp8_method.stored_weights import QuantizedLinearMethod

NVFP4_WIDTH = 32
"""CUTLASS's NVFP4 matmul takes a multiple of it as rows and columns of a weight."""


@register_weight_loader_v2_supported_method
class BlackwellMxfp8LinearMethod(QuantizedLinearMethod):
    """Multiplies the stored weight itself, by CUTLASS in FlashInfer; the scales are a swizzled copy."""

    kernel_name = "CUTLASS MXFP8 (FlashInfer)"

    def prepare(self, layer: Any, dtype: torch.dtype) -> None:
        check_activations(dtype)
        shape = tuple(layer.weight.shape)
        can, reason = FlashInferCutlassMxfp8LinearKernel.can_implement(Mxfp8LinearLayerConfig(shape))
        if not can:
            raise ValueError(_no_kernel(self.format.name, shape, str(reason)))

    def process_weights_after_loading(self, layer: Any) -> None:
        keep(layer, "kernel_scales", swizzle(row_scales(self.stored(layer))).flatten())

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        data, scales = torch.ops.nemo_fp8rl.quantize_mxfp8(x.reshape(-1, x.size(-1)))
        y = vllm_flashinfer.mm_mxfp8(
            data, layer.weight.t(), scales, layer.kernel_scales, out_dtype=x.dtype, backend="cutlass"
        )
        return (y if bias is None else y + bias).view(*x.shape[:-1], y.size(-1))


@register_weight_loader_v2_supported_method
class BlackwellNvfp4LinearMethod(QuantizedLinearMethod):
    """Multiplies the stored weight itself, by vLLM's CUTLASS kernel; the scales are a swizzled copy.

    The kernel multiplies the sum by one number, the weight's global scale. The activation's, a power of two for each
    row, multiplies the rounded result, which is exact.
    """

    kernel_name = "CUTLASS NVFP4"

    def prepare(self, layer: Any, dtype: torch.dtype) -> None:
        check_activations(dtype)
        n, k = layer.weight.size(0), layer.weight.size(1) * 2
        if n % NVFP4_WIDTH or k % NVFP4_WIDTH:
            raise ValueError(_no_kernel(self.format.name, (n, k), f"CUTLASS takes multiples of {NVFP4_WIDTH}"))

    def process_weights_after_loading(self, layer: Any) -> None:
        stored = self.stored(layer)
        assert stored.global_scale is not None
        keep(layer, "kernel_scales", swizzle(row_scales(stored)))
        keep(layer, "kernel_alpha", stored.global_scale.reshape(1))

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        data, scales, of_rows = torch.ops.nemo_fp8rl.quantize_nvfp4(x.reshape(-1, x.size(-1)))
        y = cutlass_scaled_fp4_mm(data, layer.weight, scales, layer.kernel_scales, layer.kernel_alpha, x.dtype)
        y = y * of_rows
        return (y if bias is None else y + bias).view(*x.shape[:-1], y.size(-1))


def why_no_mxfp8() -> str:
    """Return why this GPU's own MXFP8 matmul cannot be used; empty if it can."""
    can, reason = FlashInferCutlassMxfp8LinearKernel.is_supported()
    return "" if can else str(reason)


def why_no_nvfp4() -> str:
    """Return why this GPU's own NVFP4 matmul cannot be used; empty if it can."""
    return "" if cutlass_fp4_supported() else "vLLM has no CUTLASS kernel of NVFP4 for this GPU"


def _no_kernel(format: str, shape: tuple[int, ...], reason: str) -> str:
    return (
        f"no {format} kernel for a linear layer {list(shape)}: {reason}; keep it in bfloat16 by a word of its name in "
        "policy.generation.vllm_cfg.quantization_ignored_layer_kws"
    )
