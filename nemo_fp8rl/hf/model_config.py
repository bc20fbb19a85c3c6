"""The architecture of a model, read from the config.json of an HF checkpoint."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.typed_tree import short_repr
from nemo_fp8rl.hf.config_keys import check_config_keys
from nemo_fp8rl.hf.hub import checkpoint_folder, local_folder_hint
from nemo_fp8rl.hf.quantized_checkpoint import refuse_quantized


@dataclass(frozen=True)
class Family:
    """The differences between families; all are pre-norm decoders with grouped queries and a gated MLP.

    architecture: the class of the family in transformers and vLLM
    qkv_bias: q, k and v have a bias
    qk_norm:  q and k have a norm
    experts:  the MLP is a mixture of experts
    head_dim: the default where config.json has no head_dim; None stands for hidden_size / heads
    """

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    head_dim: int | None = None

    @property
    def intermediate_size(self) -> str:
        """HF's key for the width of the MLP, or of one expert."""
        return "moe_intermediate_size" if self.experts else "intermediate_size"


FAMILIES = {  # by model_type; Llama 3, Qwen2.5, Qwen3 and Qwen3-MoE
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, head_dim=128),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm=True, experts=True),
}
LARGEST_SIZE = 10**8
LARGEST_COUNT = 10_000
"""The largest number of layers, heads or experts: our code loops over them."""
COUNTS = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
)
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ORIGINAL = "original_max_position_embeddings"
ROPE_REQUIRED = {"llama3": ("low_freq_factor", "high_freq_factor", ORIGINAL)}
"""rope_type -> numbers above 0 that it requires beside its factor."""
ROPE_OPTIONAL = {"yarn": ("beta_fast", "beta_slow", ORIGINAL, "attention_factor", "mscale", "mscale_all_dim")}
"""rope_type -> optional numbers."""
ROPE_KEYS = ("rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", ORIGINAL)
"""Keys of every rope_type; `default` has no use for the last two."""
ROPE_FLAGS = {"yarn": ("truncate",)}
NULLABLE = ("attention_factor", "mscale", "mscale_all_dim")
ZERO_ALLOWED = ("mscale", "mscale_all_dim")  # 0 means the same as an absent number


@dataclass(frozen=True)
class HfConfig:
    """Family and sizes of a model, under HF's names.

    intermediate_size:     width of the MLP, or of one expert (HF's moe_intermediate_size)
    num_experts:           0 in a dense model
    rope_factor:           factor of a scaled RoPE
    yarn_original_context: YaRN's original_max_position_embeddings; None if config.json has none
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
    rope_factor: float = 1.0
    yarn_original_context: float | None = None

    @property
    def longest_context(self) -> int:
        """The number of positions that vLLM 0.32 accepts and also has in its table.

        `linear` RoPE multiplies config.json's number by its factor; other RoPE does not (vllm/config/model.py,
        _get_and_verify_max_len). The table of YaRN may be shorter, which vLLM does not check
        (rotary_embedding/yarn_scaling_rope.py).
        """
        factor = self.rope_factor if self.rope_type == "linear" else 1
        longest = int(min(self.max_position_embeddings * factor, LARGEST_SIZE))
        return longest if self.yarn_context is None else min(longest, self.yarn_context)

    @property
    def yarn_context(self) -> int | None:
        """The original context of YaRN times its factor; None if config.json has no original context."""
        if self.yarn_original_context is None:
            return None
        return int(min(self.yarn_original_context * self.rope_factor, LARGEST_SIZE))


def checkpoint_hint(folder: Path) -> str:
    """Return what to give instead of a run, or of the folder of a tiny model that is still to be made; else ""."""
    for kind in ("weights", "adapter"):
        names = [path.parts[-3].removeprefix("step_") for path in folder.glob(f"checkpoints/step_*/policy/{kind}")]
        if steps := [int(name) for name in names if name.isdigit()]:
            path = f"{folder}/checkpoints/step_{max(steps)}/policy/{kind}"
            return f"; of this run it would be {path}" if kind == "weights" else _merge_hint(path)
    if (folder / "adapter_config.json").is_file():
        return _merge_hint(folder)
    if folder.parts[-2:] == ("tiny", "warm"):
        return "; `nemo-fp8rl make-tiny` and then `nemo-fp8rl sft` with the recipe tiny_sft make this one"
    return ""


def _merge_hint(folder: str | Path) -> str:
    return f"; `nemo-fp8rl export --checkpoint {folder} --merge --format bf16` makes one of a run's adapters"


def read_hf_config(model_path: str | Path) -> HfConfig:
    """Read and check config.json, and generation_config.json for the end-of-sequence tokens.

    model_path: a folder, or a name on the Hugging Face hub
    Raises:     UserError for a missing folder or file, an unsupported family or RoPE, or a quantized checkpoint
    """
    folder = checkpoint_folder(model_path)
    path = folder / "config.json"
    raw = read_json(path)
    if raw is None:
        raise UserError(
            f"policy.model_name: {folder} has no config.json; give an HF checkpoint folder, or a name on the hub"
            f"{checkpoint_hint(folder)}{local_folder_hint(model_path)}"
        )
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        raise UserError(
            f"{path}: model_type {short_repr(raw.get('model_type'))} is not supported; "
            f"supported families: {', '.join(FAMILIES)}"
        )
    refuse_quantized(folder, raw)
    check_config_keys(raw, path, family.architecture, family.experts)
    for key in ("use_sliding_window", "attention_bias", "mlp_bias"):
        if raw.get(key):
            raise UserError(f"{path}: {key}={short_repr(raw[key])} is not supported")
    kinds = raw.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)):
        raise UserError(f"{path}: layer_types {short_repr(kinds)} is not supported, only full_attention")
    if kinds is not None and len(kinds) != (layers := size(raw, path, "num_hidden_layers")):
        raise UserError(
            f"{path}: layer_types has {len(kinds)} entries, give one for each of num_hidden_layers={layers}"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"{path}: hidden_act {short_repr(raw['hidden_act'])} is not supported, only silu")
    rope = _rope(raw, path)
    if family.experts:
        _check_experts(raw, path)
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) or {}
    heads = size(raw, path, "num_attention_heads")
    groups = size(raw, path, "num_key_value_heads", heads)
    hidden_size = size(raw, path, "hidden_size")
    if heads % groups:
        raise UserError(f"{path}: num_key_value_heads={groups} does not divide num_attention_heads={heads}")
    head_dim = _head_dim(raw, path, family)
    return HfConfig(
        family=family,
        vocab_size=size(raw, path, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=size(raw, path, family.intermediate_size),
        num_hidden_layers=size(raw, path, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        rms_norm_eps=_positive(raw, path, "rms_norm_eps", 1e-6),
        rope_theta=rope.theta,
        rope_type=rope.kind,
        rope_factor=rope.factor,
        yarn_original_context=rope.original_context,
        tie_word_embeddings=boolean(raw, path, "tie_word_embeddings"),
        max_position_embeddings=size(raw, path, "max_position_embeddings"),
        eos_token_ids=_token_ids(raw, path, "eos_token_id") + _token_ids(generation, generation_path, "eos_token_id"),
        num_experts=size(raw, path, _experts_key(raw)) if family.experts else 0,
        num_experts_per_tok=size(raw, path, "num_experts_per_tok") if family.experts else 0,
    )


def _head_dim(raw: dict[str, Any], path: Path, family: Family) -> int:
    if family.head_dim is not None:  # transformers accepts no null for this key
        head_dim = size(raw, path, "head_dim") if "head_dim" in raw else family.head_dim
    else:
        hidden_size, heads = size(raw, path, "hidden_size"), size(raw, path, "num_attention_heads")
        if raw.get("head_dim") is None and hidden_size % heads:
            raise UserError(
                f"{path}: num_attention_heads={heads} does not divide hidden_size={hidden_size}, and there is no "
                "head_dim"
            )
        head_dim = size(raw, path, "head_dim", hidden_size // heads)
        if family.qkv_bias and head_dim * heads != hidden_size:  # vLLM's qwen2.py does not read head_dim
            raise UserError(
                f"{path}: head_dim={head_dim} is not hidden_size={hidden_size} over num_attention_heads={heads}, which "
                "vLLM takes for this family"
            )
    if head_dim % 2:
        raise UserError(f"{path}: head_dim={head_dim} is odd, rotary embedding needs two halves")
    return head_dim


class _Rope(NamedTuple):
    kind: str
    theta: float
    factor: float
    original_context: float | None


def _rope(raw: dict[str, Any], path: Path) -> _Rope:
    """Read the RoPE as HF does. Raises UserError for a RoPE that is not supported."""
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"  # transformers' order if both are present
    rope = raw.get(key) or {}
    if not isinstance(rope, dict):
        raise UserError(f"{path}: {key} must be an object or null, got {short_repr(rope)}")
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise UserError(f"{path}: rope_type {short_repr(rope_type)} is not supported, only {', '.join(ROPE_TYPES)}")
    if (rope.get("type") or rope_type) != rope_type:
        raise UserError(f"{path}: {key} has rope_type {rope_type!r} and type {short_repr(rope['type'])}; remove one")
    keys_of_type = (
        *ROPE_REQUIRED.get(rope_type, ()),
        *ROPE_OPTIONAL.get(rope_type, ()),
        *ROPE_FLAGS.get(rope_type, ()),
    )
    if others := [name for name in rope if name not in (*ROPE_KEYS, *keys_of_type)]:
        raise UserError(
            f"{path}: {key}.{others[0]}={short_repr(rope[others[0]])} is not supported with rope_type {rope_type!r}: "
            "vLLM may go by it where the trainer does not; remove it if the weights are of a model without it"
        )
    if not isinstance(rope.get("truncate", True), bool):
        raise UserError(f"{path}: {key}.truncate must be true or false, got {short_repr(rope['truncate'])}")
    factor = rope.get("factor") if rope_type != "default" else 1.0
    if not _is_number(factor) or factor < 1:
        raise UserError(f"{path}: rope_type {rope_type!r} needs a factor of 1 or more, got {short_repr(factor)}")
    if rope_type == "linear" and not isinstance(factor, float):
        raise UserError(f"{path}: vLLM takes the factor of rope_type 'linear' with a point alone; write {factor}.0")
    if (rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UserError(f"{path}: partial_rotary_factor is not supported, only 1")
    numbers = rope | ({ORIGINAL: raw[ORIGINAL]} if ORIGINAL in raw else {})  # transformers prefers the outer key
    for name in ROPE_REQUIRED.get(rope_type, ()):
        _check_rope_number(numbers, path, rope_type, name)
    for name in ROPE_OPTIONAL.get(rope_type, ()):
        if name in numbers and not (numbers[name] is None and name in NULLABLE):
            _check_rope_number(numbers, path, rope_type, name)
    theta = _positive(rope if rope.get("rope_theta") else raw, path, "rope_theta", 10000.0)
    if rope_type == "yarn" and theta <= 1:  # YaRN divides by its logarithm
        raise UserError(f"{path}: rope_theta of rope_type 'yarn' must be above 1, got {short_repr(theta)}")
    return _Rope(rope_type, theta, factor, numbers.get(ORIGINAL) if rope_type == "yarn" else None)


def _check_rope_number(rope: dict[str, Any], path: Path, rope_type: str, name: str) -> None:
    value, zero = rope.get(name), name in ZERO_ALLOWED
    if not _is_number(value) or value < 0 or (value == 0 and not zero):
        above = "of 0 or more" if zero else "above 0"
        raise UserError(
            f"{path}: {name} of rope_type {rope_type!r} must be a finite number {above}, got {short_repr(value)}"
        )


def _experts_key(raw: dict[str, Any]) -> str:
    """Return the key that config.json uses: transformers writes num_local_experts since 5.19."""
    return "num_local_experts" if "num_local_experts" in raw else "num_experts"


def _check_experts(raw: dict[str, Any], path: Path) -> None:
    """Raise UserError for a mixture of experts that the policy would build differently from the checkpoint."""
    if not raw.get("norm_topk_prob", False):  # HF's default
        raise UserError(f"{path}: norm_topk_prob=false is not supported, only true (Qwen3-30B-A3B's)")
    if raw.get("decoder_sparse_step", 1) != 1 or raw.get("mlp_only_layers"):
        raise UserError(
            f"{path}: decoder_sparse_step and mlp_only_layers mix in dense layers, which is "
            "not supported: every layer must have experts"
        )
    if "num_experts" in raw and raw["num_experts"] != raw.get(_experts_key(raw)):
        raise UserError(
            f"{path}: num_experts={short_repr(raw['num_experts'])} and num_local_experts="
            f"{short_repr(raw['num_local_experts'])} differ; remove one"
        )
    experts, per_token = size(raw, path, _experts_key(raw)), size(raw, path, "num_experts_per_tok")
    if per_token > experts:
        raise UserError(f"{path}: num_experts_per_tok={per_token} is above {_experts_key(raw)}={experts}")
    if per_token == 1:  # Megatron's weight is then a softmax over all experts; HF's is 1
        raise UserError(f"{path}: num_experts_per_tok=1 is not supported, only 2 and more")


def size(raw: dict[str, Any], source: str | Path, key: str, default: int | None = None, smallest: int = 1) -> int:
    """Return a whole number of config.json.

    source:   the path of config.json, for messages
    default:  the value of an absent or null key; None: the key is required
    smallest: the smallest valid number
    Raises:   UserError if the key is missing or not such a number
    """
    value, largest = raw.get(key), LARGEST_COUNT if key in COUNTS else LARGEST_SIZE
    if value is None and default is not None:
        return default
    if value is None:
        raise UserError(f"{source} lacks {key}; give a complete HF config")
    if not isinstance(value, int) or isinstance(value, bool) or not smallest <= value <= largest:
        raise UserError(f"{source}: {key} must be a whole number in {smallest}..{largest}, got {short_repr(value)}")
    return value


def boolean(raw: dict[str, Any], source: str | Path, key: str) -> bool:
    """Return a boolean of config.json, False if the key is absent. Raises UserError for any other value.

    source: the path of config.json, for messages
    """
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise UserError(f"{source}: {key} must be true or false, got {short_repr(value)}")
    return value


def _positive(raw: dict[str, Any], path: Path, key: str, default: float) -> float:
    value = raw.get(key, default)
    if not _is_number(value) or value <= 0:
        raise UserError(f"{path}: {key} must be a finite number above 0, got {short_repr(value)}")
    return value


def _is_number(value: Any) -> TypeGuard[float]:
    """Return whether `value` is a number that fits into a float; true and false are not numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def check_context(hf: HfConfig, max_total_sequence_length: int) -> None:
    """Raise UserError if sequences may become longer than the model's context."""
    if max_total_sequence_length <= hf.longest_context:
        return
    problem = f"policy.max_total_sequence_length={max_total_sequence_length} is above the model's"
    yarn_context = hf.yarn_context or 0
    if hf.longest_context == yarn_context < hf.max_position_embeddings:
        raise UserError(f"{problem} {ORIGINAL} times the factor={hf.rope_factor} of its YaRN, {yarn_context}; lower it")
    times = f" times the factor={hf.rope_factor} of its RoPE" if hf.rope_type == "linear" else ""
    remedy = f", or set that to {yarn_context} in its config.json, the context of its YaRN"
    raise UserError(
        f"{problem} max_position_embeddings={hf.max_position_embeddings}{times}; "
        f"lower it{remedy if max_total_sequence_length <= yarn_context else ''}"
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is no file. Raises UserError for any other content."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object")
    return value


def _token_ids(raw: dict[str, Any], path: Path, key: str) -> tuple[int, ...]:
    value = raw.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < LARGEST_SIZE for token in ids):
        raise UserError(f"{path}: {key} must be a token's number, or a list of them, got {short_repr(value)}")
    return tuple(ids)
