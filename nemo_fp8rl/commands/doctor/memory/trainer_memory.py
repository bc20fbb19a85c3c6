"""Memory of a GPU that trains: weights, gradients and optimizer to the byte; activations and logits are an estimate for
the longest microbatch.

Sources:
- Parameters, gradients, optimizer: `trained_parameter.py`. Parameters and gradients are whole on each replica, masters
  and moments shared by replicas. Copies that an optimizer step makes are freed after it, so a GPU has them or
  activations and logits, never both.
- NeMo RL hands its block policy.megatron_cfg.optimizer to Megatron as it is, and since its PR #3281 also the FP8 recipe
  of fp8_cfg (`_create_megatron_config` in nemo_rl/models/megatron/setup.py). Earlier versions have 2 bytes less with
  FP8 and the precision-aware optimizer.
- With optimizer_cpu_offload the moments are on the host; masters and copies of gradients stay on the GPU, unless the
  optimizer is precision-aware (`_build_model_and_main_param_groups` in
  https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/optimizer/distrib_optimizer.py), and NeMo RL does not
  move them between phases. What stays of the optimizer on the GPU is float32 (`optimizer/cpu_offloading/`).
- Transformer Engine keeps FP8 weights row-wise and column-wise beside the parameter between microbatches
  (`_fp8_workspaces` in https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/pytorch/module/base.py),
  with fp8_param instead of it. NeMo RL moves parameters, gradients and optimizer alone: the others stay on the GPU
  through refit and generation unless fp8_cfg.force_clear_fp8_caches, which v0.7.0 has, too (`offload_before_refit` in
  https://github.com/NVIDIA-NeMo/RL/blob/main/nemo_rl/models/policy/workers/megatron_policy_worker.py).
- Activations: what each kind of layer keeps for its backward (`models/layer_kinds.py`), bfloat16 throughout, experts
  balanced.
- The package's workers split the optimizer and leave it on the GPU whatever the recipe says (`policy/optimizer/`),
  recompute whole layers and the logits by chunks (`benchmarks/logprobs.py`), keep FP8 weights for one pass, and keep
  the bytes that they sent as the base of deltas (`refit/sender/weight_sender.py`) on the GPU.
- With low-rank adapters only these have gradients and an optimizer's state, and the package's trainer frees gradients
  between steps: by default a parameter has 14 bytes then, and 18 in a step. That trainer has the frozen base once, in
  its format (`QuantizedMatmul.freeze`; of an FP8 base Transformer Engine has a transposed copy in a training step),
  which is its reference policy as well.
"""

from nemo_fp8rl.commands.doctor.memory.adapter_memory import adapter_parameters
from nemo_fp8rl.commands.doctor.memory.byte_widths import BF16, FP32, sent_width
from nemo_fp8rl.commands.doctor.memory.trained_parameter import TrainedParameter, trained_parameter
from nemo_fp8rl.commands.doctor.models.layer_kinds import LAYER_KINDS, expert_kept
from nemo_fp8rl.commands.doctor.models.sizes import Weight
from nemo_fp8rl.commands.doctor.recipe_plan import Plan
from nemo_fp8rl.config.policy_schema import PolicyConfig
from nemo_fp8rl.fp8 import FP8

FP8_WEIGHTS, OPTIMIZER, DELTA_BASE = "quantized weights", "optimizer", "kept for deltas"
COPIES = "copies in the optimizer's step"
FROZEN, ADAPTERS = "frozen base", "adapters"


def stage_parameters(plan: Plan, stage: int) -> tuple[float, float]:
    """Return the parameters on a GPU of a pipeline stage: (dense part, experts)."""
    weights = _stage_weights(plan, stage)
    dense = sum(_on_rank(plan, weight) for weight in weights if not weight.of_expert)
    return dense, sum(_on_rank(plan, weight) for weight in weights if weight.of_expert)


def _stage_weights(plan: Plan, stage: int) -> list[Weight]:
    """Return the weights of a pipeline stage. A tied head of the last of several stages is a copy of the embedding."""
    shape, weights = plan.shape, [weight for i in plan.stages[stage] for weight in plan.shape.layer(i)]
    first, last = stage == 0, stage == plan.pipeline - 1
    embedding = [shape.embedding()] if first or (last and shape.tied) else []
    return [*weights, *embedding, *(shape.head() if last else [])]


def _on_rank(plan: Plan, weight: Weight) -> float:
    if weight.of_expert:
        return weight.elements / (plan.expert * plan.expert_tensor)
    return weight.elements / (plan.tensor if weight.split != "none" else 1)


def training_bytes(plan: Plan, stage: int) -> dict[str, float]:
    """Return the bytes on a GPU of a pipeline stage, by name, in the backward or in the optimizer's step.

    It is the one of the two that needs more.
    """
    backward = {
        "activations": activations(plan, stage),
        "logits": logits(plan) if stage == plan.pipeline - 1 else 0.0,
    }
    parameter, shared = bytes_of_parameter(plan), _shared_parameters(plan, stage)
    step = {COPIES: parameter.gradient_copy * sum(shared) + parameter.state_copies * max(shared)}
    parts = {
        **parameter_bytes(plan, stage),
        "gradients": _gradient_width(plan) * sum(_trained_parameters(plan, stage)),
        OPTIMIZER: _state_width(plan) * sum(shared),
        **(backward if sum(backward.values()) > sum(step.values()) else step),
        DELTA_BASE: delta_base_bytes(plan, stage),
    }
    return {name: size for name, size in parts.items() if size}


def resident_bytes(plan: Plan, stage: int) -> dict[str, float]:
    """Return the bytes that a trainer leaves on the GPU while engines use it, by name."""
    cleared = (
        plan.uses_package_workers
        or plan.fp8_param
        or (plan.megatron.get("fp8_cfg") or {}).get("force_clear_fp8_caches")
    )
    parts = {
        FP8_WEIGHTS: 0.0 if cleared else quantized_bytes(plan, stage),
        OPTIMIZER: _state_width(plan) * sum(_shared_parameters(plan, stage)) if _offloaded_fraction(plan) else 0.0,
        DELTA_BASE: delta_base_bytes(plan, stage),
    }
    return {name: size for name, size in parts.items() if size}


def parameter_bytes(plan: Plan, stage: int) -> dict[str, float]:
    """Return the bytes of weights in a training step, by name: parameters and FP8 weights, or base and adapters."""
    if not plan.peft.enabled:
        parameters, fp8 = weight_bytes(plan, stage)
        return {"parameters": parameters, FP8_WEIGHTS: fp8 or quantized_bytes(plan, stage)}
    adapters = BF16 * sum(adapter_parameters(plan, stage))
    return {FROZEN: frozen_bytes(plan, stage), FP8_WEIGHTS: quantized_bytes(plan, stage), ADAPTERS: adapters}


def frozen_bytes(plan: Plan, stage: int) -> float:
    """Return the bytes of the base under adapters: in its format in the package's trainer, else in bfloat16."""
    if not plan.peft.enabled:
        return 0.0
    values = sum(stage_parameters(plan, stage))
    if not plan.uses_package_workers:
        return BF16 * values
    linears = sum(_on_rank(plan, weight) for weight in _stage_weights(plan, stage) if plan.is_fp8_in_trainer(weight))
    return BF16 * (values - linears) + sent_width(plan.format) * linears


def quantized_bytes(plan: Plan, stage: int) -> float:
    """Return the bytes of FP8 weights beside the parameters. The package's trainer quantizes again if it recomputes."""
    if plan.peft.enabled and plan.uses_package_workers and plan.format is not FP8:
        return 0.0
    layers = [plan.shape.layer(i) for i in plan.stages[stage]]
    sizes = [sum(_on_rank(plan, weight) for weight in layer if plan.is_fp8_in_trainer(weight)) for layer in layers]
    if plan.peft.enabled and plan.uses_package_workers:
        return sent_width(FP8) * sum(sizes)  # the transposed copy
    layer_by_layer = plan.uses_package_workers and plan.megatron.get("activation_checkpointing")
    return _quantized_width(plan) * (max(sizes, default=0) if layer_by_layer else sum(sizes))


def _quantized_width(plan: Plan) -> float:
    """Return the bytes of a quantized value: FP8 by rows and columns, or the bfloat16 value of an emulated format."""
    return 2 * sent_width(FP8) if plan.format is FP8 else BF16


def weight_bytes(plan: Plan, stage: int) -> tuple[float, float]:
    """Return the bytes of weights that stay from step to step: (bfloat16, FP8)."""
    values = sum(stage_parameters(plan, stage))
    if not plan.fp8_param:
        return BF16 * values, 0.0
    linears = sum(_on_rank(plan, w) for w in _stage_weights(plan, stage) if plan.is_fp8_in_trainer(w))
    return BF16 * (values - linears), _quantized_width(plan) * linears


def refit_bytes(plan: Plan, stage: int) -> dict[str, float]:
    """Return the bytes of weights during a refit, by name.

    The package's trainer then frees the columns of FP8 weights.
    """
    if plan.peft.enabled:
        return {FROZEN: frozen_bytes(plan, stage), ADAPTERS: BF16 * sum(adapter_parameters(plan, stage))}
    parameters, fp8 = weight_bytes(plan, stage)
    return {"parameters": parameters + (fp8 / 2 if plan.uses_package_workers else fp8)}


def delta_base_bytes(plan: Plan, stage: int) -> float:
    """Return the bytes of the base of the next delta: at most what refits change, in the engine's form."""
    if not (plan.uses_package_workers and plan.takes_deltas):
        return 0.0
    if plan.peft.enabled:
        return BF16 * sum(adapter_parameters(plan, stage))
    weights = _stage_weights(plan, stage)
    sent = sent_width(plan.format)
    return sum((sent if plan.is_fp8_in_engine(w) else BF16) * _on_rank(plan, w) for w in weights)


def _trained_parameters(plan: Plan, stage: int) -> tuple[float, float]:
    """Return the trained parameters on a GPU of a pipeline stage: (dense part, experts)."""
    return adapter_parameters(plan, stage) if plan.peft.enabled else stage_parameters(plan, stage)


def _shared_parameters(plan: Plan, stage: int) -> tuple[float, float]:
    """Return the parameters whose optimizer state a GPU of a pipeline stage has: (dense part, experts).

    Megatron has an optimizer for each of the two. It copies the gradients of both, then steps one after the other.
    """
    dense, expert = _trained_parameters(plan, stage)
    if not plan.uses_package_workers and not plan.megatron["optimizer"].get("use_distributed_optimizer", True):
        return dense, expert
    return dense / (plan.data * plan.context), expert / plan.expert_data


def bytes_of_parameter(plan: Plan) -> TrainedParameter:
    """Return the bytes of a trained parameter, of its optimizer those on the GPU if all of it is there."""
    if plan.peft.enabled:
        weight = float(BF16)
    else:
        stages = range(plan.pipeline)
        weight = sum(sum(weight_bytes(plan, i)) for i in stages) / sum(sum(stage_parameters(plan, i)) for i in stages)
    fp8 = plan.megatron.get("fp8_cfg") or {}
    if plan.uses_package_workers:
        has_recipe = plan.fp8_param and not plan.peft.enabled
    else:  # of an optimizer on the host Megatron ignores the recipe
        has_recipe = bool(fp8.get("enabled")) and not _offloaded_fraction(plan)
    keeps_gradient = not (plan.uses_package_workers and plan.peft.enabled)
    in_bfloat16 = (plan.policy.get("precision") or "bfloat16") == "bfloat16"
    gradient = _gradient_width(plan)
    return trained_parameter(plan.megatron["optimizer"], weight, gradient, has_recipe, keeps_gradient, in_bfloat16)


def _gradient_width(plan: Plan) -> int:
    ddp = plan.megatron.get("distributed_data_parallel_config") or {}
    return FP32 if ddp.get("grad_reduce_in_fp32") else BF16


def _state_width(plan: Plan) -> float:
    """Return the bytes, per parameter, of the optimizer's masters and moments on the GPU."""
    if on_host := _offloaded_fraction(plan):
        is_aware = plan.megatron["optimizer"].get("use_precision_aware_optimizer")
        return (1 - on_host) * 3 * FP32 + on_host * (0 if is_aware else FP32)
    return bytes_of_parameter(plan).state


def _offloaded_fraction(plan: Plan) -> float:
    """Return the fraction of parameters whose optimizer runs on the host; the package's trainer has no such thing."""
    optimizer = plan.megatron["optimizer"]
    if plan.uses_package_workers or not optimizer.get("optimizer_cpu_offload"):
        return 0.0
    return float(optimizer.get("optimizer_offload_fraction") or 0)


def activations(plan: Plan, stage: int) -> float:
    """Return the bytes kept for the backward of all microbatches in flight; their number is that of later stages."""
    tokens = plan.microbatch_tokens / plan.context
    layers = [_layer_activations(plan, i) for i in plan.stages[stage]]
    in_flight = plan.pipeline - stage
    full = plan.uses_package_workers or plan.megatron.get("recompute_granularity") in (None, "full")
    if plan.megatron.get("activation_checkpointing") and full:
        inputs = BF16 * plan.shape.hidden / (plan.tensor if plan.sequence_parallel else 1)
        return tokens * (in_flight * inputs * len(layers) + max(layers, default=0))
    return tokens * in_flight * sum(layers)


def _layer_activations(plan: Plan, layer: int) -> float:
    """Return the bytes per token that one layer keeps on one GPU.

    Of each part the norm and the linear after it keep their inputs (2 x hidden), the part what its kind keeps. Experts
    also keep their inputs and outputs.
    """
    shape, parts = plan.shape, plan.shape.parts[layer]
    shared = plan.tensor if plan.sequence_parallel else 1
    values = sum(2 * shape.hidden / shared + LAYER_KINDS[part].kept(shape, plan.tensor) for part in parts)
    if "mixture" in parts:
        values += shape.experts_per_token / shared * expert_kept(shape, plan.expert_tensor)
    return BF16 * values


def logits(plan: Plan) -> float:
    """Return the bytes of the last stage's logits: in bfloat16, in float32, and float32 gradients.

    With logprob_chunk_size the latter two exist for one chunk at a time (nemo_rl/distributed/model_utils.py). The
    package's trainer never has whole logits.
    """
    tokens, vocabulary = plan.microbatch_tokens / plan.context, plan.shape.vocab / plan.tensor
    if plan.uses_package_workers:
        chunk = plan.policy.get("logprob_chunk_size") or PolicyConfig.logprob_chunk_size
        return vocabulary * 2 * FP32 * min(chunk, tokens)
    chunk = plan.policy.get("logprob_chunk_size") or tokens
    if plan.megatron.get("use_fused_linear_logprobs"):
        tokens = chunk = plan.megatron.get("fused_linear_logprobs_chunk_size") or 256
    whole = BF16 * (1 if chunk == tokens else 2)
    return vocabulary * (whole * tokens + 2 * FP32 * min(chunk, tokens))
