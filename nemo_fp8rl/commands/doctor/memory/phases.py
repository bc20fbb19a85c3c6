"""Memory of a GPU in each phase, from sizes alone (`trainer_memory.py`, `engine_memory.py`).

With colocated engines NeMo RL moves the trainer's memory to the host while engines generate, and everything except the
parameters during a refit (`refit_policy_generation` in
https://github.com/NVIDIA-NeMo/RL/blob/main/nemo_rl/algorithms/grpo.py). The package's workers do the same
(`policy/rank/offload.py`). `trainer_memory.resident_bytes` counts the rest.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from nemo_fp8rl.commands.doctor.finding import Finding
from nemo_fp8rl.commands.doctor.hardware import Gpu
from nemo_fp8rl.commands.doctor.memory.byte_widths import GIB
from nemo_fp8rl.commands.doctor.memory.engine_memory import (
    WORKSPACE,
    cache_bytes,
    engine_weights,
    kv_bytes_per_token,
    state_bytes_per_sequence,
)
from nemo_fp8rl.commands.doctor.memory.trained_parameter import TrainedParameter
from nemo_fp8rl.commands.doctor.memory.trainer_memory import (
    FP8_WEIGHTS,
    bytes_of_parameter,
    refit_bytes,
    resident_bytes,
    training_bytes,
)
from nemo_fp8rl.commands.doctor.recipe_plan import ENGINE, TRAINER, Plan

TOPIC = "memory"
OUTSIDE = 3 * GIB
"""An assumption: CUDA context, NCCL's buffers, the allocator's gaps."""


@dataclass(frozen=True)
class Phase:
    """The memory of one GPU in a phase, bytes by name."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Memory:
    """The memory of the fullest GPU in each phase.

    kv_bytes:      bytes of cache for one token on each GPU of an engine
    state_bytes:   the same for one sequence of any length, beside its tokens
    cache_tokens:  tokens that the KV cache of one engine holds, in sequences of full length
    parameter:     bytes of a trained parameter
    """

    phases: list[Phase] = field(default_factory=list)
    kv_bytes: float = 0
    cache_tokens: int = 0
    state_bytes: float = 0
    parameter: TrainedParameter | None = None


def memory_of(plan: Plan, gpu: Gpu) -> Memory:
    stages = range(plan.pipeline)
    fullest = _fullest("train", (training_bytes(plan, stage) for stage in stages))
    engine, kv, state = engine_weights(plan), kv_bytes_per_token(plan), state_bytes_per_sequence(plan)
    cache = cache_bytes(plan, gpu.memory, engine)
    tokens = max(0, int(cache // (kv + state / _longest(plan))))
    generate = {"engine weights": engine, "KV cache": max(cache, 0), "engine workspace": WORKSPACE}
    if not plan.is_colocated:
        return Memory([fullest, Phase("generate", generate)], kv, tokens, state, bytes_of_parameter(plan))
    beside = {"engine weights": engine, "buckets": 2 * plan.values["nemo_fp8rl"]["refit"]["bucket_bytes"]}
    resident = [resident_bytes(plan, stage) for stage in stages]
    refit = (refit_bytes(plan, i) | beside | resident[i] for i in stages)
    phases = [fullest, _fullest("refit", refit), _fullest("generate", (generate | parts for parts in resident))]
    return Memory(phases, kv, tokens, state, bytes_of_parameter(plan))


def _fullest(name: str, stages: Iterable[dict[str, float]]) -> Phase:
    return max((Phase(name, parts) for parts in stages), key=lambda phase: phase.total)


def check_memory(plan: Plan, gpu: Gpu, memory: Memory) -> Iterator[Finding]:
    for phase in memory.phases:
        needed, room = phase.total + OUTSIDE, gpu.memory
        words = f"{phase.name}: {phase.total / GIB:.1f} GiB of {gpu.name}'s {room / GIB:.1f}"
        if needed > room:
            yield Finding("error", TOPIC, f"{words}, with {OUTSIDE / GIB:.0f} GiB outside it; {_advice(phase)}")
        elif needed > 0.9 * room:
            yield Finding("warn", TOPIC, f"{words} leave little room; {_advice(phase)}")
        else:
            yield Finding("ok", TOPIC, words)
    yield from _uncounted(plan)
    length = _longest(plan)
    fits = memory.cache_tokens / length
    words = f"the KV cache of an engine holds {memory.cache_tokens:,} tokens, {fits:.1f} sequences of {length}"
    window = plan.vllm.get("kv_window") or length
    if window < length:  # a preempted sequence takes the blocks of all its tokens, and vLLM wants room for one
        words += f", and more with kv_window={window}, as an answer keeps its prompt and {window} tokens"
    if fits < 1:
        yield Finding("error", TOPIC, f"{words}: raise {ENGINE}.gpu_memory_utilization or tensor_parallel_size")
    elif fits < 8:
        yield Finding("warn", TOPIC, f"{words}: few at a time; raise {ENGINE}.gpu_memory_utilization")
    else:
        yield Finding("ok", TOPIC, words)


def _longest(plan: Plan) -> int:
    return plan.vllm.get("max_model_len") or plan.longest


def _uncounted(plan: Plan) -> Iterator[Finding]:
    if encoders := plan.shape.uncounted:
        text = f"these are the bytes of the decoder: the encoders ({', '.join(encoders)}) are on the GPUs, too"
        yield Finding("warn", TOPIC, text)


def _advice(phase: Phase) -> str:
    if phase.name == "train":
        return f"more GPUs, {TRAINER}.activation_checkpointing=true or a larger parallel size"
    if FP8_WEIGHTS in phase.parts:
        return f"set {TRAINER}.fp8_cfg.force_clear_fp8_caches=true"
    return f"lower {ENGINE}.gpu_memory_utilization" if phase.name == "generate" else "raise a parallel size"
