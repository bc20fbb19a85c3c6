"""Methods of vLLM's linear layers, embedding and head in an aligned engine: products by shared operations.

The router's gate is a linear layer, too. A method that is no `UnquantizedLinearMethod` keeps vLLM from choosing a
kernel for the gate by the number of tokens (layers/fused_moe/router/gate_linear.py).
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from nemo_fp8rl.fp8 import LinearRecipe, ScaleFormat, quantize_blockwise
from nemo_fp8rl.generation.fp8_method.gpu_linear import NativeFp8LinearMethod, is_deep_gemm
from nemo_fp8rl.generation.fp8_method.stored_weights import PlainLinearMethod
from nemo_fp8rl.ops.fingerprint import is_shared_product
from nemo_fp8rl.ops.matmul import fp8_linear, linear

_SHARED_PRODUCTS: dict[tuple[Any, ...], bool] = {}
"""(Kernel, pow2, N, K, device) -> whether the kernel has the shared product's bits; layers of one shape ask once."""


@register_weight_loader_v2_supported_method
class SharedLinearMethod(PlainLinearMethod):
    """Multiplies weights of the model's dtype by `linear`."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, layer.weight, bias)


class SharedEmbeddingMethod(UnquantizedEmbeddingMethod):
    """The embedding as in vLLM, and the head, which may share its weights, by `linear`."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Do nothing: the kernel reads the stored weights."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, layer.weight, bias)


@register_weight_loader_v2_supported_method
class SharedFp8LinearMethod(NativeFp8LinearMethod):
    """DeepGEMM where vLLM has it and its bits are those of `fp8_linear`; elsewhere `fp8_linear`.

    A bias is added to the rounded product, in both.
    """

    def prepare(self, layer: Any, dtype: torch.dtype) -> None:
        super().prepare(layer, dtype)
        has_library = is_deep_gemm(self.kernel)
        self.is_library = has_library and self._is_shared_product(layer.weight)
        if not self.is_library:
            reason = "DeepGEMM has other bits" if has_library else "Triton"
            self.kernel_name = f"nemo_fp8rl.ops.fp8_linear ({reason})"

    def _is_shared_product(self, weight: Tensor) -> bool:
        """True if the kernel of vLLM has the shared product's bits for weights of this shape, on this GPU."""
        kernel, pow2, n, k = type(self.kernel).__name__, self.scale_format == "pow2", *weight.shape
        key = kernel, pow2, n, k, weight.device
        if key not in _SHARED_PRODUCTS:
            _SHARED_PRODUCTS[key] = is_shared_product(self._library_product, (n, k), pow2, weight.device)
        return _SHARED_PRODUCTS[key]

    def _library_product(self, x: Tensor, weight: Tensor, pow2: bool) -> Tensor:
        stored = quantize_blockwise(weight, scale_format=self.scale_format)
        layer = SimpleNamespace(weight=stored.data, weight_scale_inv=stored.scale_inv)
        return NativeFp8LinearMethod.apply(self, layer, x)

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.is_library:
            super().process_weights_after_loading(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.is_library:
            return super().apply(layer, x, bias)
        y = fp8_linear(x, layer.weight, layer.weight_scale_inv, self.scale_format == "pow2")
        return y if bias is None else y + bias


def fp8_product(x: Tensor, weight: Tensor, pow2: bool) -> Tensor:
    """Return x [M, K] @ weight [N, K]^T as these FP8 layers multiply, for a fingerprint; both are bf16."""
    scale_format: ScaleFormat = "pow2" if pow2 else "fp32"
    stored = quantize_blockwise(weight, scale_format=scale_format)
    layer = SimpleNamespace(weight=stored.data, weight_scale_inv=stored.scale_inv)
    method = SharedFp8LinearMethod(LinearRecipe(scale_format=scale_format))
    method.prepare(layer, x.dtype)
    return method.apply(layer, x)
