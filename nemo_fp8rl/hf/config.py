"""The architecture, read from an HF checkpoint's config.json, and what FP8 asks of it."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_fp8rl.config import Config
from nemo_fp8rl.errors import UserError
from nemo_fp8rl.fp8 import BLOCK, Fp8Layers
from nemo_fp8rl.hf.hub import checkpoint_folder


@dataclass(frozen=True)
class Family:
    """What sets a family apart from the others; all are pre-norm decoders with grouped queries and a gated MLP."""

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False

    @property
    def intermediate_size(self) -> str:
        """HF's key for the width of the MLP, or of one expert."""
        return "moe_intermediate_size" if self.experts else "intermediate_size"


FAMILIES = {  # by model_type; Llama 3, Qwen2.5, Qwen3 and Qwen3-MoE
    "llama": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, experts=True),
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class HfConfig:
    """Family and sizes of a model, under HF's names.

    intermediate_size: of the MLP, or of one expert (HF's moe_intermediate_size). num_experts: 0 in a dense model.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_type: str
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    num_experts: int = 0
    num_experts_per_tok: int = 0


def read_hf_config(model_path: str | Path) -> HfConfig:
    """Read and check config.json (and generation_config.json for the end-of-sequence tokens).

    model_path: a folder, or a name on the Hugging Face hub. Raises UserError for a missing folder or file, another
    family or RoPE, or an already quantized checkpoint.
    """
    folder = checkpoint_folder(model_path)
    raw = _read_json(folder / "config.json")
    if raw is None:
        raise UserError(
            f"policy.model_name: {folder} has no config.json; give an HF checkpoint folder, or a name on the hub"
        )
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        raise UserError(
            f"{folder}/config.json: model_type {raw.get('model_type')!r} is not supported; "
            f"supported families: {', '.join(FAMILIES)}"
        )
    if "quantization_config" in raw:
        raise UserError(f"{folder} is already quantized; give the bfloat16 checkpoint that it was made from")
    for key in ("use_sliding_window", "attention_bias", "mlp_bias"):
        if raw.get(key):
            raise UserError(f"{folder}/config.json: {key}={raw[key]} is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"{folder}/config.json: hidden_act {raw['hidden_act']!r} is not supported, only silu")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise UserError(f"{folder}/config.json: rope_type {rope_type!r} is not supported, only {', '.join(ROPE_TYPES)}")
    factor = rope.get("factor")
    if rope_type != "default" and (not isinstance(factor, (int, float)) or isinstance(factor, bool) or factor < 1):
        raise UserError(f"{folder}/config.json: rope_type {rope_type!r} needs a factor of 1 or more, got {factor!r}")
    if (rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UserError(f"{folder}/config.json: partial_rotary_factor is not supported, only 1")
    if family.experts:
        _check_experts(raw, folder)
    generation = _read_json(folder / "generation_config.json") or {}
    heads = _size(raw, folder, "num_attention_heads")
    groups = _size(raw, folder, "num_key_value_heads", heads)
    hidden_size = _size(raw, folder, "hidden_size")
    if heads % groups:
        raise UserError(
            f"{folder}/config.json: num_key_value_heads={groups} does not divide num_attention_heads={heads}"
        )
    if raw.get("head_dim") is None and hidden_size % heads:
        raise UserError(
            f"{folder}/config.json: num_attention_heads={heads} does not divide hidden_size={hidden_size}, and "
            "there is no head_dim"
        )
    head_dim = _size(raw, folder, "head_dim", hidden_size // heads)
    if head_dim % 2:
        raise UserError(f"{folder}/config.json: head_dim={head_dim} is odd, rotary embedding needs two halves")
    return HfConfig(
        family=family,
        vocab_size=_size(raw, folder, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(raw, folder, family.intermediate_size),
        num_hidden_layers=_size(raw, folder, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta") or raw.get("rope_theta", 10000.0),
        rope_type=rope_type,
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        max_position_embeddings=_size(raw, folder, "max_position_embeddings"),
        eos_token_ids=_token_ids(raw.get("eos_token_id")) + _token_ids(generation.get("eos_token_id")),
        num_experts=_size(raw, folder, _experts_key(raw)) if family.experts else 0,
        num_experts_per_tok=_size(raw, folder, "num_experts_per_tok") if family.experts else 0,
    )


def _experts_key(raw: dict[str, Any]) -> str:
    """transformers writes num_local_experts since 5.19."""
    return "num_local_experts" if "num_local_experts" in raw else "num_experts"


def _check_experts(raw: dict[str, Any], folder: Path) -> None:
    """Raise UserError for a mixture that the policy would build otherwise than the checkpoint means it."""
    if not raw.get("norm_topk_prob", False):  # HF's default
        raise UserError(f"{folder}/config.json: norm_topk_prob=false is not supported, only true (Qwen3-30B-A3B's)")
    if raw.get("decoder_sparse_step", 1) != 1 or raw.get("mlp_only_layers"):
        raise UserError(
            f"{folder}/config.json: decoder_sparse_step and mlp_only_layers mix in dense layers, which is "
            "not supported: every layer must have experts"
        )
    experts, chosen = _size(raw, folder, _experts_key(raw)), _size(raw, folder, "num_experts_per_tok")
    if chosen > experts:
        raise UserError(f"{folder}/config.json: num_experts_per_tok={chosen} is above {_experts_key(raw)}={experts}")


def _size(raw: dict[str, Any], folder: Path, key: str, default: int | None = None) -> int:
    """A positive whole number of config.json; absent or null is `default`."""
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise UserError(f"{folder}/config.json lacks {key}; give a complete HF config")
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UserError(f"{folder}/config.json: {key} must be a whole number above 0, got {value!r}")
    return value


def check_context(hf: HfConfig, max_total_sequence_length: int) -> None:
    """Raise UserError when sequences may grow longer than the model was made for."""
    if max_total_sequence_length > hf.max_position_embeddings:
        raise UserError(
            f"policy.max_total_sequence_length={max_total_sequence_length} is above the model's "
            f"max_position_embeddings={hf.max_position_embeddings}; lower it"
        )


def engine_fp8_layers(hf: HfConfig, cfg: Config) -> Fp8Layers:
    """The layers that the engine holds in FP8 and that the refit quantizes for it.

    Raises UserError when the model's sizes do not fit the blocks, or when no layer would be left.
    """
    if not cfg.nemo_fp8rl.engine_fp8:
        return Fp8Layers.none()
    check_fp8_alignment(hf, cfg.nemo_fp8rl.flow)
    vllm = cfg.policy.generation.vllm_cfg
    first, last = vllm.num_first_layers_in_bf16, vllm.num_last_layers_in_bf16
    if first + last >= hf.num_hidden_layers:
        raise UserError(
            f"policy.generation.vllm_cfg.num_first_layers_in_bf16={first} and num_last_layers_in_bf16={last} leave no "
            f"FP8 layer of the model's {hf.num_hidden_layers}; lower them, or use nemo_fp8rl.flow=bf16"
        )
    layers = Fp8Layers(first, hf.num_hidden_layers - last, vllm.quantization_ignored_layer_kws)
    check_ignored(hf, layers, "policy.generation.vllm_cfg.quantization_ignored_layer_kws")
    return layers


def check_ignored(hf: HfConfig, layers: Fp8Layers, key: str) -> None:
    """Raise UserError when a word of `layers.ignored` is in no layer's name, or when the words leave no FP8 layer."""
    everything = projections(hf, dataclasses.replace(layers, ignored=()))
    for word in layers.ignored:
        if projections(hf, dataclasses.replace(layers, ignored=(word,))) == everything:
            raise UserError(f"{key}: {word!r} is in the name of no FP8 layer of this model; remove or correct it")
    if not projections(hf, layers):
        raise UserError(f"{key}={list(layers.ignored)} leaves no FP8 layer; remove words, or stay in bfloat16")


def projections(hf: HfConfig, layers: Fp8Layers) -> list[str]:
    """One HF name for each FP8 matrix of the model, fused as engines and trainers hold them; experts count as one."""
    mlp = "mlp.experts" if hf.family.experts else "mlp"
    parts = ("self_attn.q_proj", "self_attn.o_proj", f"{mlp}.gate_proj", f"{mlp}.down_proj")
    names = (f"model.layers.{layer}.{part}" for layer in range(hf.num_hidden_layers) for part in parts)
    return [name for name in names if layers.quantizes(name)]


def trainer_fp8_layers(hf: HfConfig, cfg: Config) -> Fp8Layers:
    """The layers whose linears train in FP8: the engine's, or none."""
    return engine_fp8_layers(hf, cfg) if cfg.nemo_fp8rl.trainer_fp8 else Fp8Layers.none()


def check_fp8_alignment(hf: HfConfig, flow: str) -> None:
    """Raise UserError when a fused projection would not start at a block border.

    The trainer quantizes the fused QKV, the engine the fused gate-up; unless every part is a multiple of 128 rows,
    trainer-local blocks and engine-local blocks would be different blocks.
    """
    mlp = hf.family.intermediate_size
    for name, size in (("head_dim", hf.head_dim), (mlp, hf.intermediate_size)):
        if size % BLOCK[0]:
            raise UserError(
                f"nemo_fp8rl.flow={flow} cannot run this model: its {name}={size} is not a multiple of {BLOCK[0]}, "
                "so trainer and engine would not quantize the same blocks; use nemo_fp8rl.flow=bf16"
            )


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object")
    return value


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)
