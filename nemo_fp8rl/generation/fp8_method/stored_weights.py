"""Methods of vLLM's modules that store weights as they come over the wire, so that refits write them in place.

They use what vLLM offers to out-of-tree quantization: a `LinearMethodBase`, a `FusedMoEMethodBase`, vLLM's parameter
classes (so that its weight loaders fuse q, k, v and gate, up), and layerwise reload, which calls
`process_weights_after_loading` again after every refit. Subclasses multiply: `on_cpu/emulated_linear` and
`on_cpu/emulated_experts`, or `gpu_linear` and `gpu_experts`, all with the same weights and scales.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoeWeightScaleSupported
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.parameter import BlockQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter
from vllm.model_executor.utils import set_weight_attrs

from nemo_fp8rl.fp8 import BlockScaled, LinearRecipe, empty_block_scaled


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


class QuantizedLinearMethod(LinearMethodBase):
    """Stores `weight` [N, K] and its scales as they come over the wire, by the names that checkpoints have.

    There is one row of scales for each row of blocks. A global scale is float32 [parts], one for each matrix that
    vLLM fuses. What a kernel reads in another form is derived from them.

    kernel_name:     the name of the kernel that multiplies them
    has_input_scale: the checkpoint has a static scale of activations, which is loaded and not used
    """

    kernel_name: str

    def __init__(self, recipe: LinearRecipe, has_input_scale: bool = False) -> None:
        self.recipe, self.format, self.scale_format = recipe, recipe.format, recipe.scale_format
        self.has_input_scale = has_input_scale

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
        shape, block = (sum(output_partition_sizes), input_size_per_partition), self.format.weight_block
        if any(size % block[0] for size in output_partition_sizes[:-1]):
            raise ValueError(f"parts of {output_partition_sizes} rows do not start at multiples of {block[0]}")
        loader = extra["weight_loader"]
        layer.weight_block_size = list(block)  # read by vLLM's loaders when they place the scales of a fused part
        stored = empty_block_scaled(shape, self.format, block, torch.get_default_device())
        dims = {"input_dim": 1, "output_dim": 0, "weight_loader": loader}
        layer.register_parameter("weight", ModelWeightParameter(data=stored.data, **dims))
        scales = BlockQuantScaleParameter(data=stored.scale_inv, **dims)
        layer.register_parameter(self.format.scale_name("weight"), scales)
        if self.format.has_global:
            names = (self.format.global_name("weight"), *(["input_scale"] if self.has_input_scale else []))
            for name in names:
                of_parts = torch.ones(len(output_partition_sizes), dtype=torch.float32)
                layer.register_parameter(name, PerTensorScaleParameter(data=of_parts, weight_loader=loader))
        self.prepare(layer, params_dtype)

    def stored(self, layer: Any) -> BlockScaled:
        """Return the weight that the layer stores. The parts of a fused weight have one global scale."""
        scale_inv = getattr(layer, self.format.scale_name("weight")).data
        global_scale = getattr(layer, self.format.global_name("weight")).data[0] if self.format.has_global else None
        return BlockScaled(layer.weight.data, scale_inv, self.format.weight_block, self.format, global_scale)

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

    def adapt(self, layer: Any, name: str, y: Tensor, x: Tensor, topk_ids: Tensor) -> Tensor:
        """Return the products of w13 or w2, to which a method with adapters adds theirs (`low_rank`).

        y:  the products by slot (a token with one of its experts), [tokens * k, N] or [tokens, k, N]
        x:  [tokens, H] for w13, [tokens * k, I] for w2
        """
        return y

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


class QuantizedMoEMethod(MoEMethod):
    """Stores `w13_weight` [E, 2 * I, H] and `w2_weight` [E, H, I] with their scales, as `QuantizedLinearMethod` does.

    A global scale is float32 [E, 2], of gate and up, or [E, 1].
    """

    def __init__(self, moe: FusedMoEConfig, recipe: LinearRecipe, has_input_scale: bool = False) -> None:
        super().__init__(moe)
        self.recipe, self.format, self.scale_format = recipe, recipe.format, recipe.scale_format
        self.has_input_scale = has_input_scale

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        block = self.format.weight_block
        if intermediate_size_per_partition % block[0]:
            raise ValueError(f"experts of {intermediate_size_per_partition} rows do not end at multiples of {block[0]}")
        layer.weight_block_size = list(block)  # read by vLLM's loaders when they place the scales
        shapes = {
            "w13": (2 * intermediate_size_per_partition, hidden_size),
            "w2": (hidden_size, intermediate_size_per_partition),
        }
        for name, shape in shapes.items():
            stored = empty_block_scaled((num_experts, *shape), self.format, block, torch.get_default_device())
            weight = f"{name}_weight"
            tensors: list[tuple[str, Tensor, dict[str, str]]] = [(weight, stored.data, {})]
            tensors.append((self.format.scale_name(weight), stored.scale_inv, _scale_kind("BLOCK")))
            if self.format.has_global:
                of_parts = torch.ones(num_experts, 2 if name == "w13" else 1, dtype=torch.float32)
                tensors.append((self.format.global_name(weight), of_parts, _scale_kind("TENSOR")))
                if self.has_input_scale:
                    tensors.append(
                        (f"{name}_input_scale", torch.ones(num_experts, dtype=torch.float32), _scale_kind("TENSOR"))
                    )
            for leaf, data, more in tensors:
                parameter = torch.nn.Parameter(data, requires_grad=False)
                layer.register_parameter(leaf, parameter)
                set_weight_attrs(parameter, extra | more)
        layer.activations_dtype = params_dtype

    def stored(self, layer: Any, name: str) -> BlockScaled:
        """Return the stack of weights that the layer stores. name: w13 or w2"""
        name += "_weight"
        scale_inv = getattr(layer, self.format.scale_name(name)).data
        global_scale = getattr(layer, self.format.global_name(name)).data[:, 0] if self.format.has_global else None
        return BlockScaled(getattr(layer, name).data, scale_inv, self.format.weight_block, self.format, global_scale)


def _scale_kind(name: str) -> dict[str, str]:
    """Return the attribute by which vLLM's loader of experts chooses how it places a scale."""
    return {"quant_method": FusedMoeWeightScaleSupported[name].value}
