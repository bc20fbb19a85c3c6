"""Memory of an engine's GPU, to the byte except for the workspace of a forward.

Cache: what the kinds of layers keep of a token (keys and values, or the latent) and of a sequence (the state of a
recurrence, or a window of keys and values): `models/layer_kinds.py`.
"""

from nemo_fp8rl.commands.doctor.memory.adapter_memory import engine_adapters
from nemo_fp8rl.commands.doctor.memory.byte_widths import BF16, GIB, engine_width
from nemo_fp8rl.commands.doctor.models.layer_kinds import LAYER_KINDS
from nemo_fp8rl.commands.doctor.models.sizes import Weight
from nemo_fp8rl.commands.doctor.recipe_plan import Plan

WORKSPACE = 2 * GIB
"""An assumption: the memory that vLLM reserves for a forward of its longest batch, with CUDA graphs."""


def engine_weights(plan: Plan) -> float:
    """Return the bytes of weights on the fullest GPU of an engine: quantized with scales, or bfloat16, and adapters."""
    shape = plan.shape
    layers = -(-shape.layers // plan.engine_pipeline)
    each = sum(_engine_bytes(plan, weight) for i in range(shape.layers) for weight in shape.layer(i)) / shape.layers
    embedding_and_head = sum(_engine_bytes(plan, weight) for weight in (shape.embedding(), *shape.head()))
    return each * layers + embedding_and_head + engine_adapters(plan)


def _engine_bytes(plan: Plan, weight: Weight) -> float:
    size = engine_width(plan.format) if plan.is_fp8_in_engine(weight) else BF16
    if weight.of_expert:
        return size * weight.elements / (plan.engine_expert if plan.engine_expert > 1 else plan.engine_tensor)
    parts = plan.engine_tensor if weight.split != "none" else 1
    if weight.name.endswith(("k_proj.weight", "v_proj.weight")):
        parts = min(parts, plan.shape.kv_heads)
    return size * weight.elements / parts


def kv_bytes_per_token(plan: Plan) -> float:
    """Return the bytes of cache for one token on each GPU of an engine."""
    kinds = (LAYER_KINDS[part] for layer in plan.shape.parts for part in layer)
    return _of_a_stage(plan, sum(kind.cached(plan.shape, plan.engine_tensor, _cached_width(plan)) for kind in kinds))


def state_bytes_per_sequence(plan: Plan) -> float:
    """Return the bytes that a sequence of any length has on each GPU of an engine, beside those of its tokens."""
    kinds = (LAYER_KINDS[part] for layer in plan.shape.parts for part in layer)
    return _of_a_stage(plan, sum(kind.state(plan.shape, plan.engine_tensor, _cached_width(plan)) for kind in kinds))


def _cached_width(plan: Plan) -> int:
    return 1 if plan.kv_fp8 else BF16


def _of_a_stage(plan: Plan, of_all_layers: float) -> float:
    """Return the part of the stage that has most layers."""
    return of_all_layers * -(-plan.shape.layers // plan.engine_pipeline) / plan.shape.layers


def cache_bytes(plan: Plan, gpu_memory: float, weights: float) -> float:
    """Return the cache size of vllm_kwargs, or what gpu_memory_utilization leaves beside weights and workspace."""
    if pinned := plan.vllm_kwargs.get("kv_cache_memory_bytes"):
        return pinned
    return gpu_memory * plan.vllm["gpu_memory_utilization"] - weights - WORKSPACE
