"""Memory of a GPU in each phase, from sizes alone: what is certain (weights, gradients, optimizer, cache) to the byte,
activations and logits as an estimate for the longest microbatch.

Sources:
- Parameters, gradients, optimizer: bytes a parameter by Megatron Core's table
  https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/dist_optimizer.html: bfloat16 parameters (2)
  and gradients (2, or 4 with grad_reduce_in_fp32) whole on each replica; main parameters and two moments (12) shared by
  replicas, and with bfloat16 gradients a float32 copy of them (4), which the precision-aware optimizer does without.
- Transformer Engine keeps FP8 weights row-wise and column-wise beside the parameter between microbatches
  (`_fp8_workspaces` in https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/pytorch/module/base.py).
- Activations: what each operation keeps for its backward, counted as in section 4.1 of
  https://arxiv.org/abs/2205.05198, for grouped queries, a gated MLP and attention that does not keep its scores;
  bfloat16 throughout, experts balanced.
- Cache: keys and values of each layer; with latent attention its latent and rotary part on every rank (DeepSeek-V2,
  https://arxiv.org/abs/2405.04434, section 2.1).
- Colocated, NeMo RL moves the trainer's memory to the host while engines generate, and all but its parameters during a
  refit (`refit_policy_generation` in https://github.com/NVIDIA-NeMo/RL/blob/main/nemo_rl/algorithms/grpo.py); so do our
  workers (`policy/offload.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from nemo_fp8rl.doctor.finding import Finding
from nemo_fp8rl.doctor.hardware import Gpu
from nemo_fp8rl.doctor.plan import ENGINE, TRAINER, Plan
from nemo_fp8rl.doctor.shapes import Weight
from nemo_fp8rl.fp8.names import BLOCK

TOPIC = "memory"
GIB = 2**30
BF16, FP32 = 2, 4
SCALE = FP32 / (BLOCK[0] * BLOCK[1])
"""Bytes of scales for each value of an FP8 weight."""
ENGINE_WORKSPACE = 2 * GIB
"""An assumption: what vLLM's profiling run leaves for a forward of its longest batch, CUDA graphs included."""
OUTSIDE = 3 * GIB
"""An assumption: CUDA context, NCCL's buffers, the allocator's gaps."""


@dataclass(frozen=True)
class Phase:
    """What one GPU holds at a time, in bytes by name."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Memory:
    """phases: of the fullest GPU. cache_tokens: how many the KV cache of one engine holds, of kv_bytes a GPU each."""

    phases: list[Phase] = field(default_factory=list)
    kv_bytes: float = 0
    cache_tokens: int = 0


def memory_of(plan: Plan, gpu: Gpu) -> Memory:
    train = max((_train(plan, stage) for stage in range(plan.pipeline)), key=lambda phase: phase.total)
    engine, kv = engine_weights(plan), kv_bytes_per_token(plan)
    cache = _cache_bytes(plan, gpu, engine)
    generate = {"engine weights": engine, "KV cache": max(cache, 0), "engine workspace": ENGINE_WORKSPACE}
    phases = [train, Phase("generate", generate)]
    if plan.colocated:
        stage = max(range(plan.pipeline), key=lambda i: sum(stage_parameters(plan, i)))
        buckets = 2 * plan.values["nemo_fp8rl"]["refit"]["bucket_bytes"]
        parameters = BF16 * sum(stage_parameters(plan, stage))
        phases.insert(1, Phase("refit", {"parameters": parameters, "engine weights": engine, "buckets": buckets}))
    return Memory(phases, kv, max(0, int(cache // kv)))


def check_memory(plan: Plan, gpu: Gpu, memory: Memory) -> Iterator[Finding]:
    for phase in memory.phases:
        needed, room = phase.total + OUTSIDE, gpu.memory
        words = f"{phase.name}: {phase.total / GIB:.1f} GiB of {gpu.name}'s {room / GIB:.1f}"
        if needed > room:
            yield Finding("error", TOPIC, f"{words}, with {OUTSIDE / GIB:.0f} GiB outside it; {_advice(phase.name)}")
        elif needed > 0.9 * room:
            yield Finding("warn", TOPIC, f"{words} leave little room; {_advice(phase.name)}")
        else:
            yield Finding("ok", TOPIC, words)
    length = plan.vllm.get("max_model_len") or plan.longest
    fits = memory.cache_tokens / length
    words = f"the KV cache of an engine holds {memory.cache_tokens:,} tokens, {fits:.1f} sequences of {length}"
    if fits < 1:
        yield Finding("error", TOPIC, f"{words}: raise {ENGINE}.gpu_memory_utilization or tensor_parallel_size")
    elif fits < 8:
        yield Finding("warn", TOPIC, f"{words}: few at a time; raise {ENGINE}.gpu_memory_utilization")
    else:
        yield Finding("ok", TOPIC, words)


def _advice(phase: str) -> str:
    if phase == "train":
        return f"more GPUs, {TRAINER}.activation_checkpointing=true or a larger parallel size"
    return f"lower {ENGINE}.gpu_memory_utilization" if phase == "generate" else "raise a parallel size"


# The trainer


def stage_parameters(plan: Plan, stage: int) -> tuple[float, float]:
    """Parameters on a GPU of a pipeline stage: (of what data-parallel replicas share, of experts)."""
    weights = _stage_weights(plan, stage)
    dense = sum(_on_rank(plan, weight) for weight in weights if not weight.of_expert)
    return dense, sum(_on_rank(plan, weight) for weight in weights if weight.of_expert)


def _stage_weights(plan: Plan, stage: int) -> list[Weight]:
    """With more than one stage, a tied head is a copy of the embedding on the last."""
    shape, weights = plan.shape, [weight for i in plan.stages[stage] for weight in plan.shape.layer(i)]
    first, last = stage == 0, stage == plan.pipeline - 1
    ends = [shape.embedding()] if first or (last and shape.tied) else []
    return [*weights, *ends, *(shape.head() if last else [])]


def _on_rank(plan: Plan, weight: Weight) -> float:
    if weight.of_expert:
        return weight.elements / (plan.expert * plan.expert_tensor)
    return weight.elements / (plan.tensor if weight.split != "none" else 1)


def _train(plan: Plan, stage: int) -> Phase:
    dense, expert = stage_parameters(plan, stage)
    ddp = plan.megatron.get("distributed_data_parallel_config") or {}
    optimizer = plan.megatron["optimizer"]
    gradient = FP32 if ddp.get("grad_reduce_in_fp32") else BF16
    state = 3 * FP32 + (FP32 if gradient == BF16 and not optimizer.get("use_precision_aware_optimizer") else 0)
    shared = optimizer.get("use_distributed_optimizer", True)
    replicas, expert_replicas = (plan.data * plan.context, plan.expert_data) if shared else (1, 1)
    on_gpu = 1 - (optimizer.get("optimizer_offload_fraction", 0) if optimizer.get("optimizer_cpu_offload") else 0)
    linears = sum(_on_rank(plan, weight) for weight in _stage_weights(plan, stage) if plan.is_fp8_in_trainer(weight))
    parts = {
        "parameters": BF16 * (dense + expert),
        "gradients": gradient * (dense + expert),
        "optimizer": state * on_gpu * (dense / replicas + expert / expert_replicas),
        "FP8 weights": 2 * (1 + SCALE) * linears,
        "activations": activations(plan, stage),
        "logits": logits(plan) if stage == plan.pipeline - 1 else 0.0,
    }
    return Phase("train", {name: size for name, size in parts.items() if size})


def activations(plan: Plan, stage: int) -> float:
    """Bytes kept for the backward, of all microbatches in flight: as many as stages that are still to come."""
    tokens = plan.microbatch_tokens / plan.context
    layers = [_layer_activations(plan, i) for i in plan.stages[stage]]
    in_flight = plan.pipeline - stage
    full = plan.megatron.get("recompute_granularity") in (None, "full")
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

    The latter two a chunk at a time with logprob_chunk_size (nemo_rl/distributed/model_utils.py).
    """
    tokens, vocabulary = plan.microbatch_tokens / plan.context, plan.shape.vocab / plan.tensor
    chunk = plan.policy.get("logprob_chunk_size") or tokens
    if plan.megatron.get("use_fused_linear_logprobs"):
        tokens = chunk = plan.megatron.get("fused_linear_logprobs_chunk_size") or 256
    whole = BF16 * (1 if chunk == tokens else 2)
    return vocabulary * (whole * tokens + 2 * FP32 * min(chunk, tokens))


# The engine


def engine_weights(plan: Plan) -> float:
    """Bytes of weights on the fullest GPU of an engine, FP8 with their scales, all else bfloat16."""
    shape = plan.shape
    layers = -(-shape.layers // plan.engine_pipeline)
    each = sum(_engine_bytes(plan, weight) for i in range(shape.layers) for weight in shape.layer(i)) / shape.layers
    ends = sum(_engine_bytes(plan, weight) for weight in (shape.embedding(), *shape.head()))
    return each * layers + ends


def _engine_bytes(plan: Plan, weight: Weight) -> float:
    size = 1 + SCALE if plan.is_fp8_in_engine(weight) else BF16
    if weight.of_expert:
        return size * weight.elements / (plan.engine_expert if plan.engine_expert > 1 else plan.engine_tensor)
    parts = plan.engine_tensor if weight.split != "none" else 1
    if weight.name.endswith(("k_proj.weight", "v_proj.weight")):
        parts = min(parts, plan.shape.kv_heads)
    return size * weight.elements / parts


def kv_bytes_per_token(plan: Plan) -> float:
    """Bytes a token takes on each GPU of an engine."""
    shape, size = plan.shape, 1 if plan.kv_fp8 else BF16
    layers = -(-shape.layers // plan.engine_pipeline)
    if shape.kv_lora_rank:
        return size * layers * (shape.kv_lora_rank + shape.rope_dim)
    heads = max(1, shape.kv_heads / plan.engine_tensor)
    return size * layers * heads * (shape.head_dim + shape.value_dim)


def _cache_bytes(plan: Plan, gpu: Gpu, weights: float) -> float:
    """What is pinned by vllm_kwargs, or what gpu_memory_utilization leaves beside weights and workspace."""
    if pinned := plan.vllm_kwargs.get("kv_cache_memory_bytes"):
        return pinned
    return gpu.memory * plan.vllm["gpu_memory_utilization"] - weights - ENGINE_WORKSPACE
