"""Checks that ranks get equal parts of a model's heads and MLPs, in any precision, with NeMo RL's workers.

`worker_limits.py` checks the package's workers.

Sources: Megatron Core (`TransformerConfig.__post_init__` in
https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/transformer/transformer_config.py) and vLLM (a model's
attention, https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/models/llama.py) have one rule: whole
heads on each rank, and key-value heads that are shared out or, where ranks are more, repeated equally often.
"""

from collections.abc import Iterator

from nemo_fp8rl.commands.doctor.models.shape import Shape
from nemo_fp8rl.commands.doctor.recipe_plan import ENGINE, TRAINER, Plan
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.hf.divisibility import Dimension, check_divides


def reasons_indivisible(plan: Plan) -> Iterator[str]:
    """Yield the reasons why ranks cannot have equal parts, a sentence each."""
    if plan.uses_package_workers:
        return
    shape, experts = plan.shape, Dimension("moe_intermediate_size", plan.shape.expert_intermediate)
    yield from _reasons_of_side("trainer", f"{TRAINER}.tensor_model_parallel_size", plan.tensor, shape)
    yield from _uneven("trainer", f"{TRAINER}.expert_tensor_parallel_size", plan.expert_tensor, experts)
    key = f"{ENGINE}.tensor_parallel_size"
    yield from _reasons_of_side("engine", key, plan.engine_tensor, shape)
    yield from _uneven("engine", key, plan.engine_expert_tensor, experts)


def _reasons_of_side(side: str, key: str, parts: int, shape: Shape) -> Iterator[str]:
    dimensions = [Dimension("num_attention_heads", shape.heads)]
    if shape.has("mlp"):
        dimensions.append(Dimension("intermediate_size", shape.intermediate))
    if shape.recurrent:
        names = ("linear_num_key_heads", "linear_num_value_heads")
        if shape.has("mamba"):
            names = ("n_groups", "mamba_num_heads")
        dimensions += map(Dimension, names, (shape.recurrent.key_heads, shape.recurrent.heads))
    shared = Dimension("width of the shared experts", shape.shared_intermediate)
    yield from _uneven(side, key, parts, *dimensions, shared)
    kv = shape.kv_heads
    if not shape.kv_lora_rank and kv % parts and parts % kv:
        yield (
            f"{side}: {key}={parts} neither divides the model's num_key_value_heads={kv} of self_attn.k_proj nor is a "
            "multiple of them"
        )


def _uneven(side: str, key: str, parts: int, *dimensions: Dimension) -> Iterator[str]:
    try:
        check_divides(key, parts, *dimensions)
    except UserError as error:
        yield f"{side}: {error}"
