"""A model's shape from its config.json.

Keys and their defaults are those of the configuration classes in transformers (models/*/configuration_*.py).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nemo_fp8rl.commands.doctor.models.shape import Shape
from nemo_fp8rl.commands.doctor.models.sizes import Names, Recurrent
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.typed_tree import short_repr
from nemo_fp8rl.hf.model_config import FAMILIES, LARGEST_COUNT, boolean, size

DECODERS = ("thinker_config", "text_config", "llm_config")
"""Keys of a model with encoders that hold its decoder, each within the one before."""
ENCODERS = ("vision_config", "audio_config", "sound_config")
QWEN3_5 = Names(root="model.language_model.", engine_root="language_model.model.", shared="shared_expert")
NEMOTRON_H = Names(
    root="backbone.", embedding="embeddings", norm="norm_f", norms=("norm",), module="mixer", others=()
)  # fmt: skip
GPT_OSS = Names(router="router", router_bias="bias")
PATTERN = {"M": "mamba", "E": "mixture", "*": "attention", "-": "mlp"}
"""Letters of Nemotron-H's hybrid_override_pattern."""
WORDS = {
    **{"mamba": "mamba", "linear_attention": "mamba", "moe": "mixture"},
    **{"attention": "attention", "full_attention": "attention", "mlp": "mlp"},
}
"""Words of its layers_block_type, those of transformers 5 among them."""


@dataclass(frozen=True)
class _Config:
    """The block of a config.json that describes the decoder. source: what to name in messages"""

    raw: dict[str, Any]
    source: str

    def of(self, *keys: str, default: int | None = None, smallest: int = 1) -> int:
        """Return the number of the first of these keys that is present; they are names of one size."""
        key = next((key for key in keys if self.raw.get(key) is not None), keys[0])
        return size(self.raw, self.source, key, default, smallest)

    def words(self, key: str, known: dict[str, str]) -> list[str] | None:
        """Return what the words of a list, or the letters of a text, stand for; None if the key is absent."""
        if (value := self.raw.get(key)) is None:
            return None
        words = list(value) if isinstance(value, (list, str)) else []
        if not 0 < len(words) <= LARGEST_COUNT:
            raise UserError(f"{self.source}: {key} must name the kind of each layer, got {short_repr(value)}")
        if unknown := [word for word in words if word not in known]:
            raise UserError(
                f"{self.source}: {key} has {short_repr(unknown[0])}, and the doctor knows {', '.join(known)}"
            )
        return [known[word] for word in words]


def from_config(raw: dict[str, Any], source: str) -> Shape:
    """Return the sizes in config.json. Raises UserError for an unknown family or a missing key."""
    blocks = [raw, *_nested(raw)]
    family = str(blocks[-1].get("model_type") or raw.get("model_type"))
    if (read := READERS.get(family)) is None:
        raise UserError(
            f"{source}: the doctor does not know model_type {short_repr(blocks[-1].get('model_type'))}; it knows "
            "Llama, Qwen (Omni, VL and 3.5 too), DeepSeek, GLM-5, Nemotron-H and gpt-oss"
        )
    enclosing = next((block for block in reversed(blocks[:-1]) if "tie_word_embeddings" in block), blocks[-1])
    config = _Config(blocks[-1], source)
    common = {
        "vocab": config.of("vocab_size"),
        "hidden": config.of("hidden_size"),
        "max_positions": config.of("max_position_embeddings"),
        "heads": config.of("num_attention_heads"),
        "tied": boolean(enclosing, source, "tie_word_embeddings"),
        "uncounted": tuple(key for key in ENCODERS if any(block.get(key) is not None for block in blocks)),
        "config": raw,
    }
    return read(config, common, family)


def _nested(raw: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for key in DECODERS:
        if isinstance(raw.get(key), dict):
            yield raw[key]
            yield from _nested(raw[key])
            return


def _layers(config: _Config) -> int:
    return config.of("num_hidden_layers")


def _classic(config: _Config, common: dict[str, Any], family: str) -> Shape:
    """Llama, Qwen2, Qwen3 and Qwen3-MoE, and the decoders of Qwen's models with encoders."""
    kind = OF_CLASSIC[family]
    heads, hidden, mixture = common["heads"], common["hidden"], kind == "qwen3_moe"
    head_dim = config.of("head_dim", default=FAMILIES[kind].head_dim or hidden // heads, smallest=0)
    if head_dim < 1:
        raise UserError(f"{config.source}: num_attention_heads={heads} is above hidden_size={hidden}; give a head_dim")
    experts = config.of("num_local_experts", "num_experts", default=0, smallest=0) if mixture else 0
    return Shape(
        **common,
        parts=(("attention", "mixture" if experts else "mlp"),) * _layers(config),
        kv_heads=config.of("num_key_value_heads", default=heads),
        head_dim=head_dim,
        value_dim=head_dim,
        intermediate=config.of("intermediate_size", default=0 if mixture else None),
        qkv_bias=kind == "qwen2",
        qk_norm=kind.startswith("qwen3"),
        experts=experts,
        experts_per_token=config.of("num_experts_per_tok") if mixture else 0,
        expert_intermediate=config.of("moe_intermediate_size") if mixture else 0,
        names=Names() if family in FAMILIES else Names(root=_root(family), engine_root="language_model.model."),
    )


def _root(family: str) -> str:
    """Return what precedes `layers` in the checkpoint of one of Qwen's models with encoders."""
    if "omni" in family:
        return "thinker.model."
    return "model.language_model." if family.startswith("qwen3_vl") else "model."


def _latent(config: _Config, common: dict[str, Any], family: str) -> Shape:
    """DeepSeek-V3 and Moonlight; GLM-5, whose attention has an indexer."""
    layers, rope, indexed = _layers(config), config.of("qk_rope_head_dim"), family == "glm_moe_dsa"
    experts = config.of("n_routed_experts", default=0, smallest=0)
    dense = config.of("first_k_dense_replace", default=3 if indexed else 0, smallest=0) if experts else layers
    width = config.of("moe_intermediate_size")
    return Shape(
        **common,
        parts=tuple(("latent_attention", "mlp" if i < dense else "mixture") for i in range(layers)),
        kv_heads=config.of("num_key_value_heads", default=common["heads"]),
        head_dim=config.of("qk_nope_head_dim") + rope,
        value_dim=config.of("v_head_dim"),
        intermediate=config.of("intermediate_size", default=0),
        experts=experts,
        experts_per_token=config.of("num_experts_per_tok"),
        expert_intermediate=width,
        shared_intermediate=config.of("n_shared_experts", default=0, smallest=0) * width,
        router_bias=True,
        kv_lora_rank=config.of("kv_lora_rank"),
        q_lora_rank=config.of("q_lora_rank", default=0),
        rope_dim=rope,
        index_heads=config.of("index_n_heads") if indexed else 0,
        index_dim=config.of("index_head_dim") if indexed else 0,
    )


def _qwen3_5(config: _Config, common: dict[str, Any], family: str) -> Shape:
    """Gated delta nets, and full attention in every fourth layer."""
    layers, mixture = _layers(config), family.startswith("qwen3_5_moe")
    words = {"linear_attention": "gated_delta_net", "full_attention": "attention"}
    interval = config.of("full_attention_interval", default=4)
    regular = ["gated_delta_net" if (i + 1) % interval else "attention" for i in range(layers)]
    kinds = config.words("layer_types", words) or regular
    if len(kinds) != layers:
        raise UserError(
            f"{config.source}: layer_types has {len(kinds)} entries, give one for each of num_hidden_layers={layers}"
        )
    head_dim = config.of("head_dim", default=256)
    return Shape(
        **common,
        parts=tuple((kind, "mixture" if mixture else "mlp") for kind in kinds),
        kv_heads=config.of("num_key_value_heads"),
        head_dim=head_dim,
        value_dim=head_dim,
        intermediate=0 if mixture else config.of("intermediate_size"),
        qk_norm=True,
        output_gate=True,
        experts=config.of("num_experts") if mixture else 0,
        experts_per_token=config.of("num_experts_per_tok") if mixture else 0,
        expert_intermediate=config.of("moe_intermediate_size") if mixture else 0,
        shared_intermediate=config.of("shared_expert_intermediate_size") if mixture else 0,
        shared_gate=mixture,
        recurrent=Recurrent(
            config.of("linear_num_key_heads"),
            config.of("linear_num_value_heads"),
            config.of("linear_key_head_dim"),
            config.of("linear_value_head_dim"),
            config.of("linear_conv_kernel_dim"),
        ),
        names=QWEN3_5,
    )


def _nemotron_h(config: _Config, common: dict[str, Any], family: str) -> Shape:
    """Layers of one part each, by a pattern: Mamba 2, attention without RoPE, MLP or mixture."""
    pattern = config.words("hybrid_override_pattern", PATTERN) or config.words("layers_block_type", WORDS)
    pattern = pattern or config.words("layer_types", WORDS)
    if pattern is None:
        raise UserError(f"{config.source} lacks hybrid_override_pattern; give a complete HF config")
    head_dim, mixture = config.of("head_dim", "attention_head_dim", default=128), "mixture" in pattern
    shared = config.of("n_shared_experts", default=1, smallest=0) if mixture else 0
    return Shape(
        **common,
        parts=tuple((kind,) for kind in pattern),
        kv_heads=config.of("num_key_value_heads", default=common["heads"]),
        head_dim=head_dim,
        value_dim=head_dim,
        intermediate=config.of("intermediate_size") if "mlp" in pattern else 0,
        gated_mlp=False,
        experts=config.of("n_routed_experts") if mixture else 0,
        experts_per_token=config.of("num_experts_per_tok") if mixture else 0,
        expert_intermediate=config.of("moe_intermediate_size") if mixture else 0,
        expert_hidden=config.of("moe_latent_size", default=0) if mixture else 0,
        shared_intermediate=shared * config.of("moe_shared_expert_intermediate_size") if shared else 0,
        router_bias=True,
        recurrent=Recurrent(
            config.of("n_groups", "mamba_num_groups", "mamba_n_groups"),
            config.of("mamba_num_heads"),
            config.of("ssm_state_size", "mamba_state_dim"),
            config.of("mamba_head_dim"),
            config.of("conv_kernel", "mamba_d_conv", default=4),
        ),
        names=NEMOTRON_H,
    )


def _gpt_oss(config: _Config, common: dict[str, Any], family: str) -> Shape:
    """Attention with sinks, in every second layer over a window, and a mixture with biases."""
    layers, head_dim = _layers(config), config.of("head_dim", default=64)
    words = {"sliding_attention": "sliding_attention", "full_attention": "attention"}
    kinds = config.words("layer_types", words) or ["attention" if i % 2 else "sliding_attention" for i in range(layers)]
    return Shape(
        **common,
        parts=tuple((kind, "mixture") for kind in kinds),
        kv_heads=config.of("num_key_value_heads"),
        head_dim=head_dim,
        value_dim=head_dim,
        intermediate=0,
        qkv_bias=True,
        output_bias=True,
        experts=config.of("num_local_experts", "num_experts"),
        experts_per_token=config.of("num_experts_per_tok", "experts_per_token"),
        expert_intermediate=config.of("intermediate_size"),
        expert_bias=True,
        router_bias=True,
        window=config.of("sliding_window"),
        names=GPT_OSS,
    )


OF_CLASSIC = {
    **{family: family for family in FAMILIES},
    **{name: "qwen2" for name in ("qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text")},
    "qwen3_vl_text": "qwen3",
    **{name: "qwen3_moe" for name in ("qwen3_omni_moe_text", "qwen3_vl_moe_text")},
}
"""model_type -> the family whose decoder it is."""
READERS: dict[str, Callable[[_Config, dict[str, Any], str], Shape]] = {
    **dict.fromkeys(OF_CLASSIC, _classic),
    **dict.fromkeys(("deepseek_v3", "glm_moe_dsa"), _latent),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _qwen3_5),
    "nemotron_h": _nemotron_h,
    "gpt_oss": _gpt_oss,
}
