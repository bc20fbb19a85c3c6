"""Quantized linear layers of an engine on a CPU, emulated: they multiply as the trainer's layers do."""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.linear import RowParallelLinear, register_weight_loader_v2_supported_method

from nemo_fp8rl.fp8 import fprop
from nemo_fp8rl.generation.fp8_method.on_cpu.compiled_calls import emulated_linear, register
from nemo_fp8rl.generation.fp8_method.on_cpu.rank_sums import keep_on_first_rank, sum_over_ranks
from nemo_fp8rl.generation.fp8_method.stored_weights import QuantizedLinearMethod


@register_weight_loader_v2_supported_method
class EmulatedLinearMethod(QuantizedLinearMethod):
    """Multiplies a dequantized copy of the stored weight."""

    kernel_name = "fp8.fprop (emulated)"

    def prepare(self, layer: Any, dtype: torch.dtype) -> None:
        self.sums_parts = isinstance(layer, RowParallelLinear) and layer.tp_size > 1 and layer.reduce_results
        register(layer)
        layer.fp8_operand_dtype = torch.float32 if self.sums_parts else self.recipe.operand_dtype(dtype)

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.fp8_dequantized = None  # the first multiplication dequantizes the new bytes

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = emulated_linear(x, layer.weight) if torch.compiler.is_compiling() else self.compute(layer, x)
        return y if bias is None else y + bias

    def compute(self, layer: Any, x: Tensor) -> Tensor:
        """Return the product without the bias."""
        if layer.fp8_dequantized is None:
            layer.fp8_dequantized = self.stored(layer).dequantize(layer.fp8_operand_dtype)
        if self.sums_parts:
            y = sum_over_ranks(fprop(x, layer.fp8_dequantized, self.recipe, torch.float32), x.dtype)
            return keep_on_first_rank(y)
        return fprop(x, layer.fp8_dequantized, self.recipe)
