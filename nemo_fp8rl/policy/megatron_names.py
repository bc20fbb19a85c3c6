"""Megatron parameter <-> HF tensors.

Megatron fuses what HF keeps apart: `linear_qkv` holds, for each key-value group, its query heads, its key and its
value, weights and biases alike; `linear_fc1` holds gate above up. Exported tensors are views wherever the layout
allows.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from nemo_fp8rl.hf.config import Family, HfConfig
from nemo_fp8rl.hf.tensors import expected_tensors

LAYER_TENSORS = {  # Megatron suffix -> HF suffix, where one is the other
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
QK_NORMS = {f"self_attention.{x}_layernorm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}


def layer_tensors(family: Family) -> dict[str, str]:
    return LAYER_TENSORS | (QK_NORMS if family.qk_norm else {})


def qkv_leaves(family: Family) -> tuple[str, ...]:
    return ("weight", "bias") if family.qkv_bias else ("weight",)


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
        gate_up = [get(f"{layer}mlp.{x}_proj.weight") for x in ("gate", "up")]
        yield megatron + "mlp.linear_fc1.weight", torch.cat(gate_up)
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
        gate, up = parameters[megatron + "mlp.linear_fc1.weight"].chunk(2)
        own |= {layer + "mlp.gate_proj.weight": gate, layer + "mlp.up_proj.weight": up}
        for name in expected_tensors(hf):
            if name.startswith(layer):
                yield name, own[name]
    yield "model.norm.weight", parameters["decoder.final_layernorm.weight"]
    if not hf.tie_word_embeddings:
        yield "lm_head.weight", parameters["output_layer.weight"]
