"""Quantized experts of an engine on a CPU, emulated: they multiply as the trainer's experts do.

vLLM's router chooses the experts, and vLLM's loaders place the received bytes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_fp8rl.fp8 import fprop
from nemo_fp8rl.generation import vllm_compat
from nemo_fp8rl.generation.fp8_method.on_cpu.compiled_calls import emulated_experts, register
from nemo_fp8rl.generation.fp8_method.on_cpu.rank_sums import keep_on_first_rank, sum_over_ranks
from nemo_fp8rl.generation.fp8_method.stored_weights import MoEMethod, PlainMoEMethod, QuantizedMoEMethod


class ExpertLoop(MoEMethod):
    """Experts one after the other, as dense MLPs: every product is rounded, and the sum over experts once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.capture: Callable[[Tensor], None] | None = None

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        register(layer)

    @property
    def is_monolithic(self) -> bool:
        return vllm_compat.is_routing_by_experts()

    def apply_monolithic(self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """Route and `multiply`, for the version of vLLM in which experts route."""
        topk_weights, topk_ids = vllm_compat.choose_experts(layer, x, router_logits)
        if self.capture:
            self.capture(topk_ids)
        return self.apply(layer, x, topk_weights, topk_ids, None, None)

    def multiply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return emulated_experts(x, topk_weights, topk_ids, layer.w13_weight)
        return self.compute(layer, x, topk_weights, topk_ids)

    def project(self, layer: Any, name: str, place: int, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return x times an expert's matrix w13 or w2. place: of the expert in the stack; dtype: of the result"""
        raise NotImplementedError

    def compute(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Return [tokens, H] of x [tokens, H] and topk_* [tokens, k]: the sum over experts in their order, in float32.

        A rank that shares experts, or their matrices, with other ranks computes its part of each expert's output for
        each token. These parts are added up over the ranks first, and then every rank sums over the experts.
        """
        parallel = layer.moe_config.moe_parallel_config
        shared = parallel.tp_size * parallel.ep_size > 1
        dtype = torch.float32 if parallel.tp_size > 1 else x.dtype
        expert_out = x.new_zeros((*topk_ids.shape, x.size(-1)), dtype=dtype)
        chosen = {expert: (topk_ids == expert).nonzero(as_tuple=True) for expert in topk_ids.unique().tolist()}
        for expert, (rows, choice) in chosen.items():
            place = expert if layer.expert_map is None else int(layer.expert_map[expert])
            if place >= 0:
                gate, up = self.project(layer, "w13", place, x[rows], x.dtype).chunk(2, -1)
                expert_out[rows, choice] = self.project(layer, "w2", place, F.silu(gate) * up, dtype)
        if shared:
            expert_out = sum_over_ranks(expert_out.float(), x.dtype)
        out = torch.zeros(x.shape, dtype=torch.float32)
        for rows, choice in chosen.values():
            out.index_add_(0, rows, expert_out[rows, choice].float() * topk_weights[rows, choice].float().unsqueeze(-1))
        return keep_on_first_rank(out.to(x.dtype)) if shared else out.to(x.dtype)


class EmulatedMoEMethod(ExpertLoop, QuantizedMoEMethod):
    """Multiplies dequantized copies of the stored weights."""

    kernel_name = "fp8.fprop (emulated)"

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.fp8_dequantized = None  # the first multiplication dequantizes the new bytes

    def project(self, layer: Any, name: str, place: int, x: Tensor, dtype: torch.dtype) -> Tensor:
        if layer.fp8_dequantized is None:
            operand = self.recipe.operand_dtype(layer.activations_dtype)
            layer.fp8_dequantized = [list(self.stored(layer, name).dequantize(operand)) for name in ("w13", "w2")]
        return fprop(x, layer.fp8_dequantized[name == "w2"][place], self.recipe, dtype)


class Bf16MoEMethod(ExpertLoop, PlainMoEMethod):
    """Multiplies weights in the model's dtype; for experts with adapters, which vLLM's kernel does not know."""

    kernel_name = "bf16 experts one by one"

    def project(self, layer: Any, name: str, place: int, x: Tensor, dtype: torch.dtype) -> Tensor:
        return F.linear(x.to(dtype), getattr(layer, f"{name}_weight")[place].to(dtype))
