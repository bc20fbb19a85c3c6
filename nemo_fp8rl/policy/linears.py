"""Megatron's parallel linear layers with another matmul. A spec holds classes, so the choice is made in a class."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from nemo_fp8rl.fp8 import ScaleFormat, blockwise_fp8_linear


class OwnMatmul:
    """Mixed into a Megatron linear layer: replaces its matmul, and nothing else of it."""

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

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
        return self.matmul(input, weight, bias)


class Fp8Forward(OwnMatmul):
    """The contract's FP8 matmul; a bias is added to the rounded product, as the engine's linear does."""

    scale_format: ScaleFormat

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = blockwise_fp8_linear(x, weight, self.scale_format)
        return output if bias is None else output + bias


class FusedBias(OwnMatmul):
    """torch's own linear, which adds the bias before the one rounding, as vLLM's CPU linear does."""

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


def fp8_linear(linear: type, scale_format: ScaleFormat) -> type:
    return type(f"Fp8{linear.__name__}", (Fp8Forward, linear), {"scale_format": scale_format})


def aligned_linear(linear: type) -> type:
    return type(f"Aligned{linear.__name__}", (FusedBias, linear), {})
