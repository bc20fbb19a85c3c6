"""The block `policy.generation:` of a recipe: sampling and the vLLM engines."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from nemo_fp8rl.common.field_rules import (
    ABOVE_0,
    AT_LEAST_0,
    MAY_CHANGE,
    NEMO_RL,
    Block,
    EarlierRuns,
    MayChange,
    NemoRl,
    NotBlank,
    NullAs,
    Range,
    reference,
)

LOWEST_TEMPERATURE = 0.01
"""vLLM samples at this temperature where the recipe asks for a lower one; its highest is 2."""
VLLM_LIMITS = f"vLLM does not sample below {LOWEST_TEMPERATURE} or above 2"


@dataclass(frozen=True)
class VllmConfig(Block):
    max_model_len: Annotated[int, ABOVE_0, NEMO_RL] = reference("${policy.max_total_sequence_length}")
    """Tokens of a sequence, at most."""
    enforce_eager: Annotated[bool | None, MayChange("a run that CUDA graphs stopped can go on"), NEMO_RL] = None
    """Run without torch.compile and CUDA graphs. null: true on a CPU and, on every GPU but Hopper, with an FP8 KV cache
    in FlashInfer's attention (vLLM's choice there), which would keep the scales in the graph; else false."""
    skip_tokenizer_init: Annotated[bool, NEMO_RL] = True
    """Leave engines without a tokenizer. stop_strings of policy.generation need one. Set false if prompts have some."""
    gpu_memory_utilization: Annotated[float, Range(above=0, at_most=1), MAY_CHANGE, NEMO_RL] = 0.6
    """Share of a GPU's memory that an engine takes."""
    kv_cache_memory_gib: Annotated[
        float | None, ABOVE_0, MAY_CHANGE, NemoRl("policy.generation.vllm_kwargs.kv_cache_memory_bytes")
    ] = None
    """Size of the KV cache, GiB (ours). null: what gpu_memory_utilization leaves of a GPU; on a CPU 1, or what one
    sequence takes."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Format of the KV cache; auto follows policy.precision. fp8: E4M3 with one scale a layer for keys and one for
    values, calibrated at every refit."""
    kv_window: Annotated[int | None, ABOVE_0, EarlierRuns(None)] = None
    """Generated tokens that the KV cache keeps of an answer, besides the prompt (ours). A token sees the prompt and the
    last kv_window generated tokens, itself among them; engines free the blocks between. null keeps all. The trainer
    follows nemo_fp8rl.kv."""
    attention_backend: Annotated[str | None, NemoRl("policy.generation.vllm_kwargs.attention_backend")] = None
    """vLLM's attention backend (ours); null is its choice. An example is TRITON_ATTN; a CPU has CPU_ATTN only; with
    align=vllm on a GPU: FLASH_ATTN or null."""
    max_num_seqs: Annotated[
        int | None,
        ABOVE_0,
        MayChange("a run whose memory was full can go on"),
        NemoRl("policy.generation.vllm_kwargs.max_num_seqs"),
    ] = None
    """Sequences that an engine works on at a time (ours). null: vLLM's default for its GPU, on a CPU 256 a process."""
    max_num_batched_tokens: Annotated[
        int | None,
        ABOVE_0,
        MayChange("a run whose memory was full can go on"),
        NemoRl("policy.generation.vllm_kwargs.max_num_batched_tokens"),
    ] = None
    """Tokens of a forward, at most (ours). null: vLLM's default for its GPU, on a CPU 8192 or max_model_len."""
    tensor_parallel_size: Annotated[int, ABOVE_0, NEMO_RL] = 1
    """Processes that share one engine's model."""
    expert_parallel_size: int = 1
    """Processes over which experts are spread. 1 or tensor_parallel_size of an engine; with 1 they share the matrices
    of each expert instead."""
    async_engine: Annotated[bool, NEMO_RL] = False
    """Run the engine's core in its own process. It is behind vLLM's AsyncLLM."""
    sleep_level: Annotated[Literal[0, 1, 2], MAY_CHANGE] = 0
    """Memory that engines free for the trainer (ours). 0: nothing; 1: the KV cache; 2: also the weights. On a GPU 1
    moves the weights to the host."""
    quantization_ignored_layer_kws: Annotated[tuple[str, ...], NEMO_RL] = ()
    """Words in names of layers that are not FP8. They hold for both sides. Examples: o_proj, layers.3.mlp."""
    num_first_layers_in_bf16: Annotated[int, AT_LEAST_0, NEMO_RL] = 0
    """Decoder layers at the start without FP8. This holds for the engine and (fp8_e2e) for the trainer."""
    num_last_layers_in_bf16: Annotated[int, AT_LEAST_0, NEMO_RL] = 0
    """Decoder layers at the end without FP8. This holds for the same sides."""
    env_vars: Annotated[dict[str, str] | None, NEMO_RL] = None
    """Environment variables of the engines. Those of the ranks are in policy.megatron_cfg.env_vars."""


@dataclass(frozen=True)
class ColocatedConfig(Block):
    """Engines on the nodes and GPUs of the trainer's ranks, in turns with them; with Ray."""

    enabled: bool = False
    """Share GPUs with the trainer."""


@dataclass(frozen=True)
class GenerationConfig(Block):
    backend: Literal["vllm"] = "vllm"
    """The engine."""
    max_new_tokens: Annotated[int, ABOVE_0, NEMO_RL] = 512
    """Tokens of an answer, at most."""
    temperature: Annotated[float, Range(at_least=LOWEST_TEMPERATURE, at_most=2, hint=VLLM_LIMITS), NEMO_RL] = 1.0
    """Temperature of training samples."""
    top_p: Annotated[float, Range(above=0, at_most=1), NEMO_RL] = 1.0
    """Sample from the likeliest tokens up to this probability. The trainer's log-probs follow."""
    top_k: Annotated[int | None, Range(above=0, hint="null or -1 takes all tokens"), NullAs(-1), NEMO_RL] = None
    """Sample from so many likeliest tokens; null takes all, and so does -1."""
    val_temperature: Annotated[
        float, Range(at_least=LOWEST_TEMPERATURE, at_most=2, or_value=0, hint=f"{VLLM_LIMITS}; 0 is greedy")
    ] = 0.0
    """Temperature of validation; 0 takes the likeliest tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer, besides the model's own."""
    stop_strings: Annotated[
        tuple[str, ...], NotBlank("an empty text ends every answer at once; remove it", or_spaces=True)
    ] = ()
    """Texts that end an answer and stay part of it."""
    vllm_cfg: VllmConfig = field(default_factory=VllmConfig)
    colocated: Annotated[ColocatedConfig, MAY_CHANGE] = field(default_factory=ColocatedConfig)
