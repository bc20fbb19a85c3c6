"""vLLM's side of the contract for a mixture of experts: FP8 experts that multiply as the trainer's do.

An out-of-tree `FusedMoEMethodBase`: vLLM's own router chooses the experts, its own loaders place the received bytes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoeWeightScaleSupported
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs

from nemo_fp8rl.fp8 import BLOCK, BlockScaled, ScaleFormat, fprop, scale_shape
from nemo_fp8rl.fp8.format import E4M3
from nemo_fp8rl.fp8.linear import operand_dtype
from nemo_fp8rl.generation import compat
from nemo_fp8rl.generation.cpu_parallel import counted_once, summed


class EmulatedFp8MoEMethod(FusedMoEMethodBase):
    """Holds `w13_weight` [E, 2 * I, H] and `w2_weight` [E, H, I] (E4M3) with their scales, float32, as received."""

    def __init__(self, moe: FusedMoEConfig, scale_format: ScaleFormat) -> None:
        super().__init__(moe)
        self.scale_format = scale_format
        self.capture: Callable[[Tensor], None] | None = None

    @property
    def is_monolithic(self) -> bool:
        return compat.experts_route_themselves()

    def apply_monolithic(self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """`apply` for vLLM's versions that leave routing to the experts."""
        topk_weights, topk_ids = compat.choose_experts(layer, x, router_logits)
        if self.capture:
            self.capture(topk_ids)
        return self.apply(layer, x, topk_weights, topk_ids, None, None)

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
        layer.fp8_operand_dtype = operand_dtype(params_dtype, self.scale_format)
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

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.fp8_dequantized = None  # made of the new bytes by the first multiplication

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """x [tokens, H], topk_* [tokens, k] -> [tokens, H]; summed over experts in their order, in float32.

        A rank that shares experts, or the matrices of each, with others computes its part of what each expert says to
        each token; the sum over experts is then every rank's.
        """
        if layer.fp8_dequantized is None:
            layer.fp8_dequantized = [_dequantized(layer, name) for name in ("w13", "w2")]
        w13, w2 = layer.fp8_dequantized
        parallel = layer.moe_config.moe_parallel_config
        shared = parallel.tp_size * parallel.ep_size > 1
        dtype = torch.float32 if parallel.tp_size > 1 else x.dtype
        said = x.new_zeros((*topk_ids.shape, x.size(-1)), dtype=dtype)
        chosen = {expert: (topk_ids == expert).nonzero(as_tuple=True) for expert in topk_ids.unique().tolist()}
        for expert, (rows, choice) in chosen.items():
            own = expert if layer.expert_map is None else int(layer.expert_map[expert])
            if own >= 0:
                gate, up = fprop(x[rows], w13[own], self.scale_format).chunk(2, -1)
                said[rows, choice] = fprop(F.silu(gate) * up, w2[own], self.scale_format, dtype)
        if shared:
            said = summed(said.float(), x.dtype)
        out = torch.zeros(x.shape, dtype=torch.float32)
        for rows, choice in chosen.values():
            out.index_add_(0, rows, said[rows, choice].float() * topk_weights[rows, choice].float().unsqueeze(-1))
        return counted_once(out.to(x.dtype)) if shared else out.to(x.dtype)


def _dequantized(layer: Any, name: str) -> list[Tensor]:
    """Of each expert."""
    data, scale = getattr(layer, f"{name}_weight").data, getattr(layer, f"{name}_weight_scale_inv").data
    pairs = zip(data, scale, strict=True)
    return [BlockScaled(*pair, BLOCK).dequantize(layer.fp8_operand_dtype) for pair in pairs]
