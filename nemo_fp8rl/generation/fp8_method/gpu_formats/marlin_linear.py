"""Linear layers by vLLM's Marlin kernel: weights in 4 or 8 bits, activations in bfloat16."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import register_weight_loader_v2_supported_method
from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (
    apply_fp4_marlin_linear,
    prepare_fp4_layer_for_marlin,
)
from vllm.model_executor.layers.quantization.utils.marlin_utils_fp8 import (
    apply_mxfp8_marlin_linear,
    prepare_mxfp8_layer_for_marlin,
)

from nemo_fp8rl.fp8 import BlockScaled, Format
from nemo_fp8rl.generation.fp8_method.gpu_formats import activations  # noqa: F401 (registers operations)
from nemo_fp8rl.generation.fp8_method.gpu_formats.derived import keep, row_scales
from nemo_fp8rl.generation.fp8_method.stored_weights import QuantizedLinearMethod


@register_weight_loader_v2_supported_method
class MarlinLinearMethod(QuantizedLinearMethod):
    """Multiplies a repacked copy of the stored weight.

    A global scale multiplies the sum, in float32. Scales lose E4M3's subnormals, which the quantizer with power-of-two
    global scales does not write.
    """

    kernel_name = "Marlin"

    def prepare(self, layer: Any, dtype: torch.dtype) -> None:
        check_activations(dtype)

    def process_weights_after_loading(self, layer: Any) -> None:
        for name, tensor in repacked(self.stored(layer)).items():
            keep(layer, f"kernel_{name}", tensor)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        n, k = layer.weight.size(0), x.size(-1)
        x2 = rounded(x.reshape(-1, k), self.format)
        # The bias is added after the sum was rounded, as the emulated layer does.
        if self.format.element == "e2m1":
            y = apply_fp4_marlin_linear(
                x2, layer.kernel_weight, layer.kernel_weight_scale, layer.kernel_weight_global_scale, None, n, k
            )
        else:
            y = apply_mxfp8_marlin_linear(x2, layer.kernel_weight, layer.kernel_weight_scale, None, n, k)
        return (y if bias is None else y + bias).view(*x.shape[:-1], n)


def rounded(x: Tensor, format: Format) -> Tensor:
    """Return the values that x [M, K] has after the format's quantization of activations."""
    return x if format.token_block is None else torch.ops.nemo_fp8rl.round_activations(x, format.name)


def check_activations(dtype: torch.dtype) -> None:
    """Raise ValueError for activations that cannot hold all quantized values."""
    if dtype is not torch.bfloat16:
        raise ValueError(f"MXFP8 and NVFP4 layers take bfloat16, not {dtype}; set policy.precision=bfloat16")


def repacked(stored: BlockScaled) -> dict[str, Tensor]:
    """Return the tensors of Marlin's layout by the names that vLLM gives them, from a weight [N, K]."""
    n, k = stored.data.size(0), stored.data.size(1) * stored.format.values_per_byte
    copy = nn.Module()  # vLLM replaces attributes of a layer; the layer's own hold what refits write
    copy.weight = nn.Parameter(stored.data, requires_grad=False)
    copy.weight_scale = nn.Parameter(row_scales(stored), requires_grad=False)
    sizes: dict[str, Any] = {"output_size_per_partition": n, "input_size_per_partition": k}
    for name, value in (sizes | {"params_dtype": torch.bfloat16}).items():
        setattr(copy, name, value)
    names = ["weight", "weight_scale"]
    if stored.format.element == "e2m1":
        assert stored.global_scale is not None
        copy.weight_global_scale = nn.Parameter(stored.global_scale, requires_grad=False)
        names.append("weight_global_scale")
        prepare_fp4_layer_for_marlin(copy)
    else:
        prepare_mxfp8_layer_for_marlin(copy)
    return {name: getattr(copy, name).data for name in names}
