"""NeMo RL's config dialect, typed: one dataclass a block, a default in one place, all of it frozen.

`recipe.load` reads a YAML recipe (`defaults:` inheritance, `${...}` interpolation, dotted overrides) and checks types
against these classes; `config_check.check` checks what types cannot say. The precision flow and all that is ours alone
lives in the block `nemo_fp8rl:`; the few other keys of ours say so.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from nemo_fp8rl.algorithms.correction_config import CorrectionConfig
from nemo_fp8rl.algorithms.gates import GateConfig
from nemo_fp8rl.algorithms.loss_config import LossConfig
from nemo_fp8rl.fp8 import ScaleFormat

Flow = Literal["bf16", "fp8_rollout", "fp8_e2e"]


def _from(reference: str) -> Any:
    """A default that other keys of the recipe say."""
    return reference


class _Block:
    """A block of the recipe: a key that it does not list is an error."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}


@dataclass(frozen=True)
class RefitConfig(_Block):
    """How a version of the weights gets from the trainer's ranks to the engines'."""

    mode: Literal["auto", "full", "delta"] = "auto"
    """full: all bytes; delta: those that changed; auto: whichever took less time, full with offload_between_phases, as
    deltas need a copy that stays. Engines end with the same bytes."""
    transport: Literal["auto", "in_process", "shared_memory", "cuda_ipc", "nixl", "collective"] = "auto"
    """auto: in_process where trainer and engine share one; else, link by link, within a machine cuda_ipc for weights on
    GPUs and shared_memory for others, between machines collective (gloo). nixl (RDMA) is asked for by name."""
    bucket_bytes: int = 256 * 2**20
    """Bytes that travel at once, at most; trainer and engine ranks hold two such buckets, shared by all their links."""
    verify: Literal["off", "digest", "full", False] = "digest"
    """digest: of every tensor in the engine's memory against the trainer's; full: byte by byte, all sent twice; off,
    which YAML reads as false: neither."""


@dataclass(frozen=True)
class Fp8RlConfig(_Block):
    """The block of ours."""

    removed_keys: ClassVar = {"kernel": "the kernel that quantizes follows the device"}

    flow: Flow = "fp8_e2e"
    """Precision of trainer and engine: bf16 both; fp8_rollout engine only; fp8_e2e both, by one contract."""
    align: Literal["auto", "vllm", "none"] = "auto"
    """Where the trainer's RoPE, residual, norm and softmax round: where vLLM's kernels for CPUs do, which a GPU cannot,
    or where Megatron's do. auto: vllm without a GPU, none on one."""
    scale_format: ScaleFormat = "pow2"
    """Scales of the FP8 blocks; pow2 is the one on which every quantizer agrees."""
    kv: Literal["unified", "rollout"] = "unified"
    """unified: with an FP8 KV cache (vllm_cfg.kv_cache_dtype) the trainer's attention reads what the cache holds;
    rollout: it keeps its own keys and values."""
    workers: Literal["auto", "ours", "nemo_rl"] = "auto"
    """Trainer and engines of NeMo RL's loops (`nemo-fp8rl nemo`): ours, or NeMo RL's own, which need GPUs. auto: NeMo
    RL's where there are GPUs."""
    fp8_param: bool = False
    """Hold the weights of FP8 layers on a GPU as FP8 bytes alone, which a refit sends as they are; the optimizer has
    the float32 master. The bytes, and so the numbers, are the same; without a GPU it changes nothing."""
    refit: RefitConfig = field(default_factory=RefitConfig)
    correction: CorrectionConfig | None = None
    """Rollout correction beyond loss_fn's keys; null takes what those say."""
    gates: tuple[GateConfig, ...] = ()
    """Limits on the mismatch of trainer and engine, and what happens above them."""

    @property
    def trainer_fp8(self) -> bool:
        return self.flow == "fp8_e2e"

    @property
    def engine_fp8(self) -> bool:
        return self.flow in ("fp8_rollout", "fp8_e2e")


@dataclass(frozen=True)
class AdvEstimatorConfig(_Block):
    name: Literal["grpo", "reinforce_plus_plus"] = "grpo"
    """grpo is RLOO with normalize_rewards: false and use_leave_one_out_baseline: true."""
    normalize_rewards: bool = _from("${grpo.normalize_rewards}")
    use_leave_one_out_baseline: bool = _from("${grpo.use_leave_one_out_baseline}")
    minus_baseline: bool = True
    """reinforce_plus_plus: subtract the mean reward of the prompt."""


@dataclass(frozen=True)
class RewardShapingConfig(_Block):
    enabled: bool = False
    overlong_buffer_length: int | None = 128
    """Tokens before max_response_length in which the penalty grows to overlong_buffer_penalty (DAPO)."""
    overlong_buffer_penalty: float | None = 1.0
    max_response_length: int | None = _from("${policy.max_total_sequence_length}")
    stop_properly_penalty_coef: float | None = None
    """Rewards of truncated answers are multiplied by it, instead of the above; 0..1."""


@dataclass(frozen=True)
class GrpoConfig(_Block):
    num_prompts_per_step: int = 32
    num_generations_per_prompt: int = 16
    max_num_steps: int = 100
    normalize_rewards: bool = True
    use_leave_one_out_baseline: bool = False
    adv_estimator: AdvEstimatorConfig = field(default_factory=AdvEstimatorConfig)
    use_dynamic_sampling: bool = False
    """Ask further prompts until every group of a step has rewards that differ (DAPO)."""
    dynamic_sampling_max_gen_batches: int = 10
    """Generation rounds after which dynamic sampling gives up, with an error."""
    overlong_filtering: bool = False
    """Leave answers that were cut off out of the loss."""
    reward_shaping: RewardShapingConfig = field(default_factory=RewardShapingConfig)
    val_period: int = 10
    """Validate every so many steps; 0 never."""
    val_at_start: bool = True
    val_at_end: bool = True
    max_val_samples: int | None = 256
    """null: all."""
    seed: int = 42


@dataclass(frozen=True)
class SftConfig(_Block):
    """The supervised warm-up (`nemo-fp8rl sft`)."""

    max_num_steps: int = 200
    seed: int = 42


@dataclass(frozen=True)
class CheckpointingConfig(_Block):
    enabled: bool = True
    checkpoint_dir: str = "${logger.log_dir}/checkpoints"
    save_period: int = 10
    keep_top_k: int | None = 2
    """How many are kept, the latest (NeMo RL's meaning under `metric_name: null`); null: all."""


@dataclass(frozen=True)
class TokenizerConfig(_Block):
    name: str = "${policy.model_name}"
    chat_template_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class OptimizerConfig(_Block):
    optimizer: Literal["adam"] = "adam"
    lr: float = 1e-6
    min_lr: float = 0.0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0


@dataclass(frozen=True)
class SchedulerConfig(_Block):
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_decay_iters: int = 1000
    lr_warmup_iters: int = 0
    lr_warmup_init: float = 0.0


@dataclass(frozen=True)
class MegatronConfig(_Block):
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of these stages where not all stages have as many; null: an equal share of what is left."""
    context_parallel_size: int = 1
    """Ranks that share the tokens of each sequence, and in attention its heads instead."""
    expert_model_parallel_size: int = 1
    """Ranks among which the experts of a layer are spread; they are data-parallel ranks to the rest of the model."""
    expert_tensor_parallel_size: int = _from("${policy.megatron_cfg.tensor_model_parallel_size}")
    """Ranks that share each expert's matrices; of no meaning to a dense model."""
    freeze_moe_router: bool = False
    """Routers stay as the checkpoint has them, and out of the gradient norm."""
    sequence_parallel: bool = False
    """Each rank holds its part of the sequence between the linears of a tensor-parallel layer."""
    activation_checkpointing: bool = False
    """Keep each layer's input alone and compute the layer again in the backward."""
    offload_between_phases: bool = False
    """Give the gradients' memory back while engines generate; on a GPU move the optimizer's state and the parameters to
    the host, too."""
    env_vars: dict[str, str] | None = None
    """Added to the environment of the ranks; with cluster.backend=in_process to that of the run, after torch has read
    it."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


@dataclass(frozen=True)
class VllmConfig(_Block):
    max_model_len: int = _from("${policy.max_total_sequence_length}")
    enforce_eager: bool | None = None
    """Run without torch.compile and CUDA graphs. null: true on a CPU, and with an FP8 KV cache in FlashInfer's
    attention, vLLM's choice on every GPU but Hopper, which would keep the scales in the graph; else false."""
    skip_tokenizer_init: bool = True
    """Engines have no tokenizer where policy.generation has no stop_strings; false where prompts bring some."""
    gpu_memory_utilization: float = 0.6
    kv_cache_memory_gib: float | None = None
    """Size of the key-value cache, GiB (ours); null: what gpu_memory_utilization leaves of a GPU; on a CPU
    1, or what one sequence takes."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """auto: policy.precision. fp8: E4M3 with a scale a layer for keys and values, calibrated at every refit."""
    attention_backend: str | None = None
    """vLLM's name of it (ours), such as TRITON_ATTN; null: vLLM's choice. A CPU has CPU_ATTN alone."""
    max_num_seqs: int | None = None
    """Sequences that an engine works on at a time (ours); null: vLLM's default for its GPU, on a CPU 256 a process."""
    max_num_batched_tokens: int | None = None
    """Tokens of a forward, at most (ours); null: vLLM's default for its GPU, on a CPU 8192 or max_model_len."""
    tensor_parallel_size: int = 1
    """Processes that share one engine's model."""
    expert_parallel_size: int = 1
    """Processes, of those tensor_parallel_size, among which experts are spread: 1, which shares each expert's matrices
    instead, or all."""
    async_engine: bool = False
    """The engine's core in a process of its own (vLLM's AsyncLLM) rather than in the engine's."""
    sleep_level: Literal[0, 1, 2] = 0
    """What an engine gives back while the trainer works (ours): nothing; its KV cache; its weights, too. On a GPU 1
    moves the weights to the host.
    """
    quantization_ignored_layer_kws: tuple[str, ...] = ()
    """Layers whose names hold one of these words are not FP8, such as o_proj or layers.3.mlp; on both sides."""
    num_first_layers_in_bf16: int = 0
    """Decoder layers at the start that are not FP8, in the engine and (fp8_e2e) in the trainer."""
    num_last_layers_in_bf16: int = 0
    """Decoder layers at the end that are not FP8, on the same sides."""
    env_vars: dict[str, str] | None = None
    """Added to the environment of the engines, as policy.megatron_cfg.env_vars to that of the ranks."""


@dataclass(frozen=True)
class ColocatedConfig(_Block):
    """Engines on the nodes and GPUs of the trainer's ranks, in turns with them; with Ray."""

    enabled: bool = False


@dataclass(frozen=True)
class GenerationConfig(_Block):
    backend: Literal["vllm"] = "vllm"
    max_new_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability; the trainer's log-probs follow."""
    top_k: int | None = None
    """Sample from so many likeliest tokens; null from all."""
    val_temperature: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer, besides the model's own end of the sequence."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end an answer and stay part of it."""
    vllm_cfg: VllmConfig = field(default_factory=VllmConfig)
    colocated: ColocatedConfig = field(default_factory=ColocatedConfig)


@dataclass(frozen=True)
class DynamicBatchingConfig(_Block):
    """Microbatches of as many samples, sorted by length, as a budget of tokens holds, padding counted."""

    enabled: bool = False
    train_mb_tokens: int = _from("${mul:${policy.max_total_sequence_length},${policy.train_micro_batch_size}}")
    logprob_mb_tokens: int = _from("${mul:${policy.max_total_sequence_length},${policy.logprob_batch_size}}")
    sequence_length_round: int = 64
    """Lengths of microbatches are rounded up to a multiple of this, as far as the batch has padding."""


@dataclass(frozen=True)
class SequencePackingConfig(_Block):
    """Microbatches of sequences one after the other, without padding, as many as a budget of tokens holds."""

    enabled: bool = False
    train_mb_tokens: int = _from("${mul:${policy.max_total_sequence_length},${policy.train_micro_batch_size}}")
    logprob_mb_tokens: int = _from("${mul:${policy.max_total_sequence_length},${policy.logprob_batch_size}}")


@dataclass(frozen=True)
class RouterReplayConfig(_Block):
    """R3: the trainer's routers take the experts that the engine's chose."""

    enabled: bool = False


@dataclass(frozen=True)
class PolicyConfig(_Block):
    model_name: str
    """A model of the Llama 3, Qwen2.5, Qwen3 or Qwen3-MoE family: an HF checkpoint folder (config.json and
    safetensors), or owner/model[@revision] on the Hugging Face hub."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    train_global_batch_size: int = 512
    """Samples an optimizer step."""
    train_micro_batch_size: int = 4
    """Samples a forward and backward, on each replica of the model."""
    logprob_batch_size: int = _from("${policy.train_micro_batch_size}")
    logprob_chunk_size: int = 1024
    """Tokens whose logits exist at a time."""
    dynamic_batching: DynamicBatchingConfig = field(default_factory=DynamicBatchingConfig)
    max_total_sequence_length: int = 512
    sequence_packing: SequencePackingConfig = field(default_factory=SequencePackingConfig)
    router_replay: RouterReplayConfig = field(default_factory=RouterReplayConfig)
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    megatron_cfg: MegatronConfig = field(default_factory=MegatronConfig)


@dataclass(frozen=True)
class TrainDataConfig(_Block):
    data_path: str
    split_validation_size: float = 0.05
    """Share of the distinct prompts held out for validation when data.validation is null."""
    seed: int = 42
    """Seed of the split; on its own, so that runs with other training seeds are validated on the same prompts."""


@dataclass(frozen=True)
class ValidationDataConfig(_Block):
    data_path: str


@dataclass(frozen=True)
class DataDefaultConfig(_Block):
    env_name: str = "exact_match"
    """The verifier: exact_match or math."""


@dataclass(frozen=True)
class DataConfig(_Block):
    train: TrainDataConfig
    validation: ValidationDataConfig | None = None
    default: DataDefaultConfig = field(default_factory=DataDefaultConfig)


@dataclass(frozen=True)
class WandbConfig(_Block):
    project: str = "nemo-fp8rl"
    name: str | None = None
    """Name of the run; null: the run directory's path."""


@dataclass(frozen=True)
class MlflowConfig(_Block):
    experiment_name: str = "nemo-fp8rl"
    run_name: str | None = None
    """Name of the run; null: the run directory's path."""
    tracking_uri: str | None = None
    """Address of the server; null: what MLflow itself takes, MLFLOW_TRACKING_URI for instance."""


@dataclass(frozen=True)
class LoggerConfig(_Block):
    """metrics.jsonl is always written; the same metrics go to what is enabled here."""

    log_dir: str = "runs/default"
    """The run directory."""
    tensorboard_enabled: bool = True
    wandb_enabled: bool = False
    """Weights & Biases, a package of its own: pip install wandb."""
    mlflow_enabled: bool = False
    """MLflow, a package of its own: pip install mlflow."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)


@dataclass(frozen=True)
class ClusterConfig(_Block):
    backend: Literal["in_process", "ray"] = "in_process"
    """Trainer and engine in this process, or as Ray actors."""
    train_ranks: int = 1
    """All trainer ranks (Ray): tensor x pipeline x context x data parallel."""
    generation_engines: int = 1
    """vLLM engines that share the prompts (Ray)."""
    engine_timeout_seconds: float = 1800.0
    """How long engines, and in a refit training ranks, may take for what they are asked, or go without finishing a
    prompt, for which they have 0.1 s more for each token of max_new_tokens, before they count as dead. Under Ray also
    how long a worker's process may take to be there.
    """
    max_engine_restarts: int = 3
    """How often engines that died are started again in a run; one more ends it."""


@dataclass(frozen=True)
class Config(_Block):
    """A whole recipe."""

    policy: PolicyConfig
    data: DataConfig
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    loss_fn: LossConfig = field(default_factory=LossConfig)
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    nemo_fp8rl: Fp8RlConfig = field(default_factory=Fp8RlConfig)

    @property
    def fp8_kv_cache(self) -> bool:
        return self.policy.generation.vllm_cfg.kv_cache_dtype == "fp8"

    @property
    def num_cpus(self) -> int:
        """CPUs that all ranks and engines take, one a process."""
        engine = self.policy.generation.vllm_cfg.tensor_parallel_size
        return self.cluster.train_ranks + self.cluster.generation_engines * engine

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model; each trains on its part of a batch."""
        parallel = self.policy.megatron_cfg
        model_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
        return self.cluster.train_ranks // (model_ranks * parallel.context_parallel_size)

    @property
    def rollout_batch_size(self) -> int:
        """Samples a step: prompts times generations."""
        return self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt
