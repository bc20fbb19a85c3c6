"""The mapping between Megatron's parameters and the tensors of adapters (`hf.adapters`), as `hf_names` has it for
weights.

Beside a layer's `weight` stand `lora_A` and `lora_B`; B's rows have the order of the weight's.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from nemo_fp8rl.hf.adapters import LORA_A, LORA_B, adapter_tensors
from nemo_fp8rl.hf.model_tensors import expected_tensors
from nemo_fp8rl.policy.weights.hf_names import Get, from_hf, fuse_qkv, layer_prefixes, mlp_names, split_qkv
from nemo_fp8rl.policy.weights.layout import Layout

A, B = f".{LORA_A}", f".{LORA_B}"


def adapters_from_hf(layout: Layout, get: Get) -> Iterator[tuple[str, Tensor]]:
    """Yield (Megatron name, tensor) for every parameter of the rank's adapters.

    get:  reads the rank's part of one tensor
    """
    for weight, module, projections in _adapted_layers(layout):
        above = module.rpartition(".")[0]
        yield _parameter(weight, A), get(f"{module}{A}.weight")
        parts = [get(f"{above}.{projection}{B}.weight") for projection in projections]
        yield _parameter(weight, B), fuse_qkv(layout, parts) if len(parts) == 3 else torch.cat(parts)


def adapter_views(layout: Layout, get: Get) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for the rank's part of every tensor of the adapters.

    get:  returns one parameter by Megatron's name; see `hf_names.to_hf`
    """
    for weight, module, projections in _adapted_layers(layout):
        above = module.rpartition(".")[0]
        yield f"{module}{A}.weight", get(_parameter(weight, A))
        b = get(_parameter(weight, B))
        parts = split_qkv(layout, b) if len(projections) == 3 else b.chunk(len(projections))
        for projection, part in zip(projections, parts, strict=True):
            yield f"{above}.{projection}{B}.weight", part.flatten(0, -2)


def trained_from_hf(layout: Layout, get: Get) -> Iterator[tuple[str, Tensor]]:
    """Yield as `adapters_from_hf`, or without adapters as `hf_names.from_hf`."""
    return adapters_from_hf(layout, get) if layout.adapters else from_hf(layout, get)


def trained_tensors(layout: Layout) -> Mapping[str, tuple[int, ...]]:
    """Return the shape of every tensor that is trained, by name: of the adapters, or without them of the model."""
    return adapter_tensors(layout.hf, layout.adapters) if layout.adapters else expected_tensors(layout.hf)


def _adapted_layers(layout: Layout) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield (Megatron's name of the weight, HF's name of the fused module, its projections) of the adapted modules."""
    for megatron, layer in layer_prefixes(layout):
        attention, hf_attention = f"{megatron}self_attention.", f"{layer}self_attn."
        modules = [
            (f"{attention}linear_qkv.weight", f"{hf_attention}qkv_proj", ("q_proj", "k_proj", "v_proj")),
            (f"{attention}linear_proj.weight", f"{hf_attention}o_proj", ("o_proj",)),
        ]
        for megatron_name, mlp in mlp_names(layout, megatron, layer):
            modules.append((megatron_name.format("fc1"), f"{mlp}gate_up_proj", ("gate_proj", "up_proj")))
            modules.append((megatron_name.format("fc2"), f"{mlp}down_proj", ("down_proj",)))
        yield from (module for module in modules if layout.adapters.adapts(module[1]))


def _parameter(weight: str, leaf: str) -> str:
    """Return the parameter beside a weight, which has an expert's number at its end in a layer of many experts."""
    layer, _, number = weight.rpartition(".weight")
    return f"{layer}{leaf}{number}"
