"""vLLM's norm, activation and rotation, computed by shared operations in an aligned engine.

Each class is vLLM's own but for `dispatch_forward`, by which vLLM chooses a forward when it constructs the layer. In an
engine that is not aligned the choice is vLLM's.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import (
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)

from nemo_fp8rl.generation.fp8_method.shared_ops.engine_choice import is_aligned_engine
from nemo_fp8rl.ops.activation import silu_mul
from nemo_fp8rl.ops.norm import add_rms_norm, rms_norm
from nemo_fp8rl.ops.rope import rotate


class SharedForward:
    """A mixin before a class of vLLM: `shared_forward` in an aligned engine, else vLLM's forward."""

    shared_forward: Callable[..., Any]

    def dispatch_forward(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        if is_aligned_engine():
            return self.shared_forward
        return super().dispatch_forward(*args, **kwargs)  # type: ignore[misc]


class SharedRMSNorm(SharedForward, RMSNorm):
    """The norm of x, or of the rounded sum of x and the residual."""

    def shared_forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if not self.has_weight or self.variance_size_override is not None:
            raise ValueError("nemo_fp8rl.align=vllm: the model has a norm without weights, or of a part of each row")
        if residual is None:
            return rms_norm(x, self.weight, self.variance_epsilon)
        return add_rms_norm(x, residual, self.weight, self.variance_epsilon)


class SharedSiluAndMul(SharedForward, SiluAndMul):
    def shared_forward(self, x: Tensor) -> Tensor:
        return silu_mul(x)


class SharedRotation(SharedForward):
    """The rotation of a `RotaryEmbedding`, by a table that is computed on the host.

    vLLM computes the table where the model is, and a GPU's `pow` and `cos` are not the host's. The formula is vLLM's,
    which on the host gives the trainer's table to the bit (policy/layers/rope.py).
    """

    head_size: int
    rotary_dim: int
    is_neox_style: bool
    _match_cos_sin_cache_dtype: Callable[[Tensor], Tensor]

    def _compute_cos_sin_cache(self) -> Tensor:
        if not is_aligned_engine():
            return super()._compute_cos_sin_cache()  # type: ignore[misc]
        with torch.device("cpu"):
            table = super()._compute_cos_sin_cache()  # type: ignore[misc]
        return table.to(torch.get_default_device())

    def shared_forward(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Any]:
        if self.rotary_dim != self.head_size or not self.is_neox_style:
            raise ValueError("nemo_fp8rl.align=vllm: the model rotates a part of each head, or neighbouring values")
        positions, table = positions.flatten(), self._match_cos_sin_cache_dtype(query)

        def rotated(x: Tensor) -> Tensor:
            return rotate(x.view(len(positions), -1, self.head_size), positions, table).view(x.shape)

        return rotated(query), None if key is None else rotated(key)


class SharedRotaryEmbedding(SharedRotation, RotaryEmbedding):
    pass


class SharedLlama3RotaryEmbedding(SharedRotation, Llama3RotaryEmbedding):
    pass


class SharedYaRNScalingRotaryEmbedding(SharedRotation, YaRNScalingRotaryEmbedding):
    pass


class SharedLinearScalingRotaryEmbedding(SharedRotation, LinearScalingRotaryEmbedding):
    pass


LAYERS: dict[str, type] = {
    "RMSNorm": SharedRMSNorm,
    "SiluAndMul": SharedSiluAndMul,
    "RotaryEmbedding": SharedRotaryEmbedding,
    "Llama3RotaryEmbedding": SharedLlama3RotaryEmbedding,
    "YaRNScalingRotaryEmbedding": SharedYaRNScalingRotaryEmbedding,
    "LinearScalingRotaryEmbedding": SharedLinearScalingRotaryEmbedding,
}
"""By the names of vLLM's classes, which are those of its registry."""
