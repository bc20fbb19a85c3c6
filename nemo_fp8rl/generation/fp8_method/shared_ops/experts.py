"""Experts and their choice in an aligned engine, by shared operations."""

from typing import Any

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from nemo_fp8rl.fp8 import quantize_blockwise
from nemo_fp8rl.generation.fp8_method.gpu_experts import NativeFp8MoEMethod
from nemo_fp8rl.generation.fp8_method.shared_ops.engine_choice import is_aligned_engine
from nemo_fp8rl.generation.fp8_method.stored_weights import MoEMethod, PlainMoEMethod
from nemo_fp8rl.ops.activation import silu_mul
from nemo_fp8rl.ops.experts import choose_experts, combine, experts_linear, tiles_of_experts

KERNEL_NAME = "nemo_fp8rl.ops.experts (Triton)"


def _multiply(
    method: MoEMethod, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, scales: Any, pow2: bool
) -> Tensor:
    """Return the sum over the experts of all ranks, [tokens, H], in their order.

    With expert parallelism every rank has all tokens, and zeros for the outputs of other ranks' experts. So the sum of
    these outputs over ranks is exact in any order.
    scales:  of w13 and w2, or (None, None)
    """
    tiles = tiles_of_experts(topk_ids, layer.global_num_experts, layer.expert_map)
    gate_up = experts_linear(x, layer.w13_weight, scales[0], tiles, topk_ids.size(1), pow2)
    activated = silu_mul(method.adapt(layer, "w13", gate_up, x, topk_ids))
    y = experts_linear(activated, layer.w2_weight, scales[1], tiles, 1, pow2)
    y = method.adapt(layer, "w2", y, activated, topk_ids)
    if layer.expert_map is not None:
        y = tensor_model_parallel_all_reduce(y)
    return combine(y, topk_weights, topk_ids)


def expert_product(x: Tensor, weight: Tensor, pow2: bool) -> Tensor:
    """Return x [M, K] @ weight [N, K]^T as an FP8 expert multiplies, for a fingerprint; both are bf16."""
    stored = quantize_blockwise(weight.unsqueeze(0), scale_format="pow2" if pow2 else "fp32")
    tiles = tiles_of_experts(torch.zeros(len(x), 1, dtype=torch.int32, device=x.device), 1)
    return experts_linear(x, stored.data, stored.scale_inv, tiles, 1, pow2)


class SharedFp8MoEMethod(NativeFp8MoEMethod):
    kernel_name = KERNEL_NAME

    def multiply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        scales = layer.w13_weight_scale_inv, layer.w2_weight_scale_inv
        return _multiply(self, layer, x, topk_weights, topk_ids, scales, self.scale_format == "pow2")


class SharedMoEMethod(PlainMoEMethod):
    kernel_name = KERNEL_NAME

    def multiply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        return _multiply(self, layer, x, topk_weights, topk_ids, (None, None), True)


class SharedMoERunner(MoERunner):
    """vLLM's layer of experts, whose router chooses by `choose_experts` in an aligned engine.

    The experts' method has summed over ranks, so vLLM must not.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_aligned = is_aligned_engine()
        if not self.is_aligned:
            return
        router: Any = self.router
        if router.scoring_func != "softmax" or getattr(router, "e_score_correction_bias", None) is not None:
            raise ValueError("nemo_fp8rl.align=vllm: the model chooses experts by more than a softmax; set align=none")
        if self.moe_config.tp_size > 1:
            raise ValueError("nemo_fp8rl.align=vllm: ranks share each expert; set enable_expert_parallel=True")

        def choose(hidden: Tensor, logits: Tensor, indices_type: Any, **_: Any) -> tuple[Tensor, Tensor]:
            weights, ids = choose_experts(logits, router.top_k, router.renormalize)
            return weights, ids if indices_type is None else ids.to(indices_type)

        router._compute_routing = choose

    @property
    def _fused_output_is_reduced(self) -> bool:
        return self.is_aligned or super()._fused_output_is_reduced
