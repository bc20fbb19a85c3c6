"""Megatron's parallel linear layers with the contract's FP8 matmul."""

from typing import Any

from torch import Tensor

from nemo_fp8rl.fp8 import ScaleFormat, blockwise_fp8_linear


class Fp8Forward:
    """Replaces the matmul of a Megatron linear layer, and nothing else of it."""

    scale_format: ScaleFormat

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        **_: Any,
    ) -> Tensor:
        assert not allreduce_dgrad and not sequence_parallel  # one tensor-parallel rank
        output = blockwise_fp8_linear(input, weight, self.scale_format)
        return output if bias is None else output + bias


def fp8_linear(linear: type, scale_format: ScaleFormat) -> type:
    """Megatron's parallel linear class with the FP8 matmul: a spec holds classes, so the choice is made here."""
    return type(f"Fp8{linear.__name__}", (Fp8Forward, linear), {"scale_format": scale_format})
