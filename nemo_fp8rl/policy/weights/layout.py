"""Which part of the model a rank holds, by HF names: tensor, pipeline and expert parallelism in one place.

A projection whose outputs are split (q, k, v, gate, up) has its rows split, one whose inputs are (o, down) its columns;
embedding and head have their rows split, over a vocabulary padded to a multiple. Norms and routers are whole on every
tensor-parallel rank. A pipeline stage holds consecutive layers, an expert-parallel rank consecutive experts. Context
parallelism splits no weight: its ranks have parts of the tokens.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.region import Region, whole
from nemo_fp8rl.config.schema import Config, MegatronConfig
from nemo_fp8rl.fp8 import BLOCK
from nemo_fp8rl.hf.divisibility import Dimension, check_divides, stages
from nemo_fp8rl.hf.fp8_layers import asked_fp8_layers, attention_dimensions, mlp_dimension
from nemo_fp8rl.hf.model_config import HfConfig

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
    experts of a layer. context: share the tokens of each sequence, and hold the same. data, expert_data: hold the same,
    of experts the second. first_stage_layers, last_stage_layers: where they are not as many as in other stages.
    grouped_experts: Megatron has a rank's experts in one layer, as it does with Transformer Engine's.
    """

    hf: HfConfig
    tensor: Axis = Axis()
    pipeline: Axis = Axis()
    expert: Axis = Axis()
    expert_tensor: Axis = Axis()
    context: Axis = Axis()
    data: Axis = Axis()
    expert_data: Axis = Axis()
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    grouped_experts: bool = False

    @property
    def layers(self) -> range:
        ends = self.first_stage_layers, self.last_stage_layers
        return stages(self.hf.num_hidden_layers, self.pipeline.size, *ends)[self.pipeline.rank]

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

    @property
    def qkv_by_kind(self) -> bool:
        """Whether a rank's `linear_qkv` holds all its queries above all keys above all values, as engines do, and not,
        as Megatron does, one key-value group after the other: where heads are no whole blocks of FP8 (Llama-3.2-1B's
        have 64 rows), so that blocks of groups would be others than the engine's.
        """
        return self.hf.head_dim % BLOCK[0] != 0

    @property
    def qkv_groups(self) -> int:
        """How many times `linear_qkv` holds queries, keys and values one below the other."""
        return 1 if self.qkv_by_kind else self.hf.num_key_value_heads // self.tensor.size

    @property
    def experts_span_replicas(self) -> bool:
        """Whether ranks with other rows of the batch have parts of the experts that this rank's tokens go to.

        Megatron numbers the ranks of a replica, and those that share experts, one after the other.
        """
        return self.tensor.size * self.context.size % (self.expert.size * self.expert_tensor.size) != 0

    def region(self, name: str, shape: tuple[int, ...]) -> Region:
        """The rank's part of the HF tensor `name`, which has this shape as a whole."""
        region, kind = list(whole(shape)), SPLIT.search(name)
        if kind is not None:
            dim = 0 if kind["rows"] else 1
            region[dim] = self.axis(name).part(shape[dim])
        return tuple(region)

    def is_copy(self, name: str) -> bool:
        """Whether another rank has the first of the copies of `name` that data and context parallelism make."""
        return any(axis.rank for axis in ((self.expert_data,) if EXPERT.search(name) else (self.data, self.context)))

    def sends(self, name: str) -> bool:
        """Whether this rank may send its part of `name`. Of what tensor-parallel ranks have alike, each by its own
        arithmetic, the first alone; other copies are Megatron's all-gathered bits.
        """
        return self.is_split(name) or self.axis(name).rank == 0

    def writes(self, name: str) -> bool:
        """Whether it is this rank, of all that hold the same part of `name`, that counts and keeps it."""
        return self.sends(name) and not self.is_copy(name)


def expert_tensor_size(hf: HfConfig, parallel: MegatronConfig) -> int:
    """policy.megatron_cfg.expert_tensor_parallel_size; a dense model does not read it."""
    return parallel.expert_tensor_parallel_size if hf.family.experts else parallel.tensor_model_parallel_size


def check_layout(hf: HfConfig, cfg: Config) -> None:
    """Raise UserError, by key, layer, dimension and sizes that fit, where the model cannot be split as told."""
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
    if hf.family.experts and tensor > 1 and not parallel.sequence_parallel:
        raise UserError(
            f"{here}.tensor_model_parallel_size={tensor} with experts needs {here}.sequence_parallel=true: Megatron "
            "trains a mixture in no other way"
        )
    fp8 = asked_fp8_layers(hf, cfg)
    attention, mlp = attention_dimensions(hf, fp8), mlp_dimension(hf, fp8)
    if hf.family.experts:
        check_divides(f"{here}.tensor_model_parallel_size", tensor, *attention)
        check_divides(f"{here}.expert_model_parallel_size", expert, Dimension("num_experts", hf.num_experts))
        check_divides(f"{here}.expert_tensor_parallel_size", parallel.expert_tensor_parallel_size, mlp)
    else:
        check_divides(f"{here}.tensor_model_parallel_size", tensor, *attention, mlp)
    _check_vocabulary(hf, tensor, attention)
    _check_context(hf, parallel)
    _check_stages(hf, parallel)


def _check_vocabulary(hf: HfConfig, tensor: int, attention: Sequence[Dimension]) -> None:
    """Tokens are shared out in equal parts but for the last, which may be shorter, not empty."""

    def fits(size: int) -> bool:
        return len(Layout(hf, tensor=Axis(size - 1, size)).vocabulary) > 0

    if not fits(tensor):
        all_fit = (n for n in range(1, tensor) if fits(n) and all(other.divides_in(n) for other in attention))
        raise UserError(
            f"policy.megatron_cfg.tensor_model_parallel_size={tensor} leaves a rank without tokens of the model's "
            f"vocab_size={hf.vocab_size}; sizes that fit: {', '.join(map(str, all_fit))}"
        )


def _check_context(hf: HfConfig, parallel: MegatronConfig) -> None:
    """Attention has the heads of a tensor-parallel rank shared out once more."""
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    heads, groups = hf.num_attention_heads // tensor, hf.num_key_value_heads // tensor
    if heads % context or (groups % context and context % groups):
        fits = [n for n in range(1, heads + 1) if not heads % n and not (groups % n and n % groups)]
        raise UserError(
            f"policy.megatron_cfg.context_parallel_size={context} does not share out the {heads} attention heads and "
            f"{groups} key-value heads of self_attn on a tensor-parallel rank; sizes that fit: "
            f"{', '.join(map(str, fits))}"
        )


def _check_stages(hf: HfConfig, parallel: MegatronConfig) -> None:
    here, size, layers = "policy.megatron_cfg", parallel.pipeline_model_parallel_size, hf.num_hidden_layers
    ends = {
        "num_layers_in_first_pipeline_stage": parallel.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": parallel.num_layers_in_last_pipeline_stage,
    }
    given = {key: n for key, n in ends.items() if n is not None}
    if not given:
        check_divides(f"{here}.pipeline_model_parallel_size", size, Dimension("num_hidden_layers", layers))
        return
    named = " and ".join(f"{here}.{key}={n}" for key, n in given.items())
    if size == 1:
        raise UserError(f"{named} needs {here}.pipeline_model_parallel_size above 1")
    shared = stages(layers, size, *ends.values())
    if shared[-1].stop != layers or not all(shared):
        raise UserError(
            f"{named} {'leaves' if len(given) == 1 else 'leave'} {layers - sum(given.values())} of the model's "
            f"num_hidden_layers={layers} to the other {size - len(given)} of {here}.pipeline_model_parallel_size={size}"
            " stages, which must have equal numbers of them"
        )
