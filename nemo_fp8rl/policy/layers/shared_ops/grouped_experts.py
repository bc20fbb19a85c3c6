"""Layers of Transformer Engine that hold all experts of a rank, with the values of the shared products.

Their gradients stay Transformer Engine's. The product is computed twice, so these layers are only for what Transformer
Engine does not multiply as engines do: weights in bfloat16, and FP8 where it has other bits.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_fp8rl.fp8 import BLOCK, ScaleFormat, quantize_blockwise
from nemo_fp8rl.ops.experts import experts_linear, tiles_of_experts


class SharedValues:
    """A mixin before such a layer.

    forward: x [tokens, K], `m_splits` rows for each expert -> ([tokens, N], None).
    scale_format:  of FP8 weights; None multiplies in the weights' precision
    """

    num_gemms: int
    scale_format: ScaleFormat | None

    def forward(self, x: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(x, m_splits)  # type: ignore[misc]
        return ValueOf.apply(output, self._values(x, m_splits)), bias

    @torch.no_grad()
    def _values(self, x: Tensor, m_splits: Sequence[int]) -> Tensor:
        weight, scales = torch.stack([getattr(self, f"weight{i}") for i in range(self.num_gemms)]), None
        if self.scale_format is not None:
            stored = quantize_blockwise(weight, block=BLOCK, scale_format=self.scale_format)
            weight, scales = stored.data, stored.scale_inv
        return multiply_experts(x, weight, scales, m_splits, self.scale_format == "pow2")


def multiply_experts(x: Tensor, weight: Tensor, scales: Tensor | None, m_splits: Sequence[int], pow2: bool) -> Tensor:
    """Return x [tokens, K] times its experts' weights [E, N, K], [tokens, N]; see `experts_linear`.

    m_splits:  the rows of each expert
    """
    counts = torch.tensor(m_splits, device=x.device)
    expert = torch.arange(len(weight), device=x.device).repeat_interleave(counts, output_size=len(x))
    return experts_linear(x, weight, scales, tiles_of_experts(expert.unsqueeze(1), len(weight)), 1, pow2)


class ValueOf(torch.autograd.Function):
    """apply(differentiable, value) -> value, with the gradient of `differentiable`; both have one shape."""

    @staticmethod
    def forward(ctx: Any, differentiable: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


@functools.cache
def shared_values(
    layers: tuple[type, type], scale_format: ScaleFormat | None, mismatches: tuple[str, ...]
) -> tuple[type, type]:
    """Return the column- and row-parallel layers with shared values.

    layers:  Transformer Engine's
    mismatches:  matrices in which Transformer Engine has other bits
    """
    attributes: dict[str, Any] = {"scale_format": scale_format}
    if scale_format is not None:
        attributes["kernel_name"] = f"ops.experts (Transformer Engine has other bits in {', '.join(mismatches)})"
    column, row = (type(f"Shared{layer.__name__}", (SharedValues, layer), attributes) for layer in layers)
    return column, row
