"""Sizes of a decoder, and what a tensor of it is."""

from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["rows", "columns", "none"]


@dataclass(frozen=True)
class Weight:
    """A tensor [rows, columns] of one layer; columns is 1 for a vector.

    split:   the dimension that tensor parallelism splits
    copies:  number of such tensors in the layer, one for each expert
    linear:  True for a projection, which FP8 applies to
    pieces:  rows of the matrices of which this one is made; tensor parallelism splits each
    """

    name: str
    rows: int
    columns: int
    split: Split = "none"
    copies: int = 1
    linear: bool = False
    pieces: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        return self.rows * self.columns * self.copies

    @property
    def of_expert(self) -> bool:
        return ".experts." in self.name


@dataclass(frozen=True)
class Names:
    """Names of a family's tensors in its HF checkpoints, and where they differ in vLLM.

    root:         what precedes `layers.N.`
    engine_root:  the same in vLLM
    norms:        the norms of a layer, one before each of its parts
    module:       the module of a part of a layer
    others:       part -> its module, if it has another
    router:       the module of a mixture that chooses the experts
    router_bias:  its bias
    shared:       the module of a mixture that every token passes
    """

    root: str = "model."
    engine_root: str = "model."
    embedding: str = "embed_tokens"
    norm: str = "norm"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    module: str = "self_attn"
    others: tuple[tuple[str, str], ...] = (("gated_delta_net", "linear_attn"), ("mlp", "mlp"), ("mixture", "mlp"))
    router: str = "gate"
    router_bias: str = "e_score_correction_bias"
    shared: str = "shared_experts"

    def module_of(self, part: str) -> str:
        return dict(self.others).get(part, self.module)


@dataclass(frozen=True)
class Recurrent:
    """Sizes of a recurrent part: a gated delta net (GDN) or Mamba 2.

    key_heads:  heads of keys and queries; groups of Mamba 2
    heads:      heads of values
    key_dim:    of a key; the state's size of Mamba 2
    head_dim:   of a value
    conv:       tokens that the convolution sees
    """

    key_heads: int
    heads: int
    key_dim: int
    head_dim: int
    conv: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        return 2 * self.keys + self.values


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder.

    parts:                   of each layer, names of `layer_kinds.LAYER_KINDS`
    head_dim:                of a query and a key
    output_gate:             q_proj has the rows of a gate beside those of the queries
    gated_mlp:               MLP and experts have gate_proj beside up_proj
    expert_hidden:           the width that enters an expert; 0 stands for `hidden`
    shared_intermediate:     the width of the experts that every token passes, together
    shared_gate:             a scalar weighs their output
    kv_lora_rank, rope_dim:  of latent attention (MLA), else 0
    q_lora_rank:             the same of its queries, 0 if they have no latent
    index_heads, index_dim:  of the indexer of sparse attention (DSA), else 0
    window:                  tokens that `sliding_attention` sees
    uncounted:               blocks of the config whose weights are no part of the decoder, such as vision_config
    config:                  the config.json that the sizes were read from
    """

    vocab: int
    hidden: int
    parts: tuple[tuple[str, ...], ...]
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    intermediate: int
    max_positions: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    output_bias: bool = False
    output_gate: bool = False
    gated_mlp: bool = True
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    expert_hidden: int = 0
    expert_bias: bool = False
    shared_intermediate: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    rope_dim: int = 0
    index_heads: int = 0
    index_dim: int = 0
    window: int = 0
    recurrent: Recurrent | None = None
    names: Names = Names()
    uncounted: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def query_rows(self) -> int:
        """Rows of q_proj."""
        return self.heads * self.head_dim * (2 if self.output_gate else 1)
