"""The block `policy:` of a recipe: the model, its batches and the Megatron trainer."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.field_rules import (
    ABOVE_0,
    AT_LEAST_0,
    FILE_PATH,
    MAY_CHANGE,
    NEMO_RL,
    NEMO_RL_LOOP,
    Block,
    EarlierRuns,
    MayChange,
    Range,
    reference,
)
from nemo_fp8rl.config.generation_schema import GenerationConfig

TRAIN_TOKENS = "${mul:${policy.max_total_sequence_length},${policy.train_micro_batch_size}}"
LOGPROB_TOKENS = "${mul:${policy.max_total_sequence_length},${policy.logprob_batch_size}}"
ANY_LAYOUT = MayChange("a checkpoint loads on any layout")
SAME_TOKENS = MayChange("the digest of the prompts' tokens must stay the same")
MICROBATCHES = MayChange("how a batch is cut into microbatches: other replicas need other sizes")


@dataclass(frozen=True)
class TokenizerConfig(Block):
    name: Annotated[str, MAY_CHANGE, FILE_PATH, NEMO_RL] = "${policy.model_name}"
    """Folder or hub name of the tokenizer."""
    chat_template: Annotated[str | None, EarlierRuns("default"), SAME_TOKENS, FILE_PATH, NEMO_RL_LOOP] = "default"
    """Chat template: default is the tokenizer's own, null none. Else a file that ends in .jinja, or the template."""
    chat_template_kwargs: Annotated[dict[str, Any] | None, SAME_TOKENS, NEMO_RL] = None
    """Variables of the chat template."""


LEAST_LR_OF_FP16 = 1e-5
"""Learning rate from which float16 masters follow their updates: at 2e-5 they make 98 % of the movement of float32
masters, at 3e-6 41 %, at 1e-6 13 % (`benchmarks/optimizer_states.py`)."""
MomentDtype = Literal["fp32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True)
class OptimizerConfig(Block):
    optimizer: Annotated[Literal["adam"], NEMO_RL] = "adam"
    """AdamW."""
    lr: Annotated[float, ABOVE_0, NEMO_RL] = 1e-6
    """Learning rate after the warm-up."""
    min_lr: Annotated[float, AT_LEAST_0, NEMO_RL] = 0.0
    """Learning rate at the end of the decay."""
    weight_decay: Annotated[float, AT_LEAST_0, NEMO_RL] = 0.0
    """Decoupled weight decay."""
    adam_beta1: Annotated[float, Range(at_least=0, below=1), NEMO_RL] = 0.9
    """Decay of the first moment."""
    adam_beta2: Annotated[float, Range(at_least=0, below=1), NEMO_RL] = 0.95
    """Decay of the second moment."""
    adam_eps: Annotated[float, ABOVE_0, NEMO_RL] = 1e-8
    """Added to the root of the second moment."""
    clip_grad: Annotated[float, AT_LEAST_0, NEMO_RL] = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    use_precision_aware_optimizer: Annotated[bool, EarlierRuns(False), NEMO_RL] = False
    """Keep the optimizer's state in the dtypes below. false: all of it is float32."""
    exp_avg_dtype: Annotated[MomentDtype, EarlierRuns("fp32"), NEMO_RL] = "fp32"
    """Dtype of the first moment between steps."""
    exp_avg_sq_dtype: Annotated[MomentDtype, EarlierRuns("fp32"), NEMO_RL] = "fp32"
    """Dtype of the second moment between steps."""
    main_params_dtype: Annotated[Literal["fp32", "fp16"], EarlierRuns("fp32"), NEMO_RL] = "fp32"
    """Dtype of master weights. fp16 needs lr of 1e-5 or more, because smaller updates are lost in its rounding."""
    store_param_remainders: Annotated[bool, EarlierRuns(True), NEMO_RL] = True
    """Keep of an fp32 master only the 16 bits that the bfloat16 weight lacks. This is exact."""

    loss_scale: Annotated[float | None, ABOVE_0, EarlierRuns(None), NEMO_RL] = None
    """Constant factor of the loss in float16; null lets it rise and fall."""
    initial_loss_scale: Annotated[float, ABOVE_0, EarlierRuns(65536.0), NEMO_RL] = 65536.0
    """First factor of the loss in float16. Megatron's 2^32, the default of a recipe for NeMo RL, overflows for about
    sixteen steps."""
    min_loss_scale: Annotated[float, Range(at_least=1), EarlierRuns(1.0), NEMO_RL] = 1.0
    """Smallest factor of the loss in float16. A step that overflows at it ends the run."""
    loss_scale_window: Annotated[int, ABOVE_0, EarlierRuns(1000), NEMO_RL] = 1000
    """Steps without an overflow after which the factor doubles."""
    hysteresis: Annotated[int, ABOVE_0, EarlierRuns(2), NEMO_RL] = 2
    """Steps with an overflow after which the factor halves at each."""

    def check(self) -> None:
        """Raise UserError for dtypes and scales that contradict other keys of the block."""
        block = "policy.megatron_cfg.optimizer"
        if self.initial_loss_scale < self.min_loss_scale:
            raise UserError(
                f"{block}.initial_loss_scale={self.initial_loss_scale:g} is below {block}.min_loss_scale="
                f"{self.min_loss_scale:g}; raise it"
            )
        if not self.use_precision_aware_optimizer:
            for name in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"):
                if (dtype := getattr(self, name)) != "fp32":
                    raise UserError(
                        f"{block}.{name}={dtype} has a meaning only with {block}.use_precision_aware_optimizer=true: "
                        f"set that, or {name}=fp32"
                    )
        elif self.main_params_dtype == "fp16" and self.lr < LEAST_LR_OF_FP16:
            raise UserError(
                f"{block}.main_params_dtype=fp16 with {block}.lr={self.lr:g}: float16 rounds most updates of such a "
                "rate away, and weights hardly move; set main_params_dtype=fp32, whose remainders "
                f"(store_param_remainders=true) have as few bytes and are exact, or lr to {LEAST_LR_OF_FP16:g} or more"
            )


@dataclass(frozen=True)
class SchedulerConfig(Block):
    lr_decay_style: Annotated[Literal["constant", "linear", "cosine", "WSD"], NEMO_RL] = "constant"
    """Shape of the decay. WSD: constant, with a decay in the last lr_wsd_decay_iters steps."""
    lr_wsd_decay_iters: Annotated[int | None, ABOVE_0, EarlierRuns(None), NEMO_RL] = None
    """Steps of the decay of WSD, the last of lr_decay_iters."""
    lr_wsd_decay_style: Annotated[
        Literal["exponential", "linear", "cosine", "minus_sqrt"], EarlierRuns("exponential"), NEMO_RL
    ] = "exponential"
    """Shape of the decay of WSD."""
    lr_decay_iters: Annotated[int, ABOVE_0, NEMO_RL] = 1000
    """Steps to min_lr."""
    lr_warmup_iters: Annotated[int, AT_LEAST_0, NEMO_RL] = 0
    """Steps of the warm-up."""
    lr_warmup_init: Annotated[float, AT_LEAST_0, NEMO_RL] = 0.0
    """Learning rate at the start of the warm-up."""
    per_rollout: Annotated[bool, EarlierRuns(False)] = False
    """Advance once a rollout, after its optimizer steps (ours). NeMo RL does so. false: before every optimizer step."""


@dataclass(frozen=True)
class DdpConfig(Block):
    """How data-parallel ranks sum gradients (`policy.optimizer.grad_reduce`)."""

    grad_reduce_in_fp32: Annotated[bool, EarlierRuns(True), NEMO_RL] = True
    """Accumulate and send gradients in float32. false: in policy.precision."""
    reduce_scatter_with_fp32_accumulation: Annotated[bool, EarlierRuns(False), NEMO_RL] = False
    """Send gradients in policy.precision and sum them in float32. This needs grad_reduce_in_fp32=false."""


AdapterInit = Literal["xavier", "kaiming", "normal", "zero"]


@dataclass(frozen=True)
class PeftConfig(Block):
    """Low-rank adapters (LoRA, arXiv 2106.09685) over a base that stays as it is; only the adapters are trained."""

    enabled: Annotated[bool, EarlierRuns(False), NEMO_RL] = False
    """Train adapters."""
    target_modules: Annotated[tuple[str, ...], EarlierRuns(()), NEMO_RL] = ()
    """Modules with an adapter: linear_qkv, linear_proj, linear_fc1, linear_fc2, or patterns of full names with `*`
    (`*.layers.0.*.linear_qkv`). Empty: all of these."""
    exclude_modules: Annotated[tuple[str, ...], EarlierRuns(()), NEMO_RL] = ()
    """Modules without one, where target_modules is empty."""
    dim: Annotated[int, ABOVE_0, EarlierRuns(8), NEMO_RL] = 8
    """Rank of an adapter."""
    alpha: Annotated[int, ABOVE_0, EarlierRuns(32), NEMO_RL] = 32
    """An adapter's output is multiplied by alpha / dim."""
    dropout: Annotated[float, Range(at_least=0, below=1), EarlierRuns(0.0), NEMO_RL] = 0.0
    """Share of values that an adapter leaves out in a training step."""
    dropout_position: Annotated[Literal["pre", "post"], EarlierRuns("post"), NEMO_RL] = "post"
    """Dropout of an adapter's input or of its output."""
    lora_A_init_method: Annotated[AdapterInit, EarlierRuns("xavier"), NEMO_RL] = "xavier"
    """First values of A, the matrix that reads the input."""
    lora_B_init_method: Annotated[AdapterInit, EarlierRuns("zero"), NEMO_RL] = "zero"
    """First values of B. With zero the first policy is the base."""


@dataclass(frozen=True)
class MegatronConfig(Block):
    tensor_model_parallel_size: Annotated[int, ABOVE_0, ANY_LAYOUT, NEMO_RL] = 1
    """Ranks that share each matrix."""
    pipeline_model_parallel_size: Annotated[int, ABOVE_0, ANY_LAYOUT, NEMO_RL] = 1
    """Pipeline stages."""
    num_layers_in_first_pipeline_stage: Annotated[int | None, ABOVE_0, ANY_LAYOUT, NEMO_RL] = None
    """Layers of the first stage; null is an equal share."""
    num_layers_in_last_pipeline_stage: Annotated[int | None, ABOVE_0, ANY_LAYOUT, NEMO_RL] = None
    """Layers of the last stage; null is an equal share. It shares what the first stage leaves."""
    context_parallel_size: Annotated[int, ABOVE_0, ANY_LAYOUT, NEMO_RL] = 1
    """Ranks that share each sequence. They share its tokens, in attention its heads instead."""
    expert_model_parallel_size: Annotated[int, ABOVE_0, ANY_LAYOUT, NEMO_RL] = 1
    """Ranks over which experts are spread. The rest of the model is data-parallel over these ranks."""
    expert_tensor_parallel_size: Annotated[int, ABOVE_0, ANY_LAYOUT, NEMO_RL] = reference(
        "${policy.megatron_cfg.tensor_model_parallel_size}"
    )
    """Ranks that share each expert's matrices. It has no meaning for a dense model."""
    freeze_moe_router: Annotated[bool, EarlierRuns(False), NEMO_RL] = False
    """Leave routers untrained. They are as in the checkpoint, and out of the gradient norm."""
    sequence_parallel: Annotated[bool, ANY_LAYOUT, NEMO_RL] = False
    """Split sequences over tensor-parallel ranks. Each rank keeps its part between the linears of a layer."""
    activation_checkpointing: Annotated[bool, MAY_CHANGE, NEMO_RL] = False
    """Compute layers again in the backward. Only the input of each layer is kept."""
    offload_between_phases: Annotated[bool, MAY_CHANGE] = False
    """Free the gradients' memory while engines generate. On a GPU also move the optimizer's state and the parameters to
    the host."""
    env_vars: Annotated[dict[str, str] | None, NEMO_RL] = None
    """Environment variables of the ranks. With cluster.backend=in_process they are the run's."""
    peft: PeftConfig = field(default_factory=PeftConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    distributed_data_parallel_config: DdpConfig = field(default_factory=DdpConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


@dataclass(frozen=True)
class DynamicBatchingConfig(Block):
    """Microbatches of samples sorted by length, as many as a budget of tokens holds, padding counted."""

    enabled: Annotated[bool, NEMO_RL] = False
    """Cut batches in this way."""
    train_mb_tokens: Annotated[int, ABOVE_0, NEMO_RL] = reference(TRAIN_TOKENS)
    """Tokens of a microbatch in training."""
    logprob_mb_tokens: Annotated[int, ABOVE_0, NEMO_RL] = reference(LOGPROB_TOKENS)
    """Tokens of a microbatch for log-probs."""
    sequence_length_round: Annotated[int, ABOVE_0, NEMO_RL] = 64
    """Round lengths up to a multiple of this. They are those of microbatches, as far as the batch has padding."""


@dataclass(frozen=True)
class SequencePackingConfig(Block):
    """Microbatches of sequences one after the other, without padding, as many as a budget of tokens holds."""

    enabled: Annotated[bool, NEMO_RL] = False
    """Cut batches in this way."""
    train_mb_tokens: Annotated[int, ABOVE_0, NEMO_RL] = reference(TRAIN_TOKENS)
    """Tokens of a microbatch in training."""
    logprob_mb_tokens: Annotated[int, ABOVE_0, NEMO_RL] = reference(LOGPROB_TOKENS)
    """Tokens of a microbatch for log-probs."""


@dataclass(frozen=True)
class RouterReplayConfig(Block):
    """R3: the trainer's routers take the experts that the engine's routers chose."""

    enabled: Annotated[bool, NEMO_RL] = False
    """Replay the engine's routes."""


@dataclass(frozen=True)
class PolicyConfig(Block):
    model_name: Annotated[
        str, MayChange("weights come from the checkpoint; the folder may have moved"), FILE_PATH, NEMO_RL
    ]
    """HF checkpoint folder, or owner/model[@revision] on the hub. A folder has config.json and safetensors. Families:
    Llama 3, Qwen2.5, Qwen3, Qwen3-MoE."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    train_global_batch_size: Annotated[int, ABOVE_0, NEMO_RL] = 512
    """Samples of an optimizer step."""
    train_micro_batch_size: Annotated[int, ABOVE_0, MICROBATCHES, NEMO_RL] = 4
    """Samples of a microbatch in training. Each replica of the model has its own."""
    logprob_batch_size: Annotated[int, ABOVE_0, MICROBATCHES, NEMO_RL] = reference("${policy.train_micro_batch_size}")
    """Samples of a microbatch for log-probs. Each replica has its own."""
    logprob_chunk_size: Annotated[int, ABOVE_0] = 1024
    """Tokens whose logits exist at a time."""
    dynamic_batching: Annotated[DynamicBatchingConfig, MICROBATCHES] = field(default_factory=DynamicBatchingConfig)
    max_total_sequence_length: Annotated[int, ABOVE_0, NEMO_RL] = 512
    """Tokens of a prompt with its answer, at most."""
    sequence_packing: Annotated[SequencePackingConfig, MICROBATCHES] = field(default_factory=SequencePackingConfig)
    router_replay: RouterReplayConfig = field(default_factory=RouterReplayConfig)
    precision: Annotated[Literal["bfloat16", "float16", "float32"], NEMO_RL] = "bfloat16"
    """Dtype of parameters and activations outside FP8 layers."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    megatron_cfg: MegatronConfig = field(default_factory=MegatronConfig)
