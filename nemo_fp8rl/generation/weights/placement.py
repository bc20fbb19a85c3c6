"""Maps the tensors of a checkpoint to the memory of one rank of vLLM: which part of each, in which parameter.

vLLM fuses q, k, v and gate, up, stacks experts, and splits over ranks. The map follows the attributes of vLLM's
modules, and is not trusted: `weight_store` compares it with the result of vLLM's own loaders for the same bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from nemo_fp8rl.common.region import Region, full_region
from nemo_fp8rl.fp8 import Format, Fp8Layers
from nemo_fp8rl.hf.adapters import FUSED_NAMES, LORA_A, LORA_B, Adapters, adapter_tensors
from nemo_fp8rl.hf.model_config import HfConfig
from nemo_fp8rl.hf.model_tensors import expected_tensors
from nemo_fp8rl.refit.expert_stacks import stack_of, stack_parts
from nemo_fp8rl.refit.manifest import RefitError, TensorPart
from nemo_fp8rl.refit.message import Content

EXPERT_PROJECTIONS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
"""The projections in vLLM's stacks of experts."""
ADAPTER_PARAMETERS = tuple(f"{stack}lora_{kind}" for stack in ("", "w13_", "w2_") for kind in "AB")
SPLIT_COLUMNS = ("o_proj", "down_proj")
SPLIT_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


@dataclass(frozen=True)
class Slot:
    """A part of a tensor and its place in memory.

    part:       the part that this rank stores
    module:     vLLM's module
    parameter:  the name of the module's parameter
    top:        the parameter's row at which the part begins
    position:   the position among the matrices that vLLM fuses in the parameter
    expert:     the position in a stack of experts, None without one; of a part of a stack, that of its first expert
    """

    part: TensorPart
    module: nn.Module
    parameter: str
    top: int = 0
    position: int = 0
    expert: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The module's tensors that have the part, its scales and its global scale."""
        format, names = self.part.format, [self.parameter]
        if format is not None:
            names += [format.scale_name(self.parameter), *([format.global_name(self.parameter)] * format.has_global)]
        return [getattr(self.module, name) for name in names]

    def content(self) -> Content | None:
        """Return views of the part in memory; None where vLLM stores the tensor in another form."""
        data, format = self._part_of(self.parameter, self.part.data_shape, self.top), self.part.format
        if data is None or data.dtype != self.part.torch_dtype:
            return None
        if format is None:
            return Content(data)
        top = self.top // format.weight_block[0]
        scales = self._part_of(format.scale_name(self.parameter), self.part.scale_shape, top)
        if scales is None or not format.has_global:
            return Content(data, scales) if scales is not None else None
        of_parts = getattr(self.module, format.global_name(self.parameter)).data
        if self.part.is_stack:
            return Content(data, scales, of_parts[self._experts, self.position])
        of_parts = of_parts if self.expert is None else of_parts[self.expert]
        return Content(data, scales, of_parts[self.position : self.position + 1])

    @property
    def _experts(self) -> slice:
        assert self.expert is not None
        return slice(self.expert, self.expert + self.part.size[0])

    def _part_of(self, name: str, size: tuple[int, ...], top: int) -> Tensor | None:
        parameter = getattr(self.module, name).data
        if self.part.is_stack:
            rows = parameter[self._experts, top : top + size[1]] if parameter.dim() == len(size) else parameter[:0]
            return rows if rows.shape == size else None
        if parameter.dim() != len(size) + (self.expert is not None):
            return None
        tensor = parameter if self.expert is None else parameter[self.expert]
        rows = tensor[top : top + size[0]] if size else tensor
        return rows if rows.shape == size else None


def slots(model: nn.Module, hf: HfConfig, dtype: torch.dtype, fp8_layers: Fp8Layers, format: Format) -> dict[str, Slot]:
    """Return the slots, by HF name, of all tensors that this rank stores, KV scales excepted.

    Names come from the model's parameters; fused ones are taken apart by the model's own table. Shapes come from
    config.json. vLLM accepts a load that leaves tensors out, so this list decides whether a refit is complete.

    dtype:   the model's, which loaders expect for tensors that are not quantized; vLLM may store another (a bias on
             AMX is float32)
    format:  of the tensors that `fp8_layers` quantize
    Raises:  RefitError where the model is not that of config.json
    """
    shapes = expected_tensors(hf)
    found: dict[str, Slot] = {}
    known: set[str] = set()
    for path, _ in model.named_parameters():
        if path.endswith((format.scale_name("weight"), format.global_name("weight"))):
            continue
        above, _, leaf = path.rpartition(".")
        module = model.get_submodule(above)
        for name, position, expert in _names(model, path, module, hf):
            known.add(name)
            if name not in shapes:
                continue
            region, top = _place(name, shapes[name], module, hf)
            if expert is None or expert >= 0:
                part = TensorPart.of(name, format if fp8_layers.quantizes(name) else dtype, shapes[name], region)
                found[name] = Slot(part, module, leaf, top, position, expert)
    if odd := sorted(known ^ set(shapes)):
        raise RefitError(f"the engine's model and its config.json differ in {len(odd)} tensors, such as {odd[0]}")
    return _stack(found, hf.num_experts)


def _stack(found: dict[str, Slot], experts: int) -> dict[str, Slot]:
    """Return the slots with those of experts as slots of stacks. Raises RefitError as `stack_parts`, and where vLLM
    does not keep the experts of a rank in their order.
    """
    firsts: dict[str, Slot] = {}
    for name, slot in found.items():
        stack, number = stack_of(name) or (name, 0)
        first = firsts.setdefault(stack, slot)
        if slot.expert is not None and first.expert is not None:
            start = stack_of(first.part.name)
            assert start is not None
            if slot.expert - first.expert != number - start[1]:
                raise RefitError(f"{stack}: vLLM keeps expert {number} at place {slot.expert}, which is out of order")
    parts = stack_parts((slot.part for slot in found.values()), experts)
    return {part.name: replace(firsts[part.name], part=part) for part in parts}


def adapter_slots(model: nn.Module, hf: HfConfig, adapters: Adapters) -> dict[str, Slot]:
    """Return the slots, by name, of all tensors of adapters that this rank stores (`fp8_method.low_rank`)."""
    found: dict[str, Slot] = {}
    shapes = adapter_tensors(hf, adapters)
    for path, module in model.named_modules():
        for leaf in ADAPTER_PARAMETERS:
            if (parameter := getattr(module, leaf, None)) is None:
                continue
            for name, position, expert in _adapter_names(model, path, leaf, module, hf):
                if expert is None or expert >= 0:
                    region, top = _adapter_place(name, shapes[name], module, hf)
                    part = TensorPart.of(name, parameter.dtype, shapes[name], region)
                    found[name] = Slot(part, module, leaf, top, position, expert)
    return found


def _adapter_names(
    model: Any, path: str, leaf: str, module: Any, hf: HfConfig
) -> Iterator[tuple[str, int, int | None]]:
    """Yield the names of the tensors in an adapter's parameter, as `_names` does; A has the fused module's name."""
    stack, _, kind = leaf.rpartition("lora_")
    for name, position, expert in _names(model, f"{path}.{stack}weight", module, hf):
        above, _, projection = name.removesuffix(".weight").rpartition(".")
        if kind == "B":
            yield f"{above}.{projection}.{LORA_B}.weight", position, expert
        elif not position:
            yield f"{above}.{FUSED_NAMES.get(projection, projection)}.{LORA_A}.weight", 0, expert


def _adapter_place(name: str, shape: tuple[int, ...], module: Any, hf: HfConfig) -> tuple[Region, int]:
    """Return the region that this rank stores: rows of B as the weight's, columns of A as the weight's."""
    weight = name.removesuffix(".weight").rpartition(".")[0] + ".weight"
    is_whole = weight.rsplit(".", 2)[-2] not in (SPLIT_ROWS if f".{LORA_B}." in name else SPLIT_COLUMNS)
    return (full_region(shape), 0) if is_whole else _place(weight, shape, module, hf)


def _names(model: Any, path: str, module: Any, hf: HfConfig) -> Iterator[tuple[str, int, int | None]]:
    """Yield the HF names of the tensors in a parameter, each with its position among fused matrices and the expert.

    The expert is its position in this rank's stack, -1 for an expert of another rank, None without experts.
    """
    *above, module_name, leaf = path.split(".")
    if module_name == "routed_experts":
        for expert in range(hf.num_experts):
            place = expert if module.expert_map is None else int(module.expert_map[expert])
            for position, projection in enumerate(EXPERT_PROJECTIONS[leaf]):
                yield ".".join([*above, str(expert), projection, "weight"]), position, place
        return
    for position, part in enumerate(model.packed_modules_mapping.get(module_name, [module_name])):
        yield ".".join([*above, part, leaf]), position, None


def _place(name: str, shape: tuple[int, ...], module: Any, hf: HfConfig) -> tuple[Region, int]:
    """Return the region of the tensor that this rank stores, and the parameter's row where the region begins."""
    if isinstance(module, VocabParallelEmbedding):
        shard = module.shard_indices
        return ((shard.org_vocab_start_index, shard.org_vocab_end_index), *full_region(shape)[1:]), 0
    rank, size = _tensor_parallel(module)
    region = stored_region(name, shape, hf, rank, size)
    projection = name.rsplit(".", 2)[-2]
    if projection not in SPLIT_ROWS:
        return region, 0
    rows = region[0][1] - region[0][0]
    query_rows = hf.num_attention_heads * hf.head_dim // size
    return region, {"k_proj": query_rows, "v_proj": query_rows + rows, "up_proj": rows}.get(projection, 0)


def stored_region(name: str, shape: tuple[int, ...], hf: HfConfig, rank: int, size: int) -> Region:
    """Return the region of a projection that a rank of `size` tensor-parallel ranks stores; of other tensors, all."""
    region, projection = list(full_region(shape)), name.rsplit(".", 2)[-2]
    if projection in SPLIT_COLUMNS:
        region[1] = _share(shape[1], rank, size)
    elif projection in ("k_proj", "v_proj"):  # with more ranks than heads, several ranks store the same head
        parts = min(size, hf.num_key_value_heads)
        region[0] = _share(shape[0], rank * parts // size, parts)
    elif projection in SPLIT_ROWS:
        region[0] = _share(shape[0], rank, size)
    return tuple(region)


def _tensor_parallel(module: Any) -> tuple[int, int]:
    if (moe := getattr(module, "moe_config", None)) is not None:
        return moe.moe_parallel_config.tp_rank, moe.moe_parallel_config.tp_size
    return getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)


def _share(length: int, rank: int, size: int) -> tuple[int, int]:
    return length * rank // size, length * (rank + 1) // size
