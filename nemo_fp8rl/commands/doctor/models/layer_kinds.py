"""The kinds of which layers are made: the weights of each, and what it keeps in memory.

A decoder layer of most families has an attention and an MLP; one of Nemotron-H has a single part. Weights have the
names of HF checkpoints, within the module of their part. Sources, for names, sizes and what is split over ranks:
- attention, its output gate, GDN and Qwen3.5's mixture: transformers' modeling_qwen3_5_moe.py, vLLM's qwen3_next.py and
  qwen_gdn_linear_attn.py, Megatron Core's ssm/gated_delta_net.py (which has qkv, z, b and a in one matrix)
- Mamba 2, MLP and latent mixture of Nemotron-H: vLLM's nemotron_h.py and mamba_mixer2.py, Megatron Core's
  ssm/mamba_mixer.py
- latent attention: https://arxiv.org/abs/2405.04434, section 2.1; its indexer: transformers' modeling_glm_moe_dsa.py
- attention with sinks and a window, and biases of experts: transformers' modeling_gpt_oss.py

What a token leaves for the backward is counted as in section 4.1 of https://arxiv.org/abs/2205.05198, for attention
that does not keep its scores; of a recurrence it is an estimate: its projections, what convolution and scan return.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nemo_fp8rl.commands.doctor.models.sizes import Recurrent, Sizes, Split, Weight

INDEX_SCALE = 4
"""Bytes of the scale of an indexer's key, which is FP8 whatever the KV cache is (vLLM's deepseek_v2.py)."""
RECURRENT_STATE, CONVOLVED_TOKEN = 4, 2
"""Bytes of a value of a recurrent state, float32 in all released models (mamba_ssm_dtype), and of the convolution's."""


def _nothing(sizes: Sizes, *_: float) -> float:
    return 0.0


@dataclass(frozen=True)
class LayerKind:
    """One part of a layer.

    weights:  (sizes) -> its weights; the norm before it is not among them
    kept:     (sizes, TP) -> values that a token leaves on a rank for the backward, beside the inputs of norm and part;
              those of a mixture's experts apart
    cached:   (sizes, TP, bytes of a cached value) -> bytes of a token in an engine's cache, on a rank
    state:    (sizes, TP, bytes of a cached value) -> bytes of a sequence, whatever its length, on a rank
    """

    weights: Callable[[Sizes], Iterator[Weight]]
    kept: Callable[[Sizes, int], float]
    cached: Callable[[Sizes, int, int], float] = _nothing
    state: Callable[[Sizes, int, int], float] = _nothing


def _linear(name: str, rows: int, columns: int, split: Split = "none", copies: int = 1) -> Weight:
    return Weight(f"{name}.weight", rows, columns, split, copies, linear=True)


# Attention


def _attention(s: Sizes) -> Iterator[Weight]:
    kv = s.kv_heads * s.head_dim
    rows = {"q": s.query_rows, "k": kv, "v": kv}
    yield from (_linear(f"{x}_proj", size, s.hidden, "rows") for x, size in rows.items())
    yield _linear("o_proj", s.hidden, s.heads * s.value_dim, "columns")
    if s.qkv_bias:
        yield from (Weight(f"{x}_proj.bias", size, 1, "rows") for x, size in rows.items())
    if s.qk_norm:
        yield from (Weight(f"{x}_norm.weight", s.head_dim, 1) for x in "qk")
    if s.output_bias:
        yield Weight("o_proj.bias", s.hidden, 1)
    if s.window:
        yield Weight("sinks", s.heads, 1, "rows")


def _attention_kept(s: Sizes, tensor: int) -> float:
    gate = s.query_rows - s.heads * s.head_dim
    return ((s.heads + s.kv_heads) * (s.head_dim + s.value_dim) + gate) / tensor


def _keys_and_values(s: Sizes, tensor: int, width: int) -> float:
    return width * max(1, s.kv_heads / tensor) * (s.head_dim + s.value_dim)


def _window(s: Sizes, tensor: int, width: int) -> float:
    return s.window * _keys_and_values(s, tensor, width)


def _latent(s: Sizes) -> Iterator[Weight]:
    queries = s.heads * s.head_dim
    if s.q_lora_rank:
        yield _linear("q_a_proj", s.q_lora_rank, s.hidden)
        yield Weight("q_a_layernorm.weight", s.q_lora_rank, 1)
        yield _linear("q_b_proj", queries, s.q_lora_rank, "rows")
    else:
        yield _linear("q_proj", queries, s.hidden, "rows")
    yield _linear("o_proj", s.hidden, s.heads * s.value_dim, "columns")
    yield _linear("kv_a_proj_with_mqa", s.kv_lora_rank + s.rope_dim, s.hidden)
    yield Weight("kv_a_layernorm.weight", s.kv_lora_rank, 1)
    yield _linear("kv_b_proj", s.heads * (s.head_dim - s.rope_dim + s.value_dim), s.kv_lora_rank, "rows")
    if s.index_heads:
        yield _linear("indexer.wq_b", s.index_heads * s.index_dim, s.q_lora_rank)
        yield _linear("indexer.wk", s.index_dim, s.hidden)
        yield from (Weight(f"indexer.k_norm.{x}", s.index_dim, 1) for x in ("weight", "bias"))
        yield Weight("indexer.weights_proj.weight", s.index_heads, s.hidden)


def _latent_kept(s: Sizes, tensor: int) -> float:
    return 2 * s.heads * (s.head_dim + s.value_dim) / tensor


def _latent_cached(s: Sizes, tensor: int, width: int) -> float:
    """Every rank has the whole latent."""
    return width * (s.kv_lora_rank + s.rope_dim) + (s.index_dim + INDEX_SCALE if s.index_heads else 0)


# Recurrences


def _recurrence(s: Sizes) -> Recurrent:
    assert s.recurrent is not None
    return s.recurrent


def _gated_delta_net(s: Sizes) -> Iterator[Weight]:
    r = _recurrence(s)
    qkv = Weight("in_proj_qkv.weight", r.convolved, s.hidden, "rows", linear=True, pieces=(r.keys, r.keys, r.values))
    yield qkv
    yield _linear("in_proj_z", r.values, s.hidden, "rows")
    yield from (_linear(f"in_proj_{x}", r.heads, s.hidden, "rows") for x in "ba")
    yield Weight("conv1d.weight", r.convolved, r.conv, "rows")
    yield from (Weight(name, r.heads, 1, "rows") for name in ("A_log", "dt_bias"))
    yield Weight("norm.weight", r.head_dim, 1)
    yield _linear("out_proj", s.hidden, r.values, "columns")


def _mamba(s: Sizes) -> Iterator[Weight]:
    r = _recurrence(s)
    pieces = (r.values, r.values, r.keys, r.keys, r.heads)
    yield Weight("in_proj.weight", sum(pieces), s.hidden, "rows", linear=True, pieces=pieces)
    yield Weight("conv1d.weight", r.convolved, r.conv, "rows")
    yield Weight("conv1d.bias", r.convolved, 1, "rows")
    yield from (Weight(name, r.heads, 1, "rows") for name in ("A_log", "D", "dt_bias"))
    yield Weight("norm.weight", r.values, 1, "rows")
    yield _linear("out_proj", s.hidden, r.values, "columns")


def _recurrence_kept(s: Sizes, tensor: int) -> float:
    r = _recurrence(s)
    return (2 * r.convolved + 2 * r.values + 2 * r.heads) / tensor


def _recurrent_state(s: Sizes, tensor: int, width: int) -> float:
    """As `mamba2_state_shape` and `gated_delta_net_state_shape` of vLLM's mamba_utils.py."""
    r = _recurrence(s)
    state, tokens = RECURRENT_STATE * r.values * r.key_dim, CONVOLVED_TOKEN * r.convolved * (r.conv - 1)
    return (state + tokens) / tensor


# MLPs


def _matrices(s: Sizes) -> int:
    return 3 if s.gated_mlp else 2


def _feed_forward(s: Sizes, name: str, width: int, hidden: int, copies: int = 1) -> Iterator[Weight]:
    up = ("gate_proj", "up_proj") if s.gated_mlp else ("up_proj",)
    yield from (_linear(name + x, width, hidden, "rows", copies) for x in up)
    yield _linear(name + "down_proj", hidden, width, "columns", copies)


def _mlp(s: Sizes) -> Iterator[Weight]:
    return _feed_forward(s, "", s.intermediate, s.hidden)


def _mlp_kept(s: Sizes, tensor: int) -> float:
    return _matrices(s) * s.intermediate / tensor


def _mixture(s: Sizes) -> Iterator[Weight]:
    yield Weight(f"{s.names.router}.weight", s.experts, s.hidden)
    if s.router_bias:
        yield Weight(f"{s.names.router}.{s.names.router_bias}", s.experts, 1)
    entered = s.expert_hidden or s.hidden
    if s.expert_hidden:
        yield _linear("fc1_latent_proj", entered, s.hidden)
        yield _linear("fc2_latent_proj", s.hidden, entered)
    yield from _feed_forward(s, "experts.*.", s.expert_intermediate, entered, s.experts)
    if s.expert_bias:
        ups = (_matrices(s) - 1) * s.expert_intermediate
        yield Weight("experts.*.gate_up_proj_bias", ups, 1, "rows", s.experts)
        yield Weight("experts.*.down_proj_bias", s.hidden, 1, copies=s.experts)
    if s.shared_intermediate:
        yield from _feed_forward(s, f"{s.names.shared}.", s.shared_intermediate, s.hidden)
    if s.shared_gate:
        yield Weight(f"{s.names.shared}_gate.weight", 1, s.hidden)


def _mixture_kept(s: Sizes, tensor: int) -> float:
    return _matrices(s) * s.shared_intermediate / tensor + 2 * s.expert_hidden


def expert_kept(s: Sizes, expert_tensor: int) -> float:
    """Return the values that a token leaves on a rank for the backward of one expert, with its input and output."""
    return 2 * (s.expert_hidden or s.hidden) + _matrices(s) * s.expert_intermediate / expert_tensor


LAYER_KINDS: dict[str, LayerKind] = {
    "attention": LayerKind(_attention, _attention_kept, cached=_keys_and_values),
    "sliding_attention": LayerKind(_attention, _attention_kept, state=_window),
    "latent_attention": LayerKind(_latent, _latent_kept, cached=_latent_cached),
    "gated_delta_net": LayerKind(_gated_delta_net, _recurrence_kept, state=_recurrent_state),
    "mamba": LayerKind(_mamba, _recurrence_kept, state=_recurrent_state),
    "mlp": LayerKind(_mlp, _mlp_kept),
    "mixture": LayerKind(_mixture, _mixture_kept),
}
RECURRENCES = ("gated_delta_net", "mamba")
