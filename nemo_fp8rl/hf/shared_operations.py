"""What `nemo_fp8rl.align=vllm` on a GPU asks of a recipe, and the sizes of a model's operations."""

from collections.abc import Iterable
from dataclasses import dataclass

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.fp8 import FP8
from nemo_fp8rl.hf.fp8_layers import engine_fp8_layers
from nemo_fp8rl.hf.model_config import HfConfig

OF_LAYER = {"qkv": "self_attn.q_proj", "o": "self_attn.o_proj", "gate_up": "gate_proj", "down": "down_proj"}
"""Kind of matrix -> the HF name, in a layer, by which `Fp8Layers` decides."""
FLASH_ATTENTION, FLASH_ATTENTION_HEAD = "FLASH_ATTN", 128
"""The name of vLLM's backend, and the size of the heads that are aligned with it."""


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model's operations.

    matrices:      name -> (N, K) of each kind of linear layer, and of the head
    fp8_matrices:  names of those that multiply in FP8, in order
    pow2:          the scales of FP8 blocks are powers of two
    experts:       number of experts; gate_up and down are then an expert's
    ranks:         number of ranks that share a row-parallel matrix
    fp8_cache:     attention of both sides reads keys and values from an FP8 KV cache
    flash_attention_3:  attention of both sides is FlashAttention 3 with one split
    kv_window:    generated tokens that a token sees on both sides; None for all
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    groups: int
    head_dim: int
    eps: float
    matrices: dict[str, tuple[int, int]]
    fp8_matrices: tuple[str, ...]
    pow2: bool
    experts: int = 0
    experts_per_token: int = 0
    ranks: int = 1
    fp8_cache: bool = False
    flash_attention_3: bool = False
    kv_window: int | None = None


def chooses_flash_attention_3(cfg: Config) -> bool:
    """True where a recipe that is aligned by shared operations takes attention from FlashAttention 3."""
    return (cfg.policy.generation.vllm_cfg.attention_backend or "").upper() == FLASH_ATTENTION


def check_shared_operations(hf: HfConfig, cfg: Config) -> None:
    """Raise UserError, with operation, key and fix, for a recipe that the shared operations do not cover."""
    vllm, megatron, prefix = cfg.policy.generation.vllm_cfg, cfg.policy.megatron_cfg, "policy.generation.vllm_cfg"
    engine_ranks, ranks = vllm.tensor_parallel_size, megatron.tensor_model_parallel_size
    of_engine, of_trainer = f"{prefix}.tensor_parallel_size", "policy.megatron_cfg.tensor_model_parallel_size"
    sharing = "policy.megatron_cfg.expert_tensor_parallel_size"
    other = "nemo_fp8rl.align=none"
    takes_flash_attention = chooses_flash_attention_3(cfg)
    backend = f"{prefix}.attention_backend={vllm.attention_backend}"
    shared_kernel = f"{prefix}.attention_backend=null, and both sides take their shared kernel, or {other}"
    choice = cfg.nemo_fp8rl
    refused = [
        (
            choice.quantizes_rollout and choice.format is not FP8,
            f"nemo_fp8rl.flow={choice.flow}: the product of another format than blockwise FP8",
            other,
        ),
        (
            vllm.attention_backend and not takes_flash_attention,
            f"{backend}: attention by a backend of vLLM",
            other,
        ),
        (
            takes_flash_attention and hf.head_dim != FLASH_ATTENTION_HEAD,
            f"{backend}: FlashAttention 3, whose tiles depend on the batch for heads of {hf.head_dim} values, and do "
            f"not for heads of {FLASH_ATTENTION_HEAD},",
            shared_kernel,
        ),
        (
            takes_flash_attention and cfg.fp8_kv_cache,
            f"{backend} with {prefix}.kv_cache_dtype=fp8: FlashAttention 3, which then multiplies queries and "
            "probabilities in FP8 as well,",
            shared_kernel,
        ),
        (
            takes_flash_attention and vllm.kv_window is not None,
            f"{backend} with {prefix}.kv_window={vllm.kv_window}: FlashAttention 3, which has no mask for a window,",
            shared_kernel,
        ),
        (
            ranks != engine_ranks,
            f"{of_trainer}={ranks} beside {of_engine}={engine_ranks}: a sum over other ranks",
            f"both to one size, or {other}",
        ),
        (
            cfg.policy.precision != "bfloat16",
            f"policy.precision={cfg.policy.precision}: a model in {cfg.policy.precision}",
            other,
        ),
        (
            hf.family.experts and engine_ranks > 1 and vllm.expert_parallel_size == 1,
            f"{of_engine}={engine_ranks}: a sum over ranks that share each expert",
            f"{prefix}.expert_parallel_size={engine_ranks}",
        ),
        (
            hf.family.experts and megatron.expert_tensor_parallel_size > 1,
            f"{sharing}={megatron.expert_tensor_parallel_size}: a sum over ranks that share each expert",
            f"{sharing}=1",
        ),
    ]
    for applies, reason, fix in refused:
        if applies:
            raise UserError(f"nemo_fp8rl.align=vllm: {reason} is not aligned on a GPU; set {fix}")


def differing_operations(trainer: Iterable[tuple[str, str]], engines: Iterable[tuple[str, str]]) -> list[str]:
    """Return the operations, in order, that have more than one digest on the ranks of both sides."""
    digests: dict[str, set[str]] = {}
    for operation, digest in (*trainer, *engines):
        digests.setdefault(operation, set()).add(digest)
    return sorted(operation for operation, of_operation in digests.items() if len(of_operation) > 1)


def operation_shapes(hf: HfConfig, cfg: Config) -> Shapes:
    """Return the sizes of a model's operations on one of the engine's ranks.

    The kinds of matrices that are FP8 are those of any FP8 layer: layers have the same sizes. Matrices that are FP8 in
    the engine alone (flow fp8_rollout) are left out, because the two sides multiply other numbers.
    """
    ranks = cfg.policy.generation.vllm_cfg.tensor_parallel_size
    heads, groups = hf.num_attention_heads // ranks, max(1, hf.num_key_value_heads // ranks)
    h, q, kv = hf.hidden_size, heads * hf.head_dim, groups * hf.head_dim
    width = hf.intermediate_size // (1 if hf.family.experts else ranks)  # ranks do not share an expert
    fp8 = engine_fp8_layers(hf, cfg)
    layers = range(hf.num_hidden_layers)
    mlp = "mlp.experts." if hf.family.experts else "mlp."
    names = {kind: part if "." in part else mlp + part for kind, part in OF_LAYER.items()}
    in_fp8 = [k for k, part in names.items() if any(fp8.quantizes(f"model.layers.{i}.{part}") for i in layers)]
    matrices = {
        "qkv": (q + 2 * kv, h),
        "o": (h, q),
        "gate_up": (2 * width, h),
        "down": (h, width),
        "head": (-(-hf.vocab_size // ranks), h),
    }
    in_both = cfg.nemo_fp8rl.quantizes_training
    return Shapes(
        hidden_size=h,
        intermediate_size=width,
        heads=heads,
        groups=groups,
        head_dim=hf.head_dim,
        eps=hf.rms_norm_eps,
        matrices={kind: shape for kind, shape in matrices.items() if in_both or kind not in in_fp8},
        fp8_matrices=tuple(in_fp8) if in_both else (),
        pow2=cfg.nemo_fp8rl.scale_format == "pow2",
        experts=hf.num_experts,
        experts_per_token=hf.num_experts_per_tok,
        ranks=ranks,
        fp8_cache=cfg.fp8_kv_cache and cfg.nemo_fp8rl.kv == "unified",
        flash_attention_3=chooses_flash_attention_3(cfg),
        kv_window=cfg.trainer_kv_window,
    )
