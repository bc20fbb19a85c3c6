"""Methods of vLLM's linear layers with a low-rank adapter: the sum of `fp8.low_rank`, as the trainer computes it.

A layer stores A and B beside its weights as plain tensors `lora_A` and `lora_B`, which no loader of vLLM knows and
which each refit writes in place. So there is no merge, and no new adapter for each version.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.linear import RowParallelLinear

from nemo_fp8rl.fp8.low_rank import add_low_rank, expand_rank, partial_rank
from nemo_fp8rl.hf.adapters import Adapters


class LowRankLinear:
    """A mixin of a linear method."""

    adapters: Adapters

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
        sizes = input_size_per_partition, output_partition_sizes, input_size, output_size
        super().create_weights(layer, *sizes, params_dtype, **extra)  # type: ignore[misc]
        layer.lora_A = torch.zeros(self.adapters.rank, input_size_per_partition, dtype=params_dtype)
        layer.lora_B = torch.zeros(sum(output_partition_sizes), self.adapters.rank, dtype=params_dtype)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = super().apply(layer, x, bias)  # type: ignore[misc]
        if not (isinstance(layer, RowParallelLinear) and layer.tp_size > 1):
            return add_adapter(y, x, layer.lora_A, layer.lora_B, self.adapters.scale)
        h = tensor_model_parallel_all_reduce(partial_rank(x, layer.lora_A)).to(x.dtype)
        # vLLM adds up what the ranks return
        return y if get_tensor_model_parallel_rank() else expand_adapter(y, h, layer.lora_B, self.adapters.scale)


class LowRankExperts:
    """A mixin of a method that computes expert after expert (`on_cpu.emulated_experts.ExpertLoop`).

    A layer stores `w13_lora_A` [E, r, H], `w13_lora_B` [E, 2 * I, r], `w2_lora_A` [E, r, I] and `w2_lora_B` [E, H, r],
    as far as these modules have adapters.
    """

    adapters: Adapters
    stacks: tuple[str, ...]

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        size, rank = intermediate_size_per_partition, self.adapters.rank
        super().create_weights(layer, num_experts, hidden_size, size, params_dtype, **extra)  # type: ignore[misc]
        for name, rows, columns in (("w13", 2 * size, hidden_size), ("w2", hidden_size, size)):
            if name in self.stacks:
                setattr(layer, f"{name}_lora_A", torch.zeros(num_experts, rank, columns, dtype=params_dtype))
                setattr(layer, f"{name}_lora_B", torch.zeros(num_experts, rows, rank, dtype=params_dtype))

    def project(self, layer: Any, name: str, place: int, x: Tensor, dtype: torch.dtype) -> Tensor:
        y = super().project(layer, name, place, x, dtype)  # type: ignore[misc]
        if name not in self.stacks:
            return y
        a, b = getattr(layer, f"{name}_lora_A")[place], getattr(layer, f"{name}_lora_B")[place]
        return add_low_rank(y, x, a, b, self.adapters.scale)


@torch.library.custom_op("nemo_fp8rl::add_adapter", mutates_args=())
def add_adapter(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return `add_low_rank` as one operation, into which torch.compile does not look: it would round once."""
    return add_low_rank(y, x, a, b, scale)


@torch.library.custom_op("nemo_fp8rl::expand_adapter", mutates_args=())
def expand_adapter(y: Tensor, h: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return `expand_rank` as one operation."""
    return expand_rank(y, h, b, scale)


@add_adapter.register_fake
def _(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.empty_like(y)


@expand_adapter.register_fake
def _(y: Tensor, h: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.empty_like(y)


def with_adapter(method: Any, adapters: Adapters) -> Any:
    """Let a method of a linear layer add an adapter."""
    return _mix(method, LowRankLinear, {"adapters": adapters})


def with_expert_adapters(method: Any, adapters: Adapters, prefix: str) -> Any:
    """Let a method of a layer's experts add adapters. prefix: the name of the experts' module"""
    names = {"w13": f"{prefix}.gate_up_proj", "w2": f"{prefix}.down_proj"}
    stacks = tuple(stack for stack, name in names.items() if adapters.adapts(name))
    return _mix(method, LowRankExperts, {"adapters": adapters, "stacks": stacks})


def _mix(method: Any, mixin: type, attributes: dict[str, Any]) -> Any:
    """Return the method with the mixin; the class keeps its name, by which vLLM chooses loaders."""
    kind = type(method)
    mixed: Any = object.__new__(type(kind.__name__, (mixin, kind), attributes))
    vars(mixed).update(vars(method))
    return mixed
