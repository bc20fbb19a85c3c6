"""Megatron parameter <-> HF tensors.

Megatron fuses what HF keeps apart: `linear_qkv` holds, for each key-value group, its query heads, its key and its
value, weights and biases alike; `linear_fc1` holds gate above up. Exported tensors are views wherever the layout
allows.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nemo_fp8rl.hf.config import Family, HfConfig
from nemo_fp8rl.hf.tensors import expected_tensors, mlps

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


def megatron_mlps(hf: HfConfig, layer: str) -> list[str]:
    """What `hf.tensors.mlps` names, under Megatron's names."""
    experts = [f"{layer}mlp.experts.local_experts.{e}." for e in range(hf.num_experts)]
    return experts if hf.family.experts else [layer + "mlp."]


def from_hf(hf: HfConfig, get: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(Megatron name, tensor) of every parameter; `get` reads one HF tensor by name."""
    yield "embedding.word_embeddings.weight", get("model.embed_tokens.weight")
    for i in range(hf.num_hidden_layers):
        megatron, layer = f"decoder.layers.{i}.", f"model.layers.{i}."
        for ours, theirs in layer_tensors(hf.family).items():
            yield megatron + ours, get(layer + theirs)
        for leaf in qkv_leaves(hf.family):
            qkv = [get(f"{layer}self_attn.{x}_proj.{leaf}") for x in "qkv"]
            grouped = torch.cat([part.view(hf.num_key_value_heads, -1, *part.shape[1:]) for part in qkv], 1)
            yield f"{megatron}self_attention.linear_qkv.{leaf}", grouped.flatten(0, 1)
        for ours, theirs in zip(megatron_mlps(hf, megatron), mlps(hf, layer), strict=True):
            yield ours + "linear_fc1.weight", torch.cat([get(f"{theirs}{x}_proj.weight") for x in ("gate", "up")])
            yield ours + "linear_fc2.weight", get(theirs + "down_proj.weight")
    yield "decoder.final_layernorm.weight", get("model.norm.weight")
    if not hf.tie_word_embeddings:
        yield "output_layer.weight", get("lm_head.weight")


def to_hf(hf: HfConfig, parameters: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(HF name, tensor) of every tensor of `expected_tensors`, in that order; `parameters` by Megatron name."""
    yield "model.embed_tokens.weight", parameters["embedding.word_embeddings.weight"]
    for i in range(hf.num_hidden_layers):
        megatron, layer = f"decoder.layers.{i}.", f"model.layers.{i}."
        own = {layer + theirs: parameters[megatron + ours] for ours, theirs in layer_tensors(hf.family).items()}
        for leaf in qkv_leaves(hf.family):
            qkv = parameters[f"{megatron}self_attention.linear_qkv.{leaf}"]
            grouped = qkv.view(hf.num_key_value_heads, -1, *qkv.shape[1:])
            query_rows = grouped.size(1) - 2 * hf.head_dim
            for x, part in zip("qkv", grouped.split([query_rows, hf.head_dim, hf.head_dim], 1), strict=True):
                own[f"{layer}self_attn.{x}_proj.{leaf}"] = part.flatten(0, 1)
        for ours, theirs in zip(megatron_mlps(hf, megatron), mlps(hf, layer), strict=True):
            gate, up = parameters[ours + "linear_fc1.weight"].chunk(2)
            own |= {theirs + "gate_proj.weight": gate, theirs + "up_proj.weight": up}
            own[theirs + "down_proj.weight"] = parameters[ours + "linear_fc2.weight"]
        for name in expected_tensors(hf):
            if name.startswith(layer):
                yield name, own[name]
    yield "model.norm.weight", parameters["decoder.final_layernorm.weight"]
    if not hf.tie_word_embeddings:
        yield "lm_head.weight", parameters["output_layer.weight"]
