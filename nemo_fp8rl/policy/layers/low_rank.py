"""Megatron's parallel linear layers with a low-rank adapter beside the frozen weight (`fp8.low_rank`).

    column-parallel   A [r, K] is whole on every rank, B [N / ranks, r] has the rows of the weight
    row-parallel      A [r, K / ranks] has the columns of the weight, B [N, r] is whole on every rank

What ranks exchange for an adapter has r values a token. Every rank has the whole h = x A^T, so any rank r is possible.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
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
from nemo_fp8rl.fp8.low_rank import Product, partial_rank, reduce_rank
from nemo_fp8rl.hf.adapters import LORA_A, LORA_B


@dataclass
class AdapterState:
    """The state that all adapters of a model share.

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
        self.is_training = True
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                torch.manual_seed(Random(f"dropout {seed}").getrandbits(63))
                yield
        finally:
            self.is_training = False

    def drop(self, x: Tensor, position: Literal["pre", "post"]) -> Tensor:
        is_due = self.is_training and self.dropout and position == self.dropout_position
        return F.dropout(x, self.dropout) if is_due else x


class AdapterBeside:
    """A mixin of a layer with an adapter beside each of its weights.

    product:  multiplies by A and B
    """

    adapters: AdapterState
    product: Product = staticmethod(F.linear)
    config: Any
    is_expert: bool
    register_parameter: Callable[..., None]

    def _add_parameters(self, weight: Tensor, split: str | None, number: str = "") -> None:
        """Add the parameters beside a weight [N, K], whose rows B has, and whose columns A has.

        split:   the parameter of which ranks have parts; the other one is whole on every rank
        number:  of an expert, in a layer of many
        """
        rows, columns = weight.shape
        are_experts_split = self.is_expert and self.config.expert_model_parallel_size > 1
        for name, shape in ((LORA_A, (self.adapters.rank, columns)), (LORA_B, (rows, self.adapters.rank))):
            parameter: Any = torch.nn.Parameter(torch.empty(shape, dtype=self.config.params_dtype))
            parameter.allreduce = not are_experts_split  # by it Megatron chooses the ranks that sum the gradients
            if name == split or self.is_expert:
                set_tensor_model_parallel_attributes(parameter, True, int(name == LORA_A), 1)
            else:  # under sequence parallelism a rank has the gradient of its own tokens; Megatron sums them
                parameter.sequence_parallel = self.config.sequence_parallel
            self.register_parameter(f"{name}{number}", parameter)


class LowRank(AdapterBeside):
    """A mixin of a parallel linear layer of Megatron or Transformer Engine, which adds an adapter to its output."""

    split: str
    weight: Tensor
    lora_A: Tensor
    lora_B: Tensor
    tp_group: Any

    def __init__(self, *sizes: Any, is_expert: bool = False, **options: Any) -> None:
        super().__init__(*sizes, is_expert=is_expert, **options)  # type: ignore[call-arg]
        self.is_expert = is_expert
        self._add_parameters(self.weight, self.split)

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
        return output + state.drop(self.product(h, self.lora_B), "post") * state.scale, bias


class LowRankColumn(LowRank):
    split = LORA_B

    def _reduce(self, x: Tensor) -> Tensor:
        h = reduce_rank(x, self.lora_A, self.product)
        if not self.shares_tokens:
            return h
        if self.config.sequence_parallel:
            return gather_from_sequence_parallel_region(h, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(h, group=self.tp_group)


class LowRankRow(LowRank):
    split = LORA_A

    def _reduce(self, x: Tensor) -> Tensor:
        if not self.shares_tokens:
            return reduce_rank(x, self.lora_A, self.product)
        return self._sum(partial_rank(x, self.lora_A, self.product)).to(x.dtype)

    def _sum(self, part: Tensor) -> Tensor:
        """Return the sum of the ranks' parts, of all tokens or, under sequence parallelism, of this rank's."""
        if self.config.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(part, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(part, group=self.tp_group)


class LowRankExperts(AdapterBeside):
    """A mixin of Transformer Engine's layer that holds all experts of a rank, each with an adapter.

    Parameters are `lora_A0`, `lora_B0`, ... beside `weight0`, ...
    forward: x [tokens, K], `m_splits` rows for each expert -> ([tokens, N], None).
    """

    num_gemms: int

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.is_expert = True
        for i in range(self.num_gemms):
            self._add_parameters(getattr(self, f"weight{i}"), None, str(i))

    def forward(self, x: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(x, m_splits)  # type: ignore[misc]
        state = self.adapters
        if not state.is_enabled:
            return output, bias
        a, b = ([getattr(self, f"{name}{i}") for i in range(self.num_gemms)] for name in (LORA_A, LORA_B))
        h = self.multiply(state.drop(x, "pre"), a, m_splits, is_reduction=True)
        return output + state.drop(self.multiply(h, b, m_splits), "post") * state.scale, bias

    def multiply(
        self, x: Tensor, weights: Sequence[Tensor], m_splits: Sequence[int], is_reduction: bool = False
    ) -> Tensor:
        """Return each expert's rows of x [tokens, K] times its weight [N, K], [tokens, N].

        is_reduction:  the weights are A
        """
        product = partial(reduce_rank, product=self.product) if is_reduction else self.product
        parts = zip(x.split(list(m_splits)), weights, strict=True)
        return torch.cat([product(part, weight) for part, weight in parts])


def with_adapter(linear: type, is_row: bool, adapters: AdapterState) -> type:
    """Return the class of a linear layer with an adapter."""
    return mix(LowRankRow if is_row else LowRankColumn, linear, adapters)


def with_expert_adapters(linear: type, is_row: bool, adapters: AdapterState) -> type:
    """Return the class of a layer of many experts with an adapter for each."""
    return mix(LowRankExperts, linear, adapters)


def mix(mixin: type, linear: type, adapters: AdapterState) -> type:
    return type(f"LowRank{linear.__name__}", (mixin, linear), {"adapters": adapters})
