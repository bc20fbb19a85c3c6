"""vLLM's side of the contract: linear layers that hold FP8 bytes and multiply them as the trainer does.

Built on what vLLM offers to out-of-tree quantization: a `QuantizationConfig` subclass, a `LinearMethodBase`, its own
parameter classes (so that its weight loaders fuse q, k, v and gate, up), and layerwise reload, which calls
`process_weights_after_loading` again after every refit.
"""

from typing import Any, cast

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    RowParallelLinear,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.parameter import BlockQuantScaleParameter, ModelWeightParameter
from vllm.platforms import current_platform

from nemo_fp8rl.fp8 import BLOCK, BlockScaled, Fp8Layers, ScaleFormat, fprop
from nemo_fp8rl.fp8.format import E4M3
from nemo_fp8rl.fp8.kernels import load_emulation
from nemo_fp8rl.fp8.linear import operand_dtype
from nemo_fp8rl.generation import compat
from nemo_fp8rl.generation.cpu_experts import EmulatedFp8MoEMethod
from nemo_fp8rl.generation.cpu_parallel import counted_once, summed


class NemoFp8RlConfig(Fp8Config):
    """Blockwise FP8 with the contract's scale format, in the layers it names.

    Of a `quant_method: nemo_fp8rl`, or of an exported checkpoint. `from_config` raises ValueError on another one's.
    """

    scale_format: ScaleFormat = "pow2"
    fp8_layers: Fp8Layers

    @classmethod
    def get_name(cls) -> Any:
        return "nemo_fp8rl"

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "NemoFp8RlConfig":
        if missing := sorted({"scale_format", "fp8_layers"} - config.keys()):
            raise ValueError(
                f"quantization {cls.get_name()}: the checkpoint's quantization_config lacks {' and '.join(missing)}, "
                "so it was not written by `nemo-fp8rl export`; leave its quantization to vLLM"
            )
        own = cast(NemoFp8RlConfig, super().from_config(config))
        own.scale_format = config["scale_format"]
        first, end, ignored = config["fp8_layers"]
        own.fp8_layers = Fp8Layers(first, end, tuple(ignored))
        load_emulation("cpu")  # here, for numba must be there before the next line, not after it
        compat.survive_scan_of_llvmlite()
        return own

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if not current_platform.is_cpu():
            raise ValueError(
                f"quantization {self.get_name()} runs on CPU so far: vLLM's GPU kernels choose their scales"
            )
        if isinstance(layer, RoutedExperts) and self.fp8_layers.quantizes(prefix):
            return EmulatedFp8MoEMethod(layer.moe_config, self.scale_format)
        if not isinstance(layer, LinearBase):
            return None
        return (
            EmulatedFp8LinearMethod(self.scale_format)
            if self.fp8_layers.quantizes(prefix)
            else UnquantizedLinearMethod()
        )


@register_weight_loader_v2_supported_method
class EmulatedFp8LinearMethod(LinearMethodBase):
    """Holds `weight` (E4M3) and `weight_scale_inv` (float32) as received; multiplies a dequantized copy of them."""

    def __init__(self, scale_format: ScaleFormat) -> None:
        self.scale_format = scale_format

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        if any(size % BLOCK[0] for size in output_partition_sizes[:-1]):
            raise ValueError(f"parts of {output_partition_sizes} rows do not start at multiples of {BLOCK[0]}")
        loader = extra["weight_loader"]
        layer.weight_block_size = list(BLOCK)  # read by vLLM's loaders when they place the scales of a fused part
        weight = torch.empty(rows, columns, dtype=E4M3)
        scale = torch.empty(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]), dtype=torch.float32)
        layer.register_parameter(
            "weight", ModelWeightParameter(data=weight, input_dim=1, output_dim=0, weight_loader=loader)
        )
        layer.register_parameter(
            "weight_scale_inv", BlockQuantScaleParameter(data=scale, input_dim=1, output_dim=0, weight_loader=loader)
        )
        self.sums_parts = isinstance(layer, RowParallelLinear) and layer.tp_size > 1 and layer.reduce_results
        layer.fp8_operand_dtype = torch.float32 if self.sums_parts else operand_dtype(params_dtype, self.scale_format)

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.fp8_dequantized = None  # made of the new bytes by the first multiplication

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if layer.fp8_dequantized is None:
            stored = BlockScaled(layer.weight.data, layer.weight_scale_inv.data, BLOCK)
            layer.fp8_dequantized = stored.dequantize(layer.fp8_operand_dtype)
        if self.sums_parts:
            y = summed(fprop(x, layer.fp8_dequantized, self.scale_format, torch.float32), x.dtype)
            y = counted_once(y)
        else:
            y = fprop(x, layer.fp8_dequantized, self.scale_format)
        return y if bias is None else y + bias
