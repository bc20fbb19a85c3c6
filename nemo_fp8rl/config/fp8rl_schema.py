"""The block `nemo_fp8rl:` of a recipe: precision on both sides, the refit, rollout correction and gates."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from nemo_fp8rl.algorithms.correction_config import CorrectionConfig
from nemo_fp8rl.algorithms.gates import GateConfig
from nemo_fp8rl.common.field_rules import ABOVE_0, AT_LEAST_0, MAY_CHANGE, Block, EarlierRuns, MayChange, NemoRl, Range
from nemo_fp8rl.fp8 import FLOW_FORMATS, FP8, Format, ScaleFormat, with_lines
from nemo_fp8rl.fp8.names import Backward, Estimator

Flow = Literal[
    "bf16",
    "fp8_rollout",
    "fp8_e2e",
    "mxfp8_rollout",
    "mxfp8_e2e",
    "nvfp4_rollout",
    "nvfp4_e2e",
    "nvfp4_a16_rollout",
    "nvfp4_a16_e2e",
]
"""The format, and the sides that quantize in it: the engine alone (rollout), or engine and trainer (e2e)."""
SAME_BYTES = MayChange("engines end with the same bytes")


@dataclass(frozen=True)
class RefitConfig(Block):
    """The way in which a version of the weights travels from the trainer's ranks to the engines."""

    mode: Literal["auto", "full", "delta"] = "auto"
    """Send all bytes or those that changed. auto takes whichever took less time, and full with offload_between_phases,
    because deltas need a copy that stays. Engines end with the same bytes."""
    transport: Literal["auto", "in_process", "shared_memory", "cuda_ipc", "nixl", "collective", "nemo_rl"] = "auto"
    """Carrier of the bytes. auto is in_process where trainer and engine share a process; else it is chosen for each
    link: within a machine cuda_ipc for weights on GPUs and shared_memory for others, between machines collective
    (gloo). nixl (RDMA) is never chosen by auto. nemo_rl is for NeMo RL's own workers: its own transport."""
    bucket_bytes: Annotated[int, ABOVE_0] = 256 * 2**20
    """Bytes that travel at once, at most. Trainer and engine ranks hold two such buckets, shared by all their links."""
    verify: Literal["off", "digest", "full", False] = "digest"
    """Compare the engine's memory with the trainer's: by the digest of every tensor, or byte by byte, which sends all
    twice. YAML reads off as false."""


@dataclass(frozen=True)
class Fp4Config(Block):
    """Training in FP4 (flow nvfp4_e2e, and estimator in nvfp4_a16_e2e)."""

    hadamard: Annotated[bool, EarlierRuns(True)] = True
    """Transform the operands of a weight's gradient along the tokens. It is of backward=native."""
    stochastic_rounding: Annotated[bool, EarlierRuns(True)] = True
    """Round gradients at random, unbiased. It is of backward=native; the numbers follow from grpo.seed and the step."""
    estimator: Annotated[Estimator, EarlierRuns("straight_through")] = "straight_through"
    """Slope of a weight's rounding in its gradient. It is 1, or the differentiable one of arXiv 2501.17116."""
    clamp_quantile: Annotated[float | None, Range(above=0.5, below=1), EarlierRuns(None)] = None
    """Clamp a token's activations to its quantiles [1 - q, q]. The product of the rest, in high precision, is added, in
    trainer and engine (on a CPU): arXiv 2501.17116, with quantiles of each token."""


@dataclass(frozen=True)
class NoiseConfig(Block):
    """Exploration noise on the norms before attention and MLP (QeRL, arXiv 2510.11696), drawn anew for every refit."""

    enabled: Annotated[bool, EarlierRuns(False)] = False
    """Add noise."""
    sigma_start: Annotated[float, ABOVE_0, EarlierRuns(1e-2)] = 1e-2
    """Standard deviation of the first noise."""
    sigma_end: Annotated[float, ABOVE_0, EarlierRuns(5e-4)] = 5e-4
    """Standard deviation to which it falls."""
    stages: Annotated[int, Range(at_least=3), EarlierRuns(10)] = 10
    """Parts of the run with one sigma each, the first without."""
    schedule: Annotated[Literal["code", "paper"], EarlierRuns("code")] = "code"
    """Rule of the stages: of QeRL's code, whose last stage reaches sigma_end, or of its paper, which stays above."""
    where: Annotated[Literal["engine", "both"], EarlierRuns("engine")] = "engine"
    """Side with the noise. engine: it explores, and rollout correction sees the difference. both: the trainer's
    log-probs have the same noise."""


@dataclass(frozen=True)
class SharpnessConfig(Block):
    """Sharpness of the loss over the logits (arXiv 2405.18710): its rise at the worst point of a small box."""

    period: Annotated[int, AT_LEAST_0, MAY_CHANGE, EarlierRuns(0)] = 0
    """Steps between measurements; 0 never measures."""
    epsilon: Annotated[float, ABOVE_0, MAY_CHANGE, EarlierRuns(5e-4)] = 5e-4
    """Half the side of the box, of a logit x in units of |x| + 1."""


@dataclass(frozen=True)
class Fp8RlConfig(Block):
    """Keys that NeMo RL does not have."""

    removed_keys: ClassVar = {"kernel": "the kernel that quantizes follows the device"}

    flow: Annotated[Flow, NemoRl("policy.megatron_cfg.fp8_cfg.enabled and policy.generation.vllm_cfg.precision")] = (
        "fp8_e2e"
    )
    """Precision: bf16 on both sides, or a number format in the engine only (rollout) or on both sides by one contract
    (e2e). fp8 has blocks of 128x128, mxfp8 of 32x32 values; nvfp4 has 4 bits and blocks of 16x16, and nvfp4_a16 leaves
    activations in bfloat16."""
    align: Literal["auto", "vllm", "none"] = "auto"
    """Rounding outside the FP8 matmuls. vllm: the trainer gives each token the engine's log-prob, on a CPU by the
    roundings of vLLM's kernels, on a GPU by operations that both sides share. none: Megatron's rounding. auto is vllm
    without a GPU and none on a GPU, where the shared operations have not run yet."""
    scale_format: Annotated[
        ScaleFormat,
        NemoRl("policy.megatron_cfg.env_vars and policy.generation.vllm_cfg.pow2_weight_scaling_factors"),
    ] = "pow2"
    """Scales of the FP8 blocks, and the global scale of an NVFP4 tensor. Every quantizer agrees on pow2 scales only."""
    weight_block: Annotated[Literal["square", "line"], EarlierRuns("square")] = "square"
    """Blocks of MXFP8 and NVFP4 weights. square: 32x32 and 16x16, the same bytes forward and backward. line: 1x32 and
    1x16, as libraries quantize for engines alone."""
    backward: Annotated[Literal["auto"] | Backward, EarlierRuns("auto")] = "auto"
    """Operands of the gradients' matmuls. native: operands quantized for them; dequantized: the forward's, with
    gradients in high precision; high_precision: nothing quantized. auto is native for fp8 and mxfp8, and dequantized
    for nvfp4."""
    fp4: Fp4Config = field(default_factory=Fp4Config)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    kv: Literal["unified", "rollout"] = "unified"
    """Attention of the trainer under an FP8 KV cache (vllm_cfg.kv_cache_dtype) or a window (vllm_cfg.kv_window).
    unified: it reads what the cache holds. rollout: it has all its keys and values."""
    workers: Annotated[Literal["auto", "ours", "nemo_rl"], MAY_CHANGE] = "auto"
    """Trainer and engines of `nemo-fp8rl nemo`: ours or NeMo RL's, which need GPUs. auto takes NeMo RL's where there
    are GPUs and nothing is MXFP8 or NVFP4."""
    fp8_param: Annotated[bool, MAY_CHANGE, NemoRl("policy.megatron_cfg.fp8_cfg.fp8_param")] = False
    """Hold weights of FP8 layers in FP8 alone (GPU). A refit sends these bytes as they are; the optimizer
    has the float32 master. The bytes, and so the numbers, are the same; without a GPU it changes nothing."""
    refit: Annotated[RefitConfig, SAME_BYTES] = field(default_factory=RefitConfig)
    correction: CorrectionConfig | None = None
    """Rollout correction beyond loss_fn's keys; null follows these."""
    gates: Annotated[tuple[GateConfig, ...], MayChange("a run that a gate stopped can go on")] = ()
    """Limits on the mismatch of trainer and engine, and on the sharpness."""
    grad_reduce: Annotated[Literal["auto", "fp8"], EarlierRuns("auto")] = "auto"
    """Bytes of gradients between data-parallel ranks. auto: as policy.megatron_cfg.distributed_data_parallel_config;
    fp8: blocks of 128 values in FP8, summed in float32 in the order of ranks."""
    sharpness: SharpnessConfig = field(default_factory=SharpnessConfig)
    mismatch_alarm: Annotated[Literal["warn", "stop", "none"], MAY_CHANGE] = "warn"
    """Action at a step whose mismatch is larger than its precision explains. warn: one line on stderr and in the log;
    stop: end the run; none: nothing."""

    @property
    def quantizes_training(self) -> bool:
        return self.flow.endswith("_e2e")

    @property
    def quantizes_rollout(self) -> bool:
        return self.flow != "bf16"

    @property
    def resolved_backward(self) -> Backward:
        return self.format.default_backward if self.backward == "auto" else self.backward

    def describe_backward(self) -> str:
        """Return how gradients are computed: `backward` as resolved, and what of FP4 goes with it."""
        backward, fp4 = self.resolved_backward.replace("_", " "), self.fp4
        if not self.format.is_fp4:
            return backward
        parts = {
            "Hadamard transform": fp4.hadamard and backward == "native",
            "stochastic rounding": fp4.stochastic_rounding and backward == "native",
            "differentiable estimator": fp4.estimator == "differentiable",
            f"activations clamped at quantile {fp4.clamp_quantile}": fp4.clamp_quantile is not None,
        }
        return ", ".join([backward, *(part for part, is_on in parts.items() if is_on)])

    @property
    def format(self) -> Format:
        """The format of quantized layers; FP8, which nothing uses then, where there are none."""
        name = self.flow.removesuffix("_e2e").removesuffix("_rollout")
        format = FLOW_FORMATS.get(name, FP8)
        return with_lines(format) if self.weight_block == "line" else format
