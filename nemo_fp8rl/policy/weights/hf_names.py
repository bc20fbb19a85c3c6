"""Megatron parameter <-> HF tensors.

Megatron fuses what HF keeps apart: `linear_qkv` holds, for each key-value group, its query heads, its key and its
value, weights and biases alike (or all of each, `Layout.qkv_by_kind`); `linear_fc1` holds gate above up. A rank maps
what its `Layout` gives it: layers and experts are numbered from 0 on every rank by Megatron, over the whole model by
HF, and each tensor is the rank's part. What is exported are views wherever the layout allows, in `views_for_hf`
everywhere.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_fp8rl.hf.model_config import Family
from nemo_fp8rl.hf.model_tensors import EMBEDDING, HEAD, NORM
from nemo_fp8rl.policy.weights.layout import Layout

Get = Callable[[str], Tensor]
"""One tensor by its name."""

MEGATRON_EMBEDDING, MEGATRON_HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
MEGATRON_NORM = "decoder.final_layernorm.weight"

LAYER_TENSORS = {  # Megatron suffix -> HF suffix, where one is the other
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}
ROUTER = {"mlp.router.weight": "mlp.gate.weight"}
QK_NORMS = {f"self_attention.{x}_layernorm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}


def layer_tensors(family: Family) -> dict[str, str]:
    return LAYER_TENSORS | (QK_NORMS if family.qk_norm else {}) | (ROUTER if family.experts else {})


def qkv_leaves(family: Family) -> tuple[str, ...]:
    return ("weight", "bias") if family.qkv_bias else ("weight",)


def from_hf(layout: Layout, get: Get) -> Iterator[tuple[str, Tensor]]:
    """(Megatron name, tensor) of every parameter of the rank; `get` reads its part of one HF tensor."""
    hf = layout.hf
    if layout.first_stage:
        yield MEGATRON_EMBEDDING, _padded(layout, get(EMBEDDING))
    for megatron, layer in _layers(layout):
        for ours, theirs in layer_tensors(hf.family).items():
            yield megatron + ours, get(layer + theirs)
        for leaf in qkv_leaves(hf.family):
            qkv = [get(f"{layer}self_attn.{x}_proj.{leaf}") for x in "qkv"]
            grouped = torch.cat([part.view(layout.qkv_groups, -1, *part.shape[1:]) for part in qkv], 1)
            yield f"{megatron}self_attention.linear_qkv.{leaf}", grouped.flatten(0, 1)
        for ours, theirs in _mlps(layout, megatron, layer):
            yield ours.format("fc1"), torch.cat([get(f"{theirs}{x}_proj.weight") for x in ("gate", "up")])
            yield ours.format("fc2"), get(theirs + "down_proj.weight")
    if layout.last_stage:
        yield MEGATRON_NORM, get(NORM)
        if not hf.tie_word_embeddings:
            yield MEGATRON_HEAD, _padded(layout, get(HEAD))
        elif not layout.first_stage:  # a copy of the embedding, which Megatron keeps equal to it
            yield MEGATRON_HEAD, _padded(layout, get(EMBEDDING))


def to_hf(layout: Layout, get: Get) -> Iterator[tuple[str, Tensor]]:
    """(HF name, tensor) of the rank's part of every HF tensor; `get` gives one parameter by Megatron's name.

    Every rank of a stage asks for the same parameters in the same order, so that `get` may communicate.
    """
    for name, part in views_for_hf(layout, get):
        yield name, part.flatten(0, 1) if part.dim() == 3 else part


def views_for_hf(layout: Layout, get: Get) -> Iterator[tuple[str, Tensor]]:
    """`to_hf`, but with weights of q, k and v as stacks [groups, rows, H] for what is one matrix below the other."""
    hf = layout.hf
    tokens = len(layout.vocabulary)
    if layout.first_stage:
        yield EMBEDDING, get(MEGATRON_EMBEDDING)[:tokens]
    for megatron, layer in _layers(layout):
        for ours, theirs in layer_tensors(hf.family).items():
            yield layer + theirs, get(megatron + ours)
        for leaf in qkv_leaves(hf.family):
            qkv = get(f"{megatron}self_attention.linear_qkv.{leaf}")
            grouped = qkv.view(layout.qkv_groups, -1, *qkv.shape[1:])
            keys = hf.num_key_value_heads * hf.head_dim // layout.tensor.size // layout.qkv_groups
            for x, part in zip("qkv", grouped.split([grouped.size(1) - 2 * keys, keys, keys], 1), strict=True):
                yield f"{layer}self_attn.{x}_proj.{leaf}", part if leaf == "weight" else part.flatten()
        for ours, theirs in _mlps(layout, megatron, layer):
            gate, up = get(ours.format("fc1")).chunk(2)
            yield theirs + "gate_proj.weight", gate
            yield theirs + "up_proj.weight", up
            yield theirs + "down_proj.weight", get(ours.format("fc2"))
    if layout.last_stage:
        yield NORM, get(MEGATRON_NORM)
        if not hf.tie_word_embeddings:
            yield HEAD, get(MEGATRON_HEAD)[:tokens]


def _layers(layout: Layout) -> Iterator[tuple[str, str]]:
    """Megatron's and HF's prefix of every layer of the rank."""
    for own, i in enumerate(layout.layers):
        yield f"decoder.layers.{own}.", f"model.layers.{i}."


def _mlps(layout: Layout, megatron: str, layer: str) -> Iterator[tuple[str, str]]:
    """Megatron's name, `{}` for fc1 or fc2, and HF's prefix of a layer's gated MLPs: one, or the rank's experts."""
    if not layout.hf.family.experts:
        yield megatron + "mlp.linear_{}.weight", layer + "mlp."
    experts = megatron + "mlp.experts."
    for own, expert in enumerate(layout.experts):
        name = f"linear_{{}}.weight{own}" if layout.grouped_experts else f"local_experts.{own}.linear_{{}}.weight"
        yield experts + name, f"{layer}mlp.experts.{expert}."


def _padded(layout: Layout, rows: Tensor) -> Tensor:
    """[tokens, H] with rows of 0 below, so that every rank has as many."""
    return F.pad(rows, (0, 0, 0, layout.padded_vocab_size // layout.tensor.size - len(rows)))
