"""The ranks of a trainer and of an engine for models of released sizes, without their weights.

A trainer's rank is a real `Layout` whose parameters are meta tensors; their HF names and regions come from the code
that a run uses. An engine's rank stores what `placement.stored_region` says. `shrink` makes a model with the same
tensors, of part of a block for each rank, so that one machine can hold all ranks.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from nemo_fp8rl.commands.doctor.known_models import KNOWN_MODELS
from nemo_fp8rl.fp8 import BLOCK, FP8, Fp8Layers
from nemo_fp8rl.generation.weights.placement import stored_region
from nemo_fp8rl.hf.model_config import FAMILIES, HfConfig, read_hf_config
from nemo_fp8rl.hf.model_tensors import EMBEDDING, HEAD, expected_tensors
from nemo_fp8rl.policy.weights.hf_names import from_hf, to_hf
from nemo_fp8rl.policy.weights.layout import Axis, Layout
from nemo_fp8rl.refit.expert_stacks import stack_parts
from nemo_fp8rl.refit.manifest import TensorPart

EXPERTS = ".experts."
HIDDEN = 16
"""The hidden size of a small model: so few columns that next to no time is the work on values."""


@dataclass(frozen=True)
class Shape:
    """The split of a model over a trainer and its engines.

    model:             name on the hub
    ranks:             of the trainer
    tensor, pipeline, expert: sizes of the trainer's parallelism
    engine:            ranks of an engine
    engine_experts:    True if an engine's ranks spread the experts, False if they split each of them
    engines:           engines
    only_experts:      leave all other tensors out, where the family has another attention
    """

    model: str
    ranks: int
    engine: int
    engines: int
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    engine_experts: bool = False
    only_experts: bool = False

    @property
    def label(self) -> str:
        sizes = (("TP", self.tensor), ("PP", self.pipeline), ("EP", self.expert))
        trainer = " ".join([f"{self.ranks} ranks", *(f"{name}{size}" for name, size in sizes if size > 1)])
        how = "EP" if self.engine_experts else "TP"
        return f"{trainer} -> {self.engines} x {how}{self.engine}"


def model_config(name: str) -> HfConfig:
    """Read the sizes of a released model; of another family, those of its experts in Qwen3-MoE's place."""
    config = dict(KNOWN_MODELS[name])
    if config["model_type"] not in FAMILIES:
        config |= {
            "model_type": "qwen3_moe",
            "num_hidden_layers": config["num_hidden_layers"] - config.pop("first_k_dense_replace"),
            "num_experts": config.pop("n_routed_experts"),
            "head_dim": BLOCK[0],
            "norm_topk_prob": True,
        }
    known = ("n_shared_experts", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    config = {key: value for key, value in config.items() if key not in known}
    family = FAMILIES[config["model_type"]]
    config |= {"architectures": [family.architecture], "rms_norm_eps": 1e-6, "rope_theta": 1e6, "eos_token_id": 0}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return read_hf_config(folder)


def shrink(hf: HfConfig, shape: Shape) -> HfConfig:
    """Return a model of the same tensors, which have a block, or a head, for each rank that splits them."""
    ranks = max(shape.engine, shape.tensor)
    groups, whole_experts = min(hf.num_key_value_heads, ranks), hf.family.experts and shape.engine_experts
    return replace(
        hf,
        vocab_size=BLOCK[0] * ranks,
        hidden_size=HIDDEN,
        intermediate_size=BLOCK[0] if whole_experts else BLOCK[0] * ranks,
        num_attention_heads=ranks,
        num_key_value_heads=groups,
        head_dim=BLOCK[0],
    )


def layouts(hf: HfConfig, shape: Shape) -> list[Layout]:
    """Return the trainer's ranks in Megatron's order: tensor, then data (in it experts), then pipeline."""
    stage = shape.ranks // shape.pipeline
    found = []
    for rank in range(shape.ranks):
        local = rank % stage
        found.append(
            Layout(
                hf,
                tensor=Axis(local % shape.tensor, shape.tensor),
                pipeline=Axis(rank // stage, shape.pipeline),
                expert=Axis(local % shape.expert, shape.expert),
                expert_tensor=Axis() if hf.family.experts else Axis(local % shape.tensor, shape.tensor),
                data=Axis(local // shape.tensor, stage // shape.tensor),
                expert_data=Axis(local // shape.expert, stage // shape.expert),
                grouped_experts=hf.family.experts,
            )
        )
    return found


def parameters(layout: Layout, device: str) -> dict[str, Tensor]:
    """Return the rank's parameters by Megatron's names, bfloat16 on this device."""
    shapes = expected_tensors(layout.hf)

    def get(name: str) -> Tensor:
        size = [end - start for start, end in layout.region(name, shapes[name])]
        values = torch.empty(size, dtype=torch.bfloat16, device=device)
        return values if device == "meta" else values.normal_()

    return dict(from_hf(layout, get))


def weights(layout: Layout, held: dict[str, Tensor], only_experts: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield (HF name, this rank's part) of the weights that it may send, as `RankWeights.for_refit`."""
    for name, part in to_hf(layout, held.__getitem__):
        if layout.may_send(name) and (EXPERTS in name or not only_experts):
            yield name, part


def trainer_parts(layout: Layout, only_experts: bool) -> list[TensorPart]:
    shapes, layers = expected_tensors(layout.hf), Fp8Layers(0, layout.hf.num_hidden_layers)
    parts = [
        TensorPart.of(
            name,
            FP8 if layers.quantizes(name) else part.dtype,
            shapes[name],
            layout.region(name, shapes[name]),
        )
        for name, part in weights(layout, parameters(layout, "meta"), only_experts)
    ]
    return stack_parts(parts, layout.hf.num_experts)


def engine_parts(hf: HfConfig, shape: Shape) -> list[list[TensorPart]]:
    """Return the parts that each rank of an engine stores."""
    layers, shapes, size = Fp8Layers(0, hf.num_hidden_layers), expected_tensors(hf), shape.engine
    per_rank = hf.num_experts // size if shape.engine_experts else hf.num_experts
    found: list[list[TensorPart]] = [[] for _ in range(size)]
    for name, whole in shapes.items():
        if shape.only_experts and EXPERTS not in name:
            continue
        dtype = FP8 if layers.quantizes(name) else torch.bfloat16
        for rank in range(size):
            if EXPERTS in name and shape.engine_experts:
                if int(name.split(EXPERTS)[1].split(".")[0]) // per_rank == rank:
                    found[rank].append(TensorPart.of(name, dtype, whole))
            elif name in (EMBEDDING, HEAD):
                rows = whole[0] // size
                found[rank].append(TensorPart.of(name, dtype, whole, ((rank * rows, (rank + 1) * rows), (0, whole[1]))))
            else:
                found[rank].append(TensorPart.of(name, dtype, whole, stored_region(name, whole, hf, rank, size)))
    return [stack_parts(parts, hf.num_experts) for parts in found]
