"""Layers that NeMo RL's own trainer keeps in bfloat16, as the engine has them; no torch, so that `doctor` may ask."""

from collections.abc import Mapping
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.fp8.layers import Fp8Layers
from nemo_fp8rl.nemo_rl.recipe.precision import ENGINE

BF16_LAYERS = "first_last_layers_bf16"
"""Megatron Core's key for keeping the first and last layers from its FP8 recipe, for which NeMo RL has none."""
MODEL_OVERRIDES = "model_overrides"
"""Key of the block megatron_cfg: fields of Megatron Core's model config, by their own names."""


def with_bf16_layers(megatron: Mapping[str, Any], layers: Fp8Layers, num_hidden_layers: int) -> dict[str, Any]:
    """The block `megatron_cfg` with the engine's first and last layers in bfloat16, a copy.

    Raises UserError where the recipe says other ones by itself, and where Megatron Core cannot have so many.
    """
    first, last = layers.first, num_hidden_layers - layers.end
    wanted: dict[str, Any] = {BF16_LAYERS: False}
    if first or last:
        wanted = {BF16_LAYERS: True, "num_layers_at_start_in_bf16": first, "num_layers_at_end_in_bf16": last}
    given = megatron.get(MODEL_OVERRIDES) or {}
    for key, value in wanted.items():
        if given.get(key, value) != value:
            raise UserError(
                f"policy.megatron_cfg.{MODEL_OVERRIDES}.{key}={given[key]} gives the trainer other layers in bfloat16 "
                f"than the engine has, {first} first and {last} last ones: leave it out"
            )
    stage = num_hidden_layers // (megatron.get("pipeline_model_parallel_size") or 1)
    if max(first, last) > stage:
        raise UserError(
            f"{ENGINE}.num_first_layers_in_bf16={first} and num_last_layers_in_bf16={last}: Megatron Core keeps at "
            f"most as many layers in bfloat16 as a pipeline stage has, {stage}; lower them, or policy.megatron_cfg."
            "pipeline_model_parallel_size"
        )
    return {**megatron, MODEL_OVERRIDES: {**given, **wanted}} if wanted[BF16_LAYERS] else dict(megatron)
