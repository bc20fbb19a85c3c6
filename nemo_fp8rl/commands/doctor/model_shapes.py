"""Sizes of a model and its weights, from its config.json or from the table of known models."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nemo_fp8rl.commands.doctor.known_models import KNOWN_MODELS
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.typed_tree import short_repr
from nemo_fp8rl.hf.hub import cached_file
from nemo_fp8rl.hf.model_config import FAMILIES, boolean, read_json, size
from nemo_fp8rl.hf.model_tensors import EMBEDDING, HEAD, NORM

Split = Literal["rows", "columns", "none"]


@dataclass(frozen=True)
class Weight:
    """A tensor [rows, columns] of one layer; columns is 1 for a vector.

    split:   the dimension that tensor parallelism splits
    copies:  number of such tensors in the layer, one for each expert
    linear:  True for a projection, which FP8 applies to
    """

    name: str
    rows: int
    columns: int
    split: Split = "none"
    copies: int = 1
    linear: bool = False

    @property
    def elements(self) -> int:
        return self.rows * self.columns * self.copies

    @property
    def of_expert(self) -> bool:
        return ".experts." in self.name


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder.

    head_dim:                of a query and a key
    kv_lora_rank, rope_dim:  of latent attention (MLA), else 0
    config:                  the config.json that the sizes were read from
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    intermediate: int
    max_positions: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    router_bias: bool = False
    kv_lora_rank: int = 0
    rope_dim: int = 0
    config: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def is_mixture(self, layer: int) -> bool:
        return self.experts > 0 and layer >= self.dense_layers

    @property
    def parameters(self) -> int:
        layers = sum(weight.elements for i in range(self.layers) for weight in self.layer(i))
        return layers + sum(weight.elements for weight in (*self.head(), self.embedding()))

    def embedding(self) -> Weight:
        return Weight(EMBEDDING, self.vocab, self.hidden, "rows")

    def head(self) -> list[Weight]:
        """Return the final norm and the output head. A tied head is the embedding."""
        norm = Weight(NORM, self.hidden, 1)
        return [norm] if self.tied else [norm, Weight(HEAD, self.vocab, self.hidden, "rows")]

    def layer(self, index: int) -> list[Weight]:
        return [*self._attention(f"model.layers.{index}."), *self._mlps(f"model.layers.{index}.", index)]

    def _attention(self, layer: str) -> Iterator[Weight]:
        norms = ("input_layernorm", "post_attention_layernorm")
        yield from (Weight(f"{layer}{norm}.weight", self.hidden, 1) for norm in norms)
        attention, q = f"{layer}self_attn.", self.heads * self.head_dim
        yield Weight(attention + "q_proj.weight", q, self.hidden, "rows", linear=True)
        yield Weight(attention + "o_proj.weight", self.hidden, self.heads * self.value_dim, "columns", linear=True)
        if self.kv_lora_rank:
            rank, nope = self.kv_lora_rank, self.head_dim - self.rope_dim
            yield Weight(attention + "kv_a_proj_with_mqa.weight", rank + self.rope_dim, self.hidden, linear=True)
            yield Weight(attention + "kv_a_layernorm.weight", rank, 1)
            yield Weight(
                attention + "kv_b_proj.weight", self.heads * (nope + self.value_dim), rank, "rows", linear=True
            )
            return
        kv = self.kv_heads * self.head_dim
        yield Weight(attention + "k_proj.weight", kv, self.hidden, "rows", linear=True)
        yield Weight(attention + "v_proj.weight", kv, self.hidden, "rows", linear=True)
        if self.qkv_bias:
            yield from (Weight(f"{attention}{x}_proj.bias", n, 1, "rows") for x, n in (("q", q), ("k", kv), ("v", kv)))
        if self.qk_norm:
            yield from (Weight(f"{attention}{x}_norm.weight", self.head_dim, 1) for x in "qk")

    def _mlps(self, layer: str, index: int) -> Iterator[Weight]:
        if not self.is_mixture(index):
            yield from _gated_mlp(layer + "mlp.", self.hidden, self.intermediate)
            return
        yield Weight(layer + "mlp.gate.weight", self.experts, self.hidden)
        if self.router_bias:
            yield Weight(layer + "mlp.gate.e_score_correction_bias", self.experts, 1)
        yield from _gated_mlp(layer + "mlp.experts.*.", self.hidden, self.expert_intermediate, self.experts)
        if self.shared_experts:
            size = self.shared_experts * self.expert_intermediate
            yield from _gated_mlp(layer + "mlp.shared_experts.", self.hidden, size)


def _gated_mlp(prefix: str, hidden: int, intermediate: int, copies: int = 1) -> list[Weight]:
    return [
        Weight(prefix + "gate_proj.weight", intermediate, hidden, "rows", copies, linear=True),
        Weight(prefix + "up_proj.weight", intermediate, hidden, "rows", copies, linear=True),
        Weight(prefix + "down_proj.weight", hidden, intermediate, "columns", copies, linear=True),
    ]


def shape_of(model_name: str, config_file: Path | None = None) -> Shape:
    """Return the shape of a model. Raises UserError as `config_of` and `from_config` do."""
    return from_config(config_of(model_name, config_file), str(config_file or model_name))


def config_of(model_name: str, config_file: Path | None = None) -> dict[str, Any]:
    """Return the config.json of a model; the network is not used.

    model_name:   a folder, or `owner/model` or `owner/model@revision`, whose config.json is taken from the hub's cache,
        else from KNOWN_MODELS
    config_file:  the config.json to take instead, or its folder
    Raises: UserError if there is no such file, or if the model is neither in the cache nor known
    """
    if config_file is not None:
        path = config_file / "config.json" if config_file.is_dir() else config_file
        if (raw := read_json(path)) is None:
            raise UserError(f"--model-config: there is no file {path}; give the config.json of {model_name}")
        return raw
    cached = cached_file(model_name, "config.json")
    if cached is not None and cached.is_file() and (raw := read_json(cached)) is not None:
        return raw
    repository = model_name.partition("@")[0]
    if repository in KNOWN_MODELS:
        return KNOWN_MODELS[repository]
    similar = _most_similar(repository)
    raise UserError(
        f"policy.model_name={model_name} is no folder with a config.json, nor a model whose sizes the doctor knows"
        f"{f' (did you mean {similar}?)' if similar else ''}; give its config.json: --model-config FILE"
    )


def _most_similar(repository: str) -> str | None:
    """Return a known model whose name without the owner is nearly the same."""
    by_name = {known.rpartition("/")[2].lower(): known for known in KNOWN_MODELS}
    names = difflib.get_close_matches(repository.rpartition("/")[2].lower(), by_name, 1, cutoff=0.9)
    return by_name[names[0]] if names else None


def from_config(raw: dict[str, Any], source: str) -> Shape:
    """Return the sizes in config.json. Raises UserError for an unknown family or a missing key."""
    family = raw.get("model_type")
    if family not in ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"):
        raise UserError(
            f"{source}: the doctor does not know model_type {short_repr(family)}; it knows Llama, Qwen and DeepSeek"
        )
    latent, mixture = family == "deepseek_v3", family in ("qwen3_moe", "deepseek_v3")
    if latent and raw.get("q_lora_rank"):
        raise UserError("the doctor does not know models with q_lora_rank, which DeepSeek-V3 has and Moonlight not")

    def of(key: str, default: int | None = None, smallest: int = 1) -> int:
        return size(raw, source, key, default, smallest)

    heads, hidden = of("num_attention_heads"), of("hidden_size")
    if latent:
        head_dim = of("qk_nope_head_dim") + of("qk_rope_head_dim")
    else:
        head_dim = of("head_dim", FAMILIES[family].head_dim or hidden // heads)
    if head_dim < 1:
        raise UserError(f"{source}: num_attention_heads={heads} is above hidden_size={hidden}; give a head_dim")
    experts = next((key for key in ("n_routed_experts", "num_local_experts") if raw.get(key)), "num_experts")
    return Shape(
        vocab=of("vocab_size"),
        hidden=hidden,
        layers=of("num_hidden_layers"),
        heads=heads,
        kv_heads=of("num_key_value_heads", heads),
        head_dim=head_dim,
        value_dim=of("v_head_dim") if latent else head_dim,
        intermediate=of("intermediate_size", 0 if mixture else None),
        max_positions=of("max_position_embeddings"),
        tied=boolean(raw, source, "tie_word_embeddings"),
        qkv_bias=family == "qwen2",
        qk_norm=family.startswith("qwen3"),
        experts=of(experts, 0, smallest=0) if mixture else 0,
        experts_per_token=of("num_experts_per_tok") if mixture else 0,
        expert_intermediate=of("moe_intermediate_size") if mixture else 0,
        shared_experts=of("n_shared_experts", 0, smallest=0),
        dense_layers=of("first_k_dense_replace", 0, smallest=0),
        router_bias=latent,
        kv_lora_rank=of("kv_lora_rank") if latent else 0,
        rope_dim=of("qk_rope_head_dim") if latent else 0,
        config=raw,
    )
