"""Keep the engine's bfloat16 layers in bfloat16 in NeMo RL's own trainer, too. Free of torch, for `doctor`."""

from collections.abc import Mapping
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.fp8.layers import Fp8Layers
from nemo_fp8rl.nemo_rl.recipe.precision import VLLM_CFG

BF16_LAYERS = "first_last_layers_bf16"
"""Megatron Core's key that keeps the first and last layers in bfloat16; NeMo RL has no key of its own for this."""
MODEL_OVERRIDES = "model_overrides"
"""Key of the block megatron_cfg that sets fields of Megatron Core's model config by their own names."""


def add_bf16_layers(megatron: Mapping[str, Any], layers: Fp8Layers, num_hidden_layers: int) -> dict[str, Any]:
    """Return a copy of the block `megatron_cfg` that keeps the engine's first and last bfloat16 layers in bfloat16.

    Raises: UserError if the recipe's own model_overrides name other layers, or if Megatron Core cannot keep so many
    """
    first, last = layers.first, num_hidden_layers - layers.end
    layer_keys: dict[str, Any] = {BF16_LAYERS: False}
    if first or last:
        layer_keys = {BF16_LAYERS: True, "num_layers_at_start_in_bf16": first, "num_layers_at_end_in_bf16": last}
    overrides = megatron.get(MODEL_OVERRIDES) or {}
    for key, value in layer_keys.items():
        if overrides.get(key, value) != value:
            raise UserError(
                f"policy.megatron_cfg.{MODEL_OVERRIDES}.{key}={overrides[key]} gives the trainer other bfloat16 layers "
                f"than the engine has, {first} first and {last} last ones: leave it out"
            )
    stage = num_hidden_layers // (megatron.get("pipeline_model_parallel_size") or 1)
    if max(first, last) > stage:
        raise UserError(
            f"{VLLM_CFG}.num_first_layers_in_bf16={first} and num_last_layers_in_bf16={last}: Megatron Core keeps at "
            f"most as many layers in bfloat16 as a pipeline stage has, {stage}; lower them, or policy.megatron_cfg."
            "pipeline_model_parallel_size"
        )
    return {**megatron, MODEL_OVERRIDES: {**overrides, **layer_keys}} if layer_keys[BF16_LAYERS] else dict(megatron)
