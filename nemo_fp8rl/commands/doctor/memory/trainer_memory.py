"""Memory of a GPU that trains: weights, gradients and optimizer to the byte, activations and logits as an estimate for
the longest microbatch.

Sources:
- Parameters, gradients, optimizer: bytes a parameter by Megatron Core's table
  https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/dist_optimizer.html: bfloat16 parameters (2)
  and gradients (2, or 4 with grad_reduce_in_fp32) whole on each replica; main parameters and two moments (12) shared by
  replicas, and with bfloat16 gradients a float32 copy of them (4), which the precision-aware optimizer does without.
- Transformer Engine keeps FP8 weights row-wise and column-wise beside the parameter between microbatches
  (`_fp8_workspaces` in https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/pytorch/module/base.py),
  with fp8_param instead of it. NeMo RL moves parameters, gradients and optimizer alone: the others stay on the GPU
  through refit and generation unless fp8_cfg.force_clear_fp8_caches, which v0.7.0 has, too (`offload_before_refit` in
  https://github.com/NVIDIA-NeMo/RL/blob/main/nemo_rl/models/policy/workers/megatron_policy_worker.py).
- Activations: what each operation keeps for its backward, counted as in section 4.1 of
  https://arxiv.org/abs/2205.05198, for grouped queries, a gated MLP and attention that does not keep its scores;
  bfloat16 throughout, experts balanced.
- Our workers keep gradients and optimizer in one way whatever the recipe says (`policy/optimizer.py`), recompute whole
  layers and the logits by chunks (`benchmarks/logprobs.py`), keep FP8 weights for one pass, and for deltas what they
  sent (`refit/sender/weight_sender.py`), which is not offloaded.
"""

from nemo_fp8rl.commands.doctor.memory.byte_widths import BF16, FP32, SCALE
from nemo_fp8rl.commands.doctor.model_shapes import Weight
from nemo_fp8rl.commands.doctor.recipe_plan import Plan
from nemo_fp8rl.config.policy_schema import PolicyConfig

FP8 = 2 * (1 + SCALE)
"""Bytes of an FP8 weight, by rows and by columns."""
FP8_WEIGHTS, KEPT = "FP8 weights", "kept for deltas"


def stage_parameters(plan: Plan, stage: int) -> tuple[float, float]:
    """Parameters on a GPU of a pipeline stage: (of what data-parallel replicas share, of experts)."""
    weights = _stage_weights(plan, stage)
    dense = sum(_on_rank(plan, weight) for weight in weights if not weight.of_expert)
    return dense, sum(_on_rank(plan, weight) for weight in weights if weight.of_expert)


def _stage_weights(plan: Plan, stage: int) -> list[Weight]:
    """The weights of a pipeline stage. With more than one, a tied head is a copy of the embedding on the last."""
    shape, weights = plan.shape, [weight for i in plan.stages[stage] for weight in plan.shape.layer(i)]
    first, last = stage == 0, stage == plan.pipeline - 1
    ends = [shape.embedding()] if first or (last and shape.tied) else []
    return [*weights, *ends, *(shape.head() if last else [])]


def _on_rank(plan: Plan, weight: Weight) -> float:
    if weight.of_expert:
        return weight.elements / (plan.expert * plan.expert_tensor)
    return weight.elements / (plan.tensor if weight.split != "none" else 1)


def training_bytes(plan: Plan, stage: int) -> dict[str, float]:
    """Bytes on a GPU of a pipeline stage, by name."""
    dense, expert = stage_parameters(plan, stage)
    gradient, state, shared = _optimizer(plan)
    replicas, expert_replicas = (plan.data * plan.context, plan.expert_data) if shared else (1, 1)
    parameters, fp8 = weight_bytes(plan, stage)
    parts = {
        "parameters": parameters,
        "gradients": gradient * (dense + expert),
        "optimizer": state * (dense / replicas + expert / expert_replicas),
        FP8_WEIGHTS: fp8 or quantized_bytes(plan, stage),
        "activations": activations(plan, stage),
        "logits": logits(plan) if stage == plan.pipeline - 1 else 0.0,
        KEPT: delta_base_bytes(plan, stage),
    }
    return {name: size for name, size in parts.items() if size}


def resident_bytes(plan: Plan, stage: int) -> dict[str, float]:
    """Bytes of what a trainer leaves on the GPU while others use it, by name."""
    cleared = plan.ours or plan.fp8_param or (plan.megatron.get("fp8_cfg") or {}).get("force_clear_fp8_caches")
    parts = {FP8_WEIGHTS: 0.0 if cleared else quantized_bytes(plan, stage), KEPT: delta_base_bytes(plan, stage)}
    return {name: size for name, size in parts.items() if size}


def quantized_bytes(plan: Plan, stage: int) -> float:
    """Bytes of FP8 weights beside the parameters; where our trainer recomputes, its backward quantizes again."""
    layers = [plan.shape.layer(i) for i in plan.stages[stage]]
    sizes = [sum(_on_rank(plan, one) for one in layer if plan.is_fp8_in_trainer(one)) for layer in layers]
    one_by_one = plan.ours and plan.megatron.get("activation_checkpointing")
    return FP8 * (max(sizes, default=0) if one_by_one else sum(sizes))


def weight_bytes(plan: Plan, stage: int) -> tuple[float, float]:
    """Bytes of weights that stay from step to step: in bfloat16, in FP8."""
    values = sum(stage_parameters(plan, stage))
    if not plan.fp8_param:
        return BF16 * values, 0.0
    linears = sum(_on_rank(plan, one) for one in _stage_weights(plan, stage) if plan.is_fp8_in_trainer(one))
    return BF16 * (values - linears), FP8 * linears


def refit_bytes(plan: Plan, stage: int) -> float:
    """Bytes of weights that a refit needs: of FP8 ones our trainer gives the columns back meanwhile."""
    parameters, fp8 = weight_bytes(plan, stage)
    return parameters + (fp8 / 2 if plan.ours else fp8)


def delta_base_bytes(plan: Plan, stage: int) -> float:
    """Bytes of what our rank sent last, for the next delta: at most all that it holds, as engines hold it."""
    if not (plan.ours and plan.takes_deltas):
        return 0.0
    weights = _stage_weights(plan, stage)
    return sum((1 + SCALE if plan.is_fp8_in_engine(one) else BF16) * _on_rank(plan, one) for one in weights)


def _optimizer(plan: Plan) -> tuple[int, float, bool]:
    """Bytes of a parameter's gradient, of its optimizer's state on the GPU, and whether replicas share the latter."""
    if plan.ours:
        return FP32, 3 * FP32, True
    ddp, optimizer = plan.megatron.get("distributed_data_parallel_config") or {}, plan.megatron["optimizer"]
    gradient = FP32 if ddp.get("grad_reduce_in_fp32") else BF16
    state = 3 * FP32 + (FP32 if gradient == BF16 and not optimizer.get("use_precision_aware_optimizer") else 0)
    on_gpu = 1 - (optimizer.get("optimizer_offload_fraction") or 0) * bool(optimizer.get("optimizer_cpu_offload"))
    return gradient, state * on_gpu, optimizer.get("use_distributed_optimizer", True)


def activations(plan: Plan, stage: int) -> float:
    """Bytes kept for the backward, of all microbatches in flight: as many as stages that are still to come."""
    tokens = plan.microbatch_tokens / plan.context
    layers = [_layer_activations(plan, i) for i in plan.stages[stage]]
    in_flight = plan.pipeline - stage
    full = plan.ours or plan.megatron.get("recompute_granularity") in (None, "full")
    if plan.megatron.get("activation_checkpointing") and full:
        inputs = BF16 * plan.shape.hidden / (plan.tensor if plan.sequence_parallel else 1)
        return tokens * (in_flight * inputs * len(layers) + max(layers, default=0))
    return tokens * in_flight * sum(layers)


def _layer_activations(plan: Plan, layer: int) -> float:
    """Bytes a token that one layer keeps on one GPU.

    Both norms and what follows them keep their inputs (4 x hidden); queries, keys, values and the attention's output; a
    gated MLP its gate, up and product (3 x intermediate). A token's experts keep their inputs and outputs, too.
    """
    shape, tensor = plan.shape, plan.tensor
    hidden = shape.hidden / (tensor if plan.sequence_parallel else 1)
    keys = shape.heads if shape.kv_lora_rank else shape.kv_heads
    attention = (shape.heads + keys) * (shape.head_dim + shape.value_dim) / tensor
    values = 4 * hidden + attention
    if not shape.is_mixture(layer):
        return BF16 * (values + 3 * shape.intermediate / tensor)
    tokens = shape.experts_per_token / (tensor if plan.sequence_parallel else 1)  # of the rank's, sent to experts
    experts = tokens * (2 * shape.hidden + 3 * shape.expert_intermediate / plan.expert_tensor)
    shared = 3 * shape.shared_experts * shape.expert_intermediate / tensor
    return BF16 * (values + experts + shared)


def logits(plan: Plan) -> float:
    """Bytes of the last stage's logits: in bfloat16, in float32, and float32 gradients.

    The latter two a chunk at a time with logprob_chunk_size (nemo_rl/distributed/model_utils.py); ours are never whole.
    """
    tokens, vocabulary = plan.microbatch_tokens / plan.context, plan.shape.vocab / plan.tensor
    if plan.ours:
        chunk = plan.policy.get("logprob_chunk_size") or PolicyConfig.logprob_chunk_size
        return vocabulary * 2 * FP32 * min(chunk, tokens)
    chunk = plan.policy.get("logprob_chunk_size") or tokens
    if plan.megatron.get("use_fused_linear_logprobs"):
        tokens = chunk = plan.megatron.get("fused_linear_logprobs_chunk_size") or 256
    whole = BF16 * (1 if chunk == tokens else 2)
    return vocabulary * (whole * tokens + 2 * FP32 * min(chunk, tokens))
