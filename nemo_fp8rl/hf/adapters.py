"""The low-rank adapters (LoRA) of a model: which modules have one, and the tensors of a refit or a checkpoint.

An adapter adds (x A^T) B^T * alpha / rank to the output of a linear module. Modules that engine and trainer fuse (q, k
and v; gate and up) share one A [rank, K], as NeMo RL's LoRA does (Megatron-Bridge, peft/lora.py); each projection has
its rows of B [N, rank]. Every expert has adapters of its own. Names are HF's, with the fused module's name at A:

    model.layers.0.self_attn.qkv_proj.lora_A.weight, model.layers.0.self_attn.q_proj.lora_B.weight, ...
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.policy_schema import PeftConfig
from nemo_fp8rl.fp8.layers import FUSED
from nemo_fp8rl.hf.model_config import HfConfig

KEY = "policy.megatron_cfg.peft"
LORA_A, LORA_B = "lora_A", "lora_B"
FUSED_NAMES = {part: fused for fused, parts in FUSED.items() for part in parts}
EXPERT_NUMBER = re.compile(r"\.experts\.\d+\.")


class LinearModule(NamedTuple):
    """A linear module that can have an adapter.

    megatron:     its name in Megatron
    name:         its fused name in HF's style, as engines have it; without the number of an expert
    projections:  HF's names of the projections that it fuses, beside the last part of `name`
    rows:         the rows of each projection
    columns:      the size of its input
    """

    megatron: str
    name: str
    projections: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model.

    rank:     0 without adapters
    alpha:    see `scale`
    modules:  `LinearModule.name` of the modules that have one
    """

    rank: int = 0
    alpha: int = 1
    modules: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return self.rank > 0

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        return self.alpha / self.rank

    def adapts(self, name: str) -> bool:
        """Return whether a module has an adapter. name: of the fused module or of a projection, of one expert or all"""
        above, _, leaf = EXPERT_NUMBER.sub(".experts.", name).rpartition(".")
        return f"{above}.{FUSED_NAMES.get(leaf, leaf)}" in self.modules

    def adapts_experts(self) -> bool:
        return any(".experts." in name for name in self.modules)


NO_ADAPTERS = Adapters()


def linear_modules(hf: HfConfig) -> Iterator[LinearModule]:
    """Yield the modules of a model that can have an adapter; the experts of a layer as one."""
    hidden, heads, groups = hf.hidden_size, hf.num_attention_heads * hf.head_dim, hf.num_key_value_heads * hf.head_dim
    experts = "experts." if hf.family.experts else ""
    for i in range(hf.num_hidden_layers):
        megatron, layer = f"decoder.layers.{i}.", f"model.layers.{i}."
        attention, mlp = f"{layer}self_attn.", f"{layer}mlp.{experts}"
        qkv = ("q_proj", "k_proj", "v_proj"), (heads, groups, groups)
        yield LinearModule(f"{megatron}self_attention.linear_qkv", f"{attention}qkv_proj", *qkv, hidden)
        yield LinearModule(f"{megatron}self_attention.linear_proj", f"{attention}o_proj", ("o_proj",), (hidden,), heads)
        gate_up = ("gate_proj", "up_proj"), (hf.intermediate_size, hf.intermediate_size)
        down = ("down_proj",), (hidden,), hf.intermediate_size
        yield LinearModule(f"{megatron}mlp.{experts}linear_fc1", f"{mlp}gate_up_proj", *gate_up, hidden)
        yield LinearModule(f"{megatron}mlp.{experts}linear_fc2", f"{mlp}down_proj", *down)


def read_adapters(hf: HfConfig, peft: PeftConfig) -> Adapters:
    """Return the adapters that a recipe asks for. Raises UserError where a name in it is no module of the model."""
    if not peft.enabled:
        return NO_ADAPTERS
    if peft.target_modules and peft.exclude_modules:
        raise UserError(
            f"{KEY}.target_modules and {KEY}.exclude_modules are both set: the second takes modules out of all; leave "
            "one empty"
        )
    modules = list(linear_modules(hf))
    for key in ("target_modules", "exclude_modules"):
        for pattern in getattr(peft, key):
            is_known = any(_matches(pattern, module.megatron) for module in modules)
            if not is_known and (key, pattern) != ("exclude_modules", "output_layer"):  # NeMo RL adapts the head too
                raise UserError(f"{KEY}.{key}: {_no_such_module(pattern, modules)}")
    names = [module.name for module in modules if gets_adapter(module.megatron, peft)]
    if not names:
        raise UserError(f"{KEY}.exclude_modules={list(peft.exclude_modules)} leaves no module; remove names")
    return Adapters(peft.dim, peft.alpha, frozenset(names))


def adapter_tensors(hf: HfConfig, adapters: Adapters) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the adapters, by name."""
    tensors: dict[str, tuple[int, ...]] = {}
    for module in linear_modules(hf):
        if adapters.adapts(module.name):
            for name in expert_names(hf, module.name):
                above = name.rpartition(".")[0]
                tensors[f"{name}.{LORA_A}.weight"] = (adapters.rank, module.columns)
                for projection, rows in zip(module.projections, module.rows, strict=True):
                    tensors[f"{above}.{projection}.{LORA_B}.weight"] = (rows, adapters.rank)
    return tensors


def expert_names(hf: HfConfig, name: str) -> list[str]:
    """Return the name, or the names with the number of each expert."""
    if ".experts." not in name:
        return [name]
    return [name.replace(".experts.", f".experts.{expert}.") for expert in range(hf.num_experts)]


def is_adapter(name: str) -> bool:
    """Return whether a tensor of a refit, or a parameter of Megatron, belongs to an adapter."""
    return f".{LORA_A}" in name or f".{LORA_B}" in name


def gets_adapter(module: str, peft: PeftConfig) -> bool:
    """Return whether a recipe asks for an adapter of a linear module. module: its name in Megatron"""
    if peft.target_modules:
        return any(_matches(pattern, module) for pattern in peft.target_modules)
    return not any(_matches(pattern, module) for pattern in peft.exclude_modules)


def _matches(pattern: str, module: str) -> bool:
    """Return whether a module's last name, or its full name with `*` for any text, is the pattern."""
    parts = map(re.escape, pattern.split("*"))
    return module.rpartition(".")[2] == pattern or re.fullmatch(".*".join(parts), module) is not None


def _no_such_module(pattern: str, modules: Sequence[LinearModule]) -> str:
    names = sorted({module.megatron.rpartition(".")[2] for module in modules})
    similar = difflib.get_close_matches(pattern.rpartition(".")[2], names, 1, 0.4)
    nearest = f"did you mean {similar[0]}? " if similar else ""
    return f"the model has no linear module {pattern!r}; {nearest}It has {', '.join(names)}"
