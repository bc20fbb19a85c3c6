"""Where the tensors of a checkpoint are in the memory of one rank of vLLM: which part of each, in which parameter.

vLLM fuses q, k, v and gate, up, stacks experts, and splits over ranks. What its modules say of themselves decides here;
that it is right is not taken on trust: `weight_store` compares with what vLLM's own loaders made of the same bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from nemo_fp8rl.common.region import Region, whole
from nemo_fp8rl.fp8 import BLOCK, Fp8Layers, scale_shape
from nemo_fp8rl.fp8.format import E4M3
from nemo_fp8rl.hf.model_config import HfConfig
from nemo_fp8rl.hf.model_tensors import expected_tensors
from nemo_fp8rl.refit.manifest import RefitError, TensorPart
from nemo_fp8rl.refit.message import Content

EXPERT_PROJECTIONS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
"""What vLLM's stacks of experts hold."""
SPLIT_COLUMNS = ("o_proj", "down_proj")
SPLIT_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


@dataclass(frozen=True)
class Slot:
    """A part and its place: rows from `top` on of the module's parameter, or of that of one expert of it."""

    part: TensorPart
    module: nn.Module
    parameter: str
    top: int = 0
    expert: int | None = None

    def content(self) -> Content | None:
        """Views of what the engine holds; None where it keeps the tensor in another form."""
        data = self._part_of(getattr(self.module, self.parameter).data, self.part.size, self.top)
        if data is None or data.dtype != self.part.torch_dtype:
            return None
        if not self.part.is_fp8:
            return Content(data)
        scale_inv = getattr(self.module, f"{self.parameter}_scale_inv").data
        held = self._part_of(scale_inv, scale_shape(self.part.size, BLOCK), self.top // BLOCK[0])
        return Content(data, held) if held is not None else None

    def _part_of(self, parameter: Tensor, size: tuple[int, ...], top: int) -> Tensor | None:
        if parameter.dim() != len(size) + (self.expert is not None):
            return None
        tensor = parameter if self.expert is None else parameter[self.expert]
        held = tensor[top : top + size[0]] if size else tensor
        return held if held.shape == size else None


def slots(model: nn.Module, hf: HfConfig, dtype: torch.dtype, fp8_layers: Fp8Layers) -> dict[str, Slot]:
    """The slots, by HF name, of all that this rank stores but KV scales. Raises RefitError for another model than
    config.json's.

    Names are those of the model's own parameters, fused ones taken apart by the model's own table; shapes are what
    config.json implies. vLLM accepts a load that leaves tensors out, so a refit is held complete by this list.

    dtype: the model's, in which loaders take what is not FP8; what vLLM keeps may be another (a bias on AMX: float32).
    """
    shapes = expected_tensors(hf)
    found: dict[str, Slot] = {}
    known: set[str] = set()
    for path, _ in model.named_parameters():
        if path.endswith("_scale_inv"):
            continue
        above, _, leaf = path.rpartition(".")
        module = model.get_submodule(above)
        for name, expert in _names(model, path, module, hf):
            known.add(name)
            if name not in shapes:
                continue
            region, top = _place(name, shapes[name], module, hf)
            if expert is None or expert >= 0:
                arrives = E4M3 if fp8_layers.quantizes(name) else dtype
                part = TensorPart.of(name, arrives, shapes[name], region)
                found[name] = Slot(part, module, leaf, top, expert)
    if odd := sorted(known ^ set(shapes)):
        raise RefitError(f"the engine's model and its config.json differ in {len(odd)} tensors, such as {odd[0]}")
    return found


def _names(model: Any, path: str, module: Any, hf: HfConfig) -> Iterator[tuple[str, int | None]]:
    """HF's names of what a parameter holds; of an expert, its place in this rank's stack, -1 where another has it."""
    *above, own, leaf = path.split(".")
    if own == "routed_experts":
        for expert in range(hf.num_experts):
            place = expert if module.expert_map is None else int(module.expert_map[expert])
            for projection in EXPERT_PROJECTIONS[leaf]:
                yield ".".join([*above, str(expert), projection, "weight"]), place
        return
    for part in model.packed_modules_mapping.get(own, [own]):
        yield ".".join([*above, part, leaf]), None


def _place(name: str, shape: tuple[int, ...], module: Any, hf: HfConfig) -> tuple[Region, int]:
    """The region of the tensor that this rank has, and the row of the parameter where it begins."""
    region = list(whole(shape))
    if isinstance(module, VocabParallelEmbedding):
        held = module.shard_indices
        region[0] = (held.org_vocab_start_index, held.org_vocab_end_index)
        return tuple(region), 0
    projection = name.rsplit(".", 2)[-2]
    rank, size = _tensor_parallel(module)
    if projection in SPLIT_COLUMNS:
        region[1] = _share(shape[1], rank, size)
    if projection not in SPLIT_ROWS:
        return tuple(region), 0
    if projection in ("k_proj", "v_proj"):  # where ranks are more than heads, several have the same head
        parts = min(size, hf.num_key_value_heads)
        region[0] = _share(shape[0], rank * parts // size, parts)
    else:
        region[0] = _share(shape[0], rank, size)
    rows = region[0][1] - region[0][0]
    query_rows = hf.num_attention_heads * hf.head_dim // size
    return tuple(region), {"k_proj": query_rows, "v_proj": query_rows + rows, "up_proj": rows}.get(projection, 0)


def _tensor_parallel(module: Any) -> tuple[int, int]:
    if (moe := getattr(module, "moe_config", None)) is not None:
        return moe.moe_parallel_config.tp_rank, moe.moe_parallel_config.tp_size
    return getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)


def _share(length: int, rank: int, size: int) -> tuple[int, int]:
    return length * rank // size, length * (rank + 1) // size
