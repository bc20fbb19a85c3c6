"""Experts of an engine on a GPU.

FP8: `nemo_fp8rl.fp8` quantizes activations, vLLM's Triton kernel multiplies. bfloat16 with adapters: `ops.experts`.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_triton_kernel, try_get_optimal_moe_config
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum
from vllm.triton_utils import tl

from nemo_fp8rl.fp8 import BLOCK, quantize_activations
from nemo_fp8rl.generation.fp8_method.stored_weights import PlainMoEMethod, QuantizedMoEMethod
from nemo_fp8rl.ops.experts import experts_linear, tiles_of_experts

COMPUTE_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class NativeFp8MoEMethod(QuantizedMoEMethod):
    """Multiplies the stored weights themselves."""

    kernel_name = "fused_moe_kernel (Triton)"

    def process_weights_after_loading(self, layer: Any) -> None:
        """Do nothing: the kernel reads the stored weights."""

    def multiply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Return this rank's part of the sum over experts, [tokens, H], of x [tokens, H] and topk_* [tokens, k].

        The steps are those of vLLM's `fused_experts_impl` (fused_moe.py), with two differences: our quantizer, and the
        experts' outputs are weighted within the sum, in float32, as on a CPU; vLLM rounds them to bfloat16 before.
        """
        w13, w2 = layer.w13_weight, layer.w2_weight
        tokens, k = topk_ids.shape
        config = try_get_optimal_moe_config(w13.shape, w2.shape, k, "fp8_w8a8", tokens, block_shape=list(BLOCK))
        order = moe_align_block_size(
            topk_ids,
            config["BLOCK_SIZE_M"],
            layer.global_num_experts,
            layer.expert_map,
            ignore_invalid_experts=True,
        )
        gate_up = self._by_experts(x, w13, layer.w13_weight_scale_inv, k, order, config)
        gate_up = self.adapt(layer, "w13", gate_up, x, topk_ids)
        activated = x.new_empty((tokens * k, w2.size(2)))
        apply_moe_activation(MoEActivation.SILU, activated, gate_up.view(tokens * k, -1))
        expert_out = self._by_experts(activated, w2, layer.w2_weight_scale_inv, 1, order, config).view(tokens, k, -1)
        expert_out = self.adapt(layer, "w2", expert_out, activated, topk_ids)
        return moe_fused_mul_sum(expert_out, topk_weights, topk_ids=topk_ids, expert_map=layer.expert_map)

    def _by_experts(
        self,
        x: Tensor,
        weight: Tensor,
        scale_inv: Tensor,
        k: int,
        order: tuple[Tensor, Tensor, Tensor],
        config: dict[str, Any],
    ) -> Tensor:
        """Multiply each row of x [M, K] by the weights [E, N, K] of its k experts; return [M, k, N].

        The output of another rank's experts stays unwritten.

        order:  the result of `moe_align_block_size`
        """
        out = x.new_empty((x.size(0), k, weight.size(1)))
        quantized = quantize_activations(x, self.scale_format)
        invoke_fused_moe_triton_kernel(
            quantized.data,
            weight,
            out,
            quantized.scale_inv,
            scale_inv,
            None,
            *order,
            mul_routed_weight=False,
            top_k=k,
            config=config,
            compute_type=COMPUTE_TYPES[x.dtype],
            use_fp8_w8a8=True,
            use_int8_w8a8=False,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            per_channel_quant=False,
            block_shape=list(BLOCK),
        )
        return out


class Bf16GroupedMoEMethod(PlainMoEMethod):
    """Multiplies weights in the model's dtype; for experts with adapters, which vLLM's own method does not know."""

    kernel_name = "nemo_fp8rl.ops.experts (Triton)"

    def multiply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        tokens, k = topk_ids.shape
        tiles = tiles_of_experts(topk_ids, layer.global_num_experts, layer.expert_map)
        gate_up = experts_linear(x, layer.w13_weight, None, tiles, k, True)
        gate_up = self.adapt(layer, "w13", gate_up, x, topk_ids)
        activated = x.new_empty((tokens * k, layer.w2_weight.size(2)))
        apply_moe_activation(MoEActivation.SILU, activated, gate_up)
        expert_out = experts_linear(activated, layer.w2_weight, None, tiles, 1, True)
        expert_out = self.adapt(layer, "w2", expert_out, activated, topk_ids).view(tokens, k, -1)
        return moe_fused_mul_sum(expert_out, topk_weights, topk_ids=topk_ids, expert_map=layer.expert_map)
