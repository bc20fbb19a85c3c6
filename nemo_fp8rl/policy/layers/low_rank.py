"""Megatron's parallel linear layers with a low-rank adapter beside the frozen weight (`fp8.low_rank`).

    column-parallel   A [r, K] is whole on every rank, B [N / ranks, r] has the rows of the weight
    row-parallel      A [r, K / ranks] has the columns of the weight, B [N, r] is whole on every rank

What ranks exchange for an adapter has r values a token. Every rank has the whole h = x A^T, so any rank r is possible.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from nemo_fp8rl.config.policy_schema import PeftConfig
from nemo_fp8rl.fp8.low_rank import Product, partial_rank


@dataclass
class AdapterState:
    """What the adapters of a model have in common.

    scale:      factor of their output
    is_enabled: False computes the base alone, which is the reference policy
    is_training: True in a training step, where values are dropped
    """

    rank: int
    scale: float
    dropout: float = 0.0
    dropout_position: Literal["pre", "post"] = "post"
    is_enabled: bool = True
    is_training: bool = False

    @classmethod
    def of(cls, peft: PeftConfig) -> "AdapterState":
        return cls(peft.dim, peft.alpha / peft.dim, peft.dropout, peft.dropout_position)

    @contextmanager
    def training(self, device: torch.device, *seed: int) -> Iterator[None]:
        """Drop values within the block, by a generator that starts from these numbers; torch's own is left as it was.

        Layers that are computed again drop the same values, because Megatron then restores the generator's state.
        """
        if not self.dropout:
            yield
            return
        digest = hashlib.sha256(" ".join(map(str, ("dropout", *seed))).encode()).digest()
        self.is_training = True
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                yield
        finally:
            self.is_training = False

    def drop(self, x: Tensor, position: Literal["pre", "post"]) -> Tensor:
        is_due = self.is_training and self.dropout and position == self.dropout_position
        return F.dropout(x, self.dropout) if is_due else x


class LowRank:
    """A mixin of a parallel linear layer: it adds an adapter to the layer's output.

    product:  multiplies by A and B
    """

    adapters: AdapterState
    product: Product = staticmethod(F.linear)
    config: Any
    is_expert: bool
    sequence_parallel: bool
    tp_group: Any
    register_parameter: Callable[..., None]

    def _add_parameters(self, rows: int, columns: int, split: str) -> None:
        """split: the parameter of which ranks have parts; the other one is whole on every rank."""
        shapes = {"lora_A": (self.adapters.rank, columns), "lora_B": (rows, self.adapters.rank)}
        for name, shape in shapes.items():
            parameter = torch.nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype))
            if name == split or self.is_expert:
                set_tensor_model_parallel_attributes(parameter, True, int(name == "lora_A"), 1)
            else:  # under sequence parallelism a rank has the gradient of its own tokens; Megatron sums them
                parameter.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
            self.register_parameter(name, parameter)

    @property
    def shares_tokens(self) -> bool:
        """True if tensor-parallel ranks compute parts of one output; experts with adapters are whole on their rank."""
        return not self.is_expert and self.tp_group.size() > 1

    def _reduce(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_, *args, **kwargs)  # type: ignore[misc]
        state = self.adapters
        if not state.is_enabled:
            return output, bias
        h = self._reduce(state.drop(input_, "pre"))
        added = state.drop(self.product(h, self.lora_B), "post") * state.scale  # type: ignore[attr-defined]
        return output + added, bias


class LowRankColumn(LowRank):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._add_parameters(self.output_size_per_partition, self.input_size, "lora_B")  # type: ignore[attr-defined]

    def _reduce(self, x: Tensor) -> Tensor:
        h = self.product(x, self.lora_A)  # type: ignore[attr-defined]
        if not self.shares_tokens:
            return h
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(h, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(h, group=self.tp_group)


class LowRankRow(LowRank):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._add_parameters(self.output_size, self.input_size_per_partition, "lora_A")  # type: ignore[attr-defined]

    def _reduce(self, x: Tensor) -> Tensor:
        a = self.lora_A  # type: ignore[attr-defined]
        if not self.shares_tokens:
            return self.product(x, a)
        part = partial_rank(x, a)
        if self.config.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(part, group=self.tp_group).to(x.dtype)
        return reduce_from_tensor_model_parallel_region(part, group=self.tp_group).to(x.dtype)


def with_adapter(linear: type, is_row: bool, adapters: AdapterState, product: Product = F.linear) -> type:
    """Return the class of a linear layer with an adapter."""
    mixin = LowRankRow if is_row else LowRankColumn
    attributes = {"adapters": adapters, "product": staticmethod(product)}
    return type(f"LowRank{linear.__name__}", (mixin, linear), attributes)
