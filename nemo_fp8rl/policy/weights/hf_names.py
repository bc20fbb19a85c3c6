"""The mapping between Megatron's parameters and HF tensors.

Megatron fuses tensors that are separate in HF. `linear_qkv` has, for each key-value group, its query heads, its key and
its value, weights and biases alike (or all queries, all keys, all values: `Layout.qkv_by_kind`). `linear_fc1` has gate
above up. A rank maps the parts of its `Layout`. Megatron numbers layers and experts from 0 on every rank, HF over the
whole model. `to_hf` yields views where the layout allows it, `hf_views` always.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_fp8rl.hf.model_config import Family
from nemo_fp8rl.hf.model_tensors import EMBEDDING, HEAD, NORM
from nemo_fp8rl.policy.weights.layout import Layout

Get = Callable[[str], Tensor]
"""Returns one tensor by its name."""

MEGATRON_EMBEDDING, MEGATRON_HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
MEGATRON_NORM = "decoder.final_layernorm.weight"

LAYER_TENSORS = {  # Megatron suffix -> HF suffix, for tensors that are equal
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}
LAYER_NORMS = "input_layernorm.weight", "pre_mlp_layernorm.weight"
ROUTER = {"mlp.router.weight": "mlp.gate.weight"}
QK_NORMS = {f"self_attention.{x}_layernorm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}


def layer_tensors(family: Family) -> dict[str, str]:
    return LAYER_TENSORS | (QK_NORMS if family.qk_norm else {}) | (ROUTER if family.experts else {})


def qkv_leaves(family: Family) -> tuple[str, ...]:
    return ("weight", "bias") if family.qkv_bias else ("weight",)


def from_hf(layout: Layout, get: Get) -> Iterator[tuple[str, Tensor]]:
    """Yield (Megatron name, tensor) for every parameter of the rank.

    get:  reads the rank's part of one HF tensor
    """
    hf = layout.hf
    if layout.is_first_stage:
        yield MEGATRON_EMBEDDING, _pad_rows(layout, get(EMBEDDING))
    for megatron, layer in layer_prefixes(layout):
        for megatron_name, hf_name in layer_tensors(hf.family).items():
            yield megatron + megatron_name, get(layer + hf_name)
        for leaf in qkv_leaves(hf.family):
            qkv = [get(f"{layer}self_attn.{x}_proj.{leaf}") for x in "qkv"]
            yield f"{megatron}self_attention.linear_qkv.{leaf}", fuse_qkv(layout, qkv)
        for megatron_name, hf_name in mlp_names(layout, megatron, layer):
            yield megatron_name.format("fc1"), torch.cat([get(f"{hf_name}{x}_proj.weight") for x in ("gate", "up")])
            yield megatron_name.format("fc2"), get(hf_name + "down_proj.weight")
    if layout.is_last_stage:
        yield MEGATRON_NORM, get(NORM)
        if not hf.tie_word_embeddings:
            yield MEGATRON_HEAD, _pad_rows(layout, get(HEAD))
        elif not layout.is_first_stage:  # Megatron keeps this copy equal to the embedding
            yield MEGATRON_HEAD, _pad_rows(layout, get(EMBEDDING))


def to_hf(layout: Layout, get: Get) -> Iterator[tuple[str, Tensor]]:
    """Yield (HF name, tensor) for the rank's part of every HF tensor.

    get:  returns one parameter by Megatron's name; it may communicate, because all ranks of a stage get the same
          parameters in the same order
    """
    for name, part in hf_views(layout, get):
        yield name, part.flatten(0, 1) if part.dim() == 3 else part


def hf_views(layout: Layout, get: Get) -> Iterator[tuple[str, Tensor]]:
    """Yield as `to_hf`, but the weights of q, k and v as views [groups, rows, H], which `to_hf` flattens."""
    hf = layout.hf
    tokens = len(layout.vocabulary)
    if layout.is_first_stage:
        yield EMBEDDING, get(MEGATRON_EMBEDDING)[:tokens]
    for megatron, layer in layer_prefixes(layout):
        for megatron_name, hf_name in layer_tensors(hf.family).items():
            yield layer + hf_name, get(megatron + megatron_name)
        for leaf in qkv_leaves(hf.family):
            qkv = split_qkv(layout, get(f"{megatron}self_attention.linear_qkv.{leaf}"))
            for x, part in zip("qkv", qkv, strict=True):
                yield f"{layer}self_attn.{x}_proj.{leaf}", part if leaf == "weight" else part.flatten()
        for megatron_name, hf_name in mlp_names(layout, megatron, layer):
            gate, up = get(megatron_name.format("fc1")).chunk(2)
            yield hf_name + "gate_proj.weight", gate
            yield hf_name + "up_proj.weight", up
            yield hf_name + "down_proj.weight", get(megatron_name.format("fc2"))
    if layout.is_last_stage:
        yield NORM, get(MEGATRON_NORM)
        if not hf.tie_word_embeddings:
            yield HEAD, get(MEGATRON_HEAD)[:tokens]


def parameters_by_hf_name(layout: Layout, model: torch.nn.Module) -> dict[str, str]:
    """Return HF name -> the name of the rank's parameter that has the tensor; fused tensors have the same one."""
    parameters = dict(model.named_parameters())
    names = list(parameters)

    def number(name: str) -> Tensor:
        """Return the parameter's number in its shape, so that the number takes the weight's way to HF names."""
        return torch.tensor(names.index(name)).expand(parameters[name].shape)

    return {hf_name: names[int(numbers.flatten()[0])] for hf_name, numbers in hf_views(layout, number)}


def fuse_qkv(layout: Layout, qkv: Sequence[Tensor]) -> Tensor:
    """Return the rank's rows of q, k and v, [rows, ...] each, as one tensor in the order of `linear_qkv`."""
    return torch.cat([part.view(layout.qkv_groups, -1, *part.shape[1:]) for part in qkv], 1).flatten(0, 1)


def split_qkv(layout: Layout, qkv: Tensor) -> tuple[Tensor, ...]:
    """Return the queries, keys and values of `linear_qkv` as views [groups, rows, ...]."""
    grouped = qkv.view(layout.qkv_groups, -1, *qkv.shape[1:])
    keys = layout.hf.num_key_value_heads * layout.hf.head_dim // layout.tensor.size // layout.qkv_groups
    return grouped.split([grouped.size(1) - 2 * keys, keys, keys], 1)


def layer_prefixes(layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield (Megatron's prefix, HF's prefix) for every layer of the rank."""
    for local, i in enumerate(layout.layers):
        yield f"decoder.layers.{local}.", f"model.layers.{i}."


def layer_norms(layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield (Megatron's name, HF's name) for the norms before attention and MLP of every layer of the rank."""
    for megatron, layer in layer_prefixes(layout):
        yield from ((megatron + norm, layer + LAYER_TENSORS[norm]) for norm in LAYER_NORMS)


def mlp_names(layout: Layout, megatron: str, layer: str) -> Iterator[tuple[str, str]]:
    """Yield (Megatron's name with `{}` for fc1 or fc2, HF's prefix) for a layer's gated MLPs: one, or the experts."""
    if not layout.hf.family.experts:
        yield megatron + "mlp.linear_{}.weight", layer + "mlp."
    experts = megatron + "mlp.experts."
    for local, expert in enumerate(layout.experts):
        name = f"linear_{{}}.weight{local}" if layout.grouped_experts else f"local_experts.{local}.linear_{{}}.weight"
        yield experts + name, f"{layer}mlp.experts.{expert}."


def _pad_rows(layout: Layout, rows: Tensor) -> Tensor:
    """Append rows of 0 to [tokens, H], so that every rank has the same number of rows."""
    return F.pad(rows, (0, 0, 0, layout.padded_vocab_size // layout.tensor.size - len(rows)))
