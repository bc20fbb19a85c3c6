"""Which part of the model a rank holds, by HF names: tensor, pipeline and expert parallelism in one place.

A projection whose outputs are split (q, k, v, gate, up) has its rows split, one whose inputs are (o, down) its columns;
embedding and head have their rows split, over a vocabulary padded to a multiple. Norms and routers are whole on every
tensor-parallel rank. A pipeline stage holds consecutive layers, an expert-parallel rank consecutive experts.
"""

import re
from dataclasses import dataclass

from nemo_fp8rl.config import Config, MegatronConfig
from nemo_fp8rl.errors import UserError
from nemo_fp8rl.fp8 import BLOCK
from nemo_fp8rl.hf.config import HfConfig
from nemo_fp8rl.hf.divide import check_divides
from nemo_fp8rl.hf.region import Region, whole

SPLIT = re.compile(r"(?P<rows>(?:embed_tokens|lm_head|(?:[qkv]|gate|up)_proj)\.)|(?P<columns>(?:o|down)_proj\.)")
EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class Axis:
    """A rank's place among those that split something."""

    rank: int = 0
    size: int = 1

    def part(self, length: int) -> tuple[int, int]:
        """(start, stop) of this rank's part of `length`; the last parts are shorter where it does not divide."""
        step = -(-length // self.size)
        return min(self.rank * step, length), min((self.rank + 1) * step, length)


@dataclass(frozen=True)
class Layout:
    """One rank of a parallel trainer.

    tensor, expert_tensor: share each matrix, of experts the second. pipeline, expert: share the layers, and the
    experts of a layer. data, expert_data: hold the same, of experts the second. grouped_experts: Megatron has a rank's
    experts in one layer, as it does with Transformer Engine's.
    """

    hf: HfConfig
    tensor: Axis = Axis()
    pipeline: Axis = Axis()
    expert: Axis = Axis()
    expert_tensor: Axis = Axis()
    data: Axis = Axis()
    expert_data: Axis = Axis()
    grouped_experts: bool = False

    @property
    def layers(self) -> range:
        return range(*self.pipeline.part(self.hf.num_hidden_layers))

    @property
    def experts(self) -> range:
        return range(*self.expert.part(self.hf.num_experts))

    @property
    def first_stage(self) -> bool:
        return self.pipeline.rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def vocabulary(self) -> range:
        """Token ids whose embedding and logits this rank has."""
        return range(*self.tensor.part(self.hf.vocab_size))

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.hf.vocab_size // self.tensor.size) * self.tensor.size

    def axis(self, name: str) -> Axis:
        """Who shares this tensor: `tensor`, or `expert_tensor` for one of an expert."""
        return self.expert_tensor if EXPERT.search(name) else self.tensor

    def is_split(self, name: str) -> bool:
        return self.axis(name).size > 1 and SPLIT.search(name) is not None

    def region(self, name: str, shape: tuple[int, ...]) -> Region:
        """The rank's part of the HF tensor `name`, which has this shape as a whole."""
        region, kind = list(whole(shape)), SPLIT.search(name)
        if kind is not None:
            dim = 0 if kind["rows"] else 1
            region[dim] = self.axis(name).part(shape[dim])
        return tuple(region)

    def is_copy(self, name: str) -> bool:
        """Whether another rank has the first of the data-parallel copies of `name`."""
        return (self.expert_data if EXPERT.search(name) else self.data).rank > 0

    def sends(self, name: str) -> bool:
        """Whether this rank may send its part of `name`. Of what tensor-parallel ranks have alike, each by its own
        arithmetic, the first alone; data-parallel copies are Megatron's all-gathered bits.
        """
        return self.is_split(name) or self.axis(name).rank == 0

    def writes(self, name: str) -> bool:
        """Whether it is this rank, of all that hold the same part of `name`, that counts and keeps it."""
        return self.sends(name) and not self.is_copy(name)


def expert_tensor_size(hf: HfConfig, parallel: MegatronConfig) -> int:
    """policy.megatron_cfg.expert_tensor_parallel_size; a dense model does not read it."""
    return parallel.expert_tensor_parallel_size if hf.family.experts else parallel.tensor_model_parallel_size


def check_layout(hf: HfConfig, cfg: Config) -> None:
    """Raise UserError, with key, dimension and sizes that fit, when the model cannot be split as the recipe says."""
    parallel, here = cfg.policy.megatron_cfg, "policy.megatron_cfg"
    tensor, expert = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    if not hf.family.experts and cfg.policy.router_replay.enabled:
        raise UserError("policy.router_replay.enabled=true: the model has no experts; set it to false")
    if not hf.family.experts and expert > 1:
        raise UserError(f"{here}.expert_model_parallel_size={expert}: the model has no experts; set it to 1")
    expert_tensor, ranks = expert_tensor_size(hf, parallel), cfg.cluster.train_ranks
    if ranks % (expert * expert_tensor * parallel.pipeline_model_parallel_size):
        raise UserError(
            f"cluster.train_ranks={ranks} is not a multiple of {here}.expert_model_parallel_size={expert} times "
            f"{here}.expert_tensor_parallel_size={expert_tensor} times "
            f"{here}.pipeline_model_parallel_size={parallel.pipeline_model_parallel_size}"
        )
    if expert == 1 and expert_tensor != tensor:
        raise UserError(
            f"{here}.expert_tensor_parallel_size={expert_tensor} must be {here}.tensor_model_parallel_size={tensor} "
            f"while {here}.expert_model_parallel_size=1: Megatron would compute a wrong gradient norm, and no error"
        )
    if hf.family.experts and tensor > 1 and not parallel.sequence_parallel:
        raise UserError(
            f"{here}.tensor_model_parallel_size={tensor} with experts needs {here}.sequence_parallel=true: Megatron "
            "trains a mixture in no other way"
        )
    sizes = [
        ("tensor_model_parallel_size", "num_attention_heads", hf.num_attention_heads),
        ("tensor_model_parallel_size", "num_key_value_heads", hf.num_key_value_heads),
        ("pipeline_model_parallel_size", "num_hidden_layers", hf.num_hidden_layers),
    ]
    if hf.family.experts:
        sizes.append(("expert_model_parallel_size", "num_experts", hf.num_experts))
    for key, dimension, size in sizes:
        check_divides(f"{here}.{key}", getattr(parallel, key), dimension, size)
    key = "expert_tensor_parallel_size" if hf.family.experts else "tensor_model_parallel_size"
    intermediate = "moe_intermediate_size" if hf.family.experts else "intermediate_size"
    block = BLOCK[0] if cfg.nemo_fp8rl.engine_fp8 else 1
    check_divides(f"{here}.{key}", getattr(parallel, key), intermediate, hf.intermediate_size, block)
