"""Methods of vLLM's linear layers with a low-rank adapter: the sum of `fp8.low_rank`, as the trainer computes it.

A layer stores A and B beside its weights as plain tensors `lora_A` and `lora_B`, which no loader of vLLM knows and
which each refit writes in place. So there is no merge, and no new adapter for each version.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import RowParallelLinear

from nemo_fp8rl.fp8.low_rank import Product, add_low_rank, expand_rank, partial_rank
from nemo_fp8rl.generation.fp8_method.on_cpu.rank_sums import keep_on_first_rank, sum_exactly, sum_over_ranks
from nemo_fp8rl.hf.adapters import Adapters


class LowRankLinear:
    """A mixin of a linear method.

    A row-parallel layer leaves the sum over ranks to it, because an adapter is added to the rounded sum.

    is_aligned:  multiply by the operations that the engine shares with the trainer
    """

    adapters: Adapters
    is_aligned: bool
    shares_tokens: bool

    def create_weights(self, layer: Any, **sizes: Any) -> None:
        super().create_weights(layer, **sizes)  # type: ignore[misc]
        rows, columns = sum(sizes["output_partition_sizes"]), sizes["input_size_per_partition"]
        layer.lora_A = torch.zeros(self.adapters.rank, columns, dtype=sizes["params_dtype"])
        layer.lora_B = torch.zeros(rows, self.adapters.rank, dtype=sizes["params_dtype"])
        self.shares_tokens = isinstance(layer, RowParallelLinear) and layer.tp_size > 1
        if self.shares_tokens:
            layer.reduce_results = False  # vLLM's forward then returns what `apply` returns

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = super().apply(layer, x, bias)  # type: ignore[misc]
        if not self.shares_tokens:
            return add_adapter(y, x, layer.lora_A, layer.lora_B, self.adapters.scale, self.is_aligned)
        part = partial_rank(x, layer.lora_A, _product(self.is_aligned))
        y, h = self._sum(layer, y), self._sum(layer, part).to(x.dtype)
        return expand_adapter(y, h, layer.lora_B, self.adapters.scale, self.is_aligned)

    def _sum(self, layer: Any, part: Tensor) -> Tensor:
        """Return the sum of a part over ranks; an aligned engine adds as `shared_ops.row_parallel` does."""
        if self.is_aligned:
            from nemo_fp8rl.ops.rank_sum import UNORDERED_RANKS, sum_in_rank_order

            if layer.tp_size > UNORDERED_RANKS:
                parts = tensor_model_parallel_all_gather(part.contiguous(), dim=0)
                return sum_in_rank_order(parts.view(layer.tp_size, *part.shape))
        return sum_exactly(part, layer.tp_size)


class ExpertAdapters:
    """A mixin of a method of experts.

    A layer stores `w13_lora_A` [E, r, H], `w13_lora_B` [E, 2 * I, r], `w2_lora_A` [E, r, I] and `w2_lora_B` [E, H, r],
    as far as these modules have adapters.
    """

    adapters: Adapters
    stacks: tuple[str, ...]

    def create_weights(self, layer: Any, **sizes: Any) -> None:
        super().create_weights(layer, **sizes)  # type: ignore[misc]
        hidden, size = sizes["hidden_size"], sizes["intermediate_size_per_partition"]
        experts, rank, dtype = sizes["num_experts"], self.adapters.rank, sizes["params_dtype"]
        for name, rows, columns in (("w13", 2 * size, hidden), ("w2", hidden, size)):
            if name in self.stacks:
                setattr(layer, f"{name}_lora_A", torch.zeros(experts, rank, columns, dtype=dtype))
                setattr(layer, f"{name}_lora_B", torch.zeros(experts, rows, rank, dtype=dtype))


class LoopAdapters(ExpertAdapters):
    """A mixin of a method that computes expert after expert (`on_cpu.emulated_experts.ExpertLoop`)."""

    def project(self, layer: Any, name: str, place: int, x: Tensor, dtype: torch.dtype) -> Tensor:
        y = super().project(layer, name, place, x, dtype)  # type: ignore[misc]
        if name not in self.stacks:
            return y
        a, b = getattr(layer, f"{name}_lora_A")[place], getattr(layer, f"{name}_lora_B")[place]
        if name == "w13" or layer.moe_config.moe_parallel_config.tp_size == 1:
            return add_low_rank(y, x, a, b, self.adapters.scale)
        # ranks share the columns of w2, and an adapter is added to the rounded sum
        h = sum_exactly(partial_rank(x, a), layer.moe_config.moe_parallel_config.tp_size).to(x.dtype)
        whole = expand_rank(sum_over_ranks(y, x.dtype), h, b, self.adapters.scale)
        return keep_on_first_rank(whole).to(dtype)


class GroupedAdapters(ExpertAdapters):
    """A mixin of a method that computes all experts at once, on a GPU; ranks do not share an expert's matrices."""

    def adapt(self, layer: Any, name: str, y: Tensor, x: Tensor, topk_ids: Tensor) -> Tensor:
        if name not in self.stacks:
            return y
        from nemo_fp8rl.ops.experts import experts_linear, tiles_of_experts

        tiles = tiles_of_experts(topk_ids, layer.global_num_experts, layer.expert_map)
        top_k = topk_ids.size(1) if name == "w13" else 1
        h = experts_linear(x, getattr(layer, f"{name}_lora_A"), None, tiles, top_k, True)
        d = experts_linear(h, getattr(layer, f"{name}_lora_B"), None, tiles, 1, True)
        return y + (d * self.adapters.scale).view_as(y)


def _product(is_aligned: bool) -> Product:
    if not is_aligned:
        return F.linear
    from nemo_fp8rl.ops.matmul import linear

    return linear


@torch.library.custom_op("nemo_fp8rl::add_adapter", mutates_args=())
def add_adapter(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, is_aligned: bool) -> Tensor:
    """Return `add_low_rank` as one operation, into which torch.compile does not look: it would round once."""
    return add_low_rank(y, x, a, b, scale, _product(is_aligned))


@torch.library.custom_op("nemo_fp8rl::expand_adapter", mutates_args=())
def expand_adapter(y: Tensor, h: Tensor, b: Tensor, scale: float, is_aligned: bool) -> Tensor:
    """Return `expand_rank` as one operation."""
    return expand_rank(y, h, b, scale, _product(is_aligned))


@add_adapter.register_fake
def _(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, is_aligned: bool) -> Tensor:
    return torch.empty_like(y)


@expand_adapter.register_fake
def _(y: Tensor, h: Tensor, b: Tensor, scale: float, is_aligned: bool) -> Tensor:
    return torch.empty_like(y)


def with_adapter(method: Any, adapters: Adapters, is_aligned: bool) -> Any:
    """Let a method of a linear layer add an adapter."""
    return _mix(method, LowRankLinear, {"adapters": adapters, "is_aligned": is_aligned})


def with_expert_adapters(method: Any, adapters: Adapters, prefix: str) -> Any:
    """Let a method of a layer's experts add adapters. prefix: the name of the experts' module"""
    names = {"w13": f"{prefix}.gate_up_proj", "w2": f"{prefix}.down_proj"}
    stacks = tuple(stack for stack, name in names.items() if adapters.adapts(name))
    mixin = LoopAdapters if hasattr(method, "project") else GroupedAdapters
    return _mix(method, mixin, {"adapters": adapters, "stacks": stacks})


def _mix(method: Any, mixin: type, attributes: dict[str, Any]) -> Any:
    """Return the method with the mixin; the class keeps its name, by which vLLM chooses loaders."""
    kind = type(method)
    adapter_method: Any = object.__new__(type(kind.__name__, (mixin, kind), attributes))
    vars(adapter_method).update(vars(method))
    return adapter_method
