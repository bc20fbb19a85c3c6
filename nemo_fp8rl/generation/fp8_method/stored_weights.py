"""Methods of vLLM's modules that store weights as they come over the wire, so that refits write them in place.

They use what vLLM offers to out-of-tree quantization: a `LinearMethodBase`, a `FusedMoEMethodBase`, vLLM's parameter
classes (so that its weight loaders fuse q, k, v and gate, up), and layerwise reload, which calls
`process_weights_after_loading` again after every refit. Subclasses multiply: `on_cpu/emulated_linear` and
`on_cpu/emulated_experts`, or `gpu_linear` and `gpu_experts`, all with the same weights and scales. vLLM's own FP8
methods have the same two names (layers/quantization/fp8.py) and are other classes.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoeWeightScaleSupported
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.parameter import BlockQuantScaleParameter, ModelWeightParameter
from vllm.model_executor.utils import set_weight_attrs

from nemo_fp8rl.fp8 import BLOCK, ScaleFormat, scale_shape
from nemo_fp8rl.fp8.format import E4M3


class PlainLinearMethod(LinearMethodBase):
    """Stores `weight` [N, K] in the model's dtype; vLLM's own method for such weights packs them on a CPU."""

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
        data = torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype)
        loader = extra.pop("weight_loader")
        weight = ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
        layer.register_parameter("weight", weight)
        set_weight_attrs(weight, extra)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Do nothing: the kernel reads the stored weights."""


class Fp8LinearMethod(LinearMethodBase):
    """Stores `weight` [N, K] (E4M3) and `weight_scale_inv` [ceil(N/128), ceil(K/128)] (float32).

    kernel_name:  the name of the kernel that multiplies them
    """

    kernel_name: str

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
        shape = sum(output_partition_sizes), input_size_per_partition
        if any(size % BLOCK[0] for size in output_partition_sizes[:-1]):
            raise ValueError(f"parts of {output_partition_sizes} rows do not start at multiples of {BLOCK[0]}")
        loader = extra["weight_loader"]
        layer.weight_block_size = list(BLOCK)  # read by vLLM's loaders when they place the scales of a fused part
        weight = torch.empty(shape, dtype=E4M3)
        scale = torch.empty(scale_shape(shape, BLOCK), dtype=torch.float32)
        layer.register_parameter(
            "weight", ModelWeightParameter(data=weight, input_dim=1, output_dim=0, weight_loader=loader)
        )
        layer.register_parameter(
            "weight_scale_inv", BlockQuantScaleParameter(data=scale, input_dim=1, output_dim=0, weight_loader=loader)
        )
        self.prepare(layer, params_dtype)

    def prepare(self, layer: Any, dtype: torch.dtype) -> None:
        """Prepare the multiplication for a layer whose parameters exist.

        dtype:  of the activations
        """
        raise NotImplementedError


class MoEMethod(FusedMoEMethodBase):
    """Experts of a layer, as `multiply` computes them.

    kernel_name:  the name of the kernel that multiplies them
    """

    kernel_name: str

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Call `multiply`, as vLLM names it. No supported family has experts that all tokens share."""
        return self.multiply(layer, x, topk_weights, topk_ids)

    def multiply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Return this rank's output [tokens, H] of x [tokens, H], topk_* [tokens, k]; vLLM sums it over the ranks."""
        raise NotImplementedError

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None


class PlainMoEMethod(MoEMethod):
    """Stores `w13_weight` [E, 2 * I, H] and `w2_weight` [E, H, I] in the model's dtype."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        size = intermediate_size_per_partition
        for name, shape in (("w13", (2 * size, hidden_size)), ("w2", (hidden_size, size))):
            weight = torch.nn.Parameter(torch.empty(num_experts, *shape, dtype=params_dtype), requires_grad=False)
            layer.register_parameter(f"{name}_weight", weight)
            set_weight_attrs(weight, extra)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Do nothing: the kernel reads the stored weights."""


class Fp8MoEMethod(MoEMethod):
    """Stores `w13_weight` [E, 2 * I, H] and `w2_weight` [E, H, I] (E4M3) with their scales (float32)."""

    def __init__(self, moe: FusedMoEConfig, scale_format: ScaleFormat) -> None:
        super().__init__(moe)
        self.scale_format = scale_format

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        if intermediate_size_per_partition % BLOCK[0]:
            raise ValueError(f"experts of {intermediate_size_per_partition} rows do not end at multiples of {BLOCK[0]}")
        layer.weight_block_size = list(BLOCK)  # read by vLLM's loaders when they place the scales
        shapes = {
            "w13": (2 * intermediate_size_per_partition, hidden_size),
            "w2": (hidden_size, intermediate_size_per_partition),
        }
        for name, shape in shapes.items():
            weight = torch.empty(num_experts, *shape, dtype=E4M3)
            scale = torch.empty(num_experts, *scale_shape(shape, BLOCK), dtype=torch.float32)
            for leaf, data, more in (
                ("weight", weight, {}),
                ("weight_scale_inv", scale, {"quant_method": FusedMoeWeightScaleSupported.BLOCK.value}),
            ):
                parameter = torch.nn.Parameter(data, requires_grad=False)
                layer.register_parameter(f"{name}_{leaf}", parameter)
                set_weight_attrs(parameter, extra | more)
        layer.activations_dtype = params_dtype
