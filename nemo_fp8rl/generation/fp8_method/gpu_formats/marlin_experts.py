"""Experts by vLLM's Marlin kernel: weights in 4 or 8 bits, activations in bfloat16."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum
from vllm.model_executor.layers.quantization.utils.marlin_utils import get_marlin_workspace
from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_nvfp4_moe_layer_for_marlin
from vllm.model_executor.layers.quantization.utils.marlin_utils_fp8 import prepare_mxfp8_moe_layer_for_marlin
from vllm.scalar_type import scalar_types

from nemo_fp8rl.generation.fp8_method.gpu_formats.derived import keep, row_scales
from nemo_fp8rl.generation.fp8_method.gpu_formats.marlin_linear import check_activations, rounded
from nemo_fp8rl.generation.fp8_method.stored_weights import QuantizedMoEMethod

ROWS = (8, 16, 32, 48, 64)
"""Rows of a block of tokens of one expert, of which the kernel has variants."""
WIDTH = 64
"""Marlin's kernel of experts takes a multiple of it as hidden size."""


class MarlinMoEMethod(QuantizedMoEMethod):
    """Multiplies repacked copies of the stored weights."""

    kernel_name = "Marlin (experts)"

    def create_weights(self, layer: Any, num_experts: int, hidden_size: int, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, num_experts, hidden_size, *args, **kwargs)
        check_activations(layer.activations_dtype)
        if hidden_size % WIDTH:
            raise ValueError(
                f"experts of a model with hidden_size={hidden_size} have no {self.format.name} kernel on a GPU: Marlin "
                f"takes multiples of {WIDTH}; use nemo_fp8rl.flow=bf16"
            )

    def process_weights_after_loading(self, layer: Any) -> None:
        w13, w2 = self.stored(layer, "w13"), self.stored(layer, "w2")
        scales = row_scales(w13), row_scales(w2)
        experts, hidden = w13.data.size(0), w2.data.size(1)
        names = SimpleNamespace(
            num_experts=experts,
            hidden_size=hidden,
            intermediate_size_per_partition=w13.data.size(1) // 2,
            params_dtype=torch.bfloat16,
        )
        if self.format.element == "e2m1":
            stored = w13.data, scales[0], w13.global_scale, w2.data, scales[1], w2.global_scale
            tensors = prepare_nvfp4_moe_layer_for_marlin(names, *stored, is_act_and_mul=True)
            for (name, leaf), tensor in zip(_names("weight", "scale", "global_scale"), tensors, strict=True):
                keep(layer, f"kernel_{name}_{leaf}", tensor)
        else:
            tensors = prepare_mxfp8_moe_layer_for_marlin(names, w13.data, w2.data, *scales)
            order = (("w13", "weight"), ("w2", "weight"), ("w13", "scale"), ("w2", "scale"))
            for (name, leaf), tensor in zip(order, tensors, strict=True):
                keep(layer, f"kernel_{name}_{leaf}", tensor)

    def multiply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Return this rank's part of the sum over experts, as `gpu_experts` does, by Marlin's kernel."""
        tokens, k = topk_ids.shape
        experts = layer.global_num_experts
        rows = _block_rows(tokens * k / experts)
        order = moe_align_block_size(topk_ids, rows, experts, layer.expert_map, ignore_invalid_experts=True)
        gate_up = self._by_experts(layer, "w13", x, k, order, rows, topk_weights)
        gate_up = self.adapt(layer, "w13", gate_up, x, topk_ids)
        activated = x.new_empty((tokens * k, gate_up.size(1) // 2))
        apply_moe_activation(MoEActivation.SILU, activated, gate_up)
        expert_out = self._by_experts(layer, "w2", activated, 1, order, rows, topk_weights)
        expert_out = self.adapt(layer, "w2", expert_out, activated, topk_ids).view(tokens, k, -1)
        return moe_fused_mul_sum(expert_out, topk_weights, topk_ids=topk_ids, expert_map=layer.expert_map)

    def _by_experts(
        self,
        layer: Any,
        name: str,
        x: Tensor,
        k: int,
        order: tuple[Tensor, Tensor, Tensor],
        rows: int,
        topk_weights: Tensor,
    ) -> Tensor:
        """Multiply each row of x [M, K] by its k experts' weights w13 or w2; return [M * k, N].

        The output of another rank's experts stays unwritten.

        order, rows: the result of `moe_align_block_size`, and its block size
        """
        is_fp4 = self.format.element == "e2m1"
        weight, scales = getattr(layer, f"kernel_{name}_weight"), getattr(layer, f"kernel_{name}_scale")
        n, size_k = scales.size(2), weight.size(1) * 16
        out = x.new_empty((x.size(0) * k, n))
        _custom_ops.moe_wna16_marlin_gemm(
            rounded(x, self.format),
            out,
            weight,
            None,
            scales,
            None,
            getattr(layer, f"kernel_{name}_global_scale") if is_fp4 else None,
            None,
            get_marlin_workspace(x.device),
            *order,
            topk_weights,
            moe_block_size=rows,
            top_k=k,
            mul_topk_weights=False,
            b_q_type=scalar_types.float4_e2m1f if is_fp4 else scalar_types.float8_e4m3fn,
            size_m=x.size(0),
            size_n=n,
            size_k=size_k,
            use_atomic_add=False,
            use_fp32_reduce=True,
            is_zp_float=False,
        )
        return out


def _names(*leaves: str) -> list[tuple[str, str]]:
    return [(name, leaf) for name in ("w13", "w2") for leaf in leaves]


def _block_rows(tokens_of_expert: float) -> int:
    """Return the smallest block that most experts' tokens fill once. Source: vLLM, fused_marlin_moe."""
    return next((rows for rows in ROWS if tokens_of_expert / rows < 0.9), ROWS[-1])
