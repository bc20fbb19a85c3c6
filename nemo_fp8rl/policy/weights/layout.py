"""The part of the model that a rank has, by HF names, under tensor, pipeline, expert and context parallelism.

Tensor parallelism splits the rows of q, k, v, gate and up projections, the columns of o and down projections, and the
rows of embedding and head, over a vocabulary padded to a multiple. Norms and routers are whole on every tensor-parallel
rank. A pipeline stage has consecutive layers, an expert-parallel rank consecutive experts. Context parallelism splits
no weight: its ranks have parts of the tokens.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.region import Region, full_region
from nemo_fp8rl.config.policy_schema import MegatronConfig
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.fp8 import BLOCK
from nemo_fp8rl.hf.adapters import NO_ADAPTERS, Adapters, read_adapters
from nemo_fp8rl.hf.divisibility import Dimension, check_divides, pipeline_stages
from nemo_fp8rl.hf.fp8_layers import attention_dimensions, mlp_dimension, requested_fp8_layers
from nemo_fp8rl.hf.model_config import HfConfig

SPLIT = re.compile(
    r"\b(?:(?P<rows>(?:embed_tokens|lm_head|(?:[qkv]|gate|up)_proj)\.)|(?P<columns>(?:o|down)_proj\.(?!lora_B)))"
)
"""Tensors that ranks share. Of an adapter they share B where a layer's rows are split, and A where its columns are."""
EXPERT = re.compile(r"\.experts\.\d+\.")
KEY_PREFIX = "policy.megatron_cfg"


@dataclass(frozen=True)
class Axis:
    """A rank's number among the ranks that split something."""

    rank: int = 0
    size: int = 1

    def span(self, length: int) -> tuple[int, int]:
        """Return (start, stop) of this rank's part of `length`; the last parts are shorter if it does not divide."""
        step = -(-length // self.size)
        return min(self.rank * step, length), min((self.rank + 1) * step, length)


@dataclass(frozen=True)
class Layout:
    """One rank of a parallel trainer.

    tensor:              the ranks that split each matrix, except those of experts
    expert_tensor:       the ranks that split each matrix of an expert
    pipeline:            the ranks that split the layers
    expert:              the ranks that split the experts of a layer
    context:             the ranks that split the tokens of each sequence, with equal weights
    data:                the ranks that have equal weights, except experts, and other sequences
    expert_data:         the ranks with equal experts
    first_stage_layers:  number of layers of the first stage if it differs from that of other stages
    last_stage_layers:   the same for the last stage
    grouped_experts:     True if one Megatron layer has all experts of a rank, as with Transformer Engine
    adapters:            the adapters of the model
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
    adapters: Adapters = NO_ADAPTERS

    @property
    def layers(self) -> range:
        first, last = self.first_stage_layers, self.last_stage_layers
        return pipeline_stages(self.hf.num_hidden_layers, self.pipeline.size, first, last)[self.pipeline.rank]

    @property
    def experts(self) -> range:
        return range(*self.expert.span(self.hf.num_experts))

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def vocabulary(self) -> range:
        """The token ids whose embedding and logits this rank has."""
        return range(*self.tensor.span(self.hf.vocab_size))

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.hf.vocab_size // self.tensor.size) * self.tensor.size

    def sharing_axis(self, name: str) -> Axis:
        """Return the axis that splits this tensor: `expert_tensor` for an expert's tensor, else `tensor`."""
        return self.expert_tensor if EXPERT.search(name) else self.tensor

    def is_split(self, name: str) -> bool:
        return self.sharing_axis(name).size > 1 and SPLIT.search(name) is not None

    @property
    def qkv_by_kind(self) -> bool:
        """True if a rank's `linear_qkv` has all queries above all keys above all values, as in an engine.

        Megatron's order is one key-value group after the other. It does not suit heads that are not whole FP8 blocks
        (Llama-3.2-1B's have 64 rows), because the blocks of groups would differ from the engine's.
        """
        return self.hf.head_dim % BLOCK[0] != 0

    @property
    def qkv_groups(self) -> int:
        """The number of times that `linear_qkv` has queries, keys and values one below the other."""
        return 1 if self.qkv_by_kind else self.hf.num_key_value_heads // self.tensor.size

    @property
    def experts_span_replicas(self) -> bool:
        """True if this rank's tokens go to experts on ranks with other rows of the batch.

        Megatron gives consecutive numbers to the ranks of a replica, and to the ranks that share experts.
        """
        return self.tensor.size * self.context.size % (self.expert.size * self.expert_tensor.size) != 0

    def region(self, name: str, shape: tuple[int, ...]) -> Region:
        """Return the rank's part of the HF tensor `name`, whose whole has this shape."""
        region, kind = list(full_region(shape)), SPLIT.search(name)
        if kind is not None:
            dim = 0 if kind["rows"] else 1
            region[dim] = self.sharing_axis(name).span(shape[dim])
        return tuple(region)

    def dropout_seed(self, sequence_parallel: bool) -> tuple[int, ...]:
        """Return numbers that differ between ranks with other tokens or other layers.

        Tensor-parallel ranks have equal activations, of which they must drop the same values, except where each has
        its own tokens.
        """
        tensor = self.tensor.rank if sequence_parallel else 0
        return self.data.rank, self.context.rank, self.pipeline.rank, tensor

    def is_replica(self, name: str) -> bool:
        """True if another rank has the first of the copies of `name` that data and context parallelism make."""
        return any(axis.rank for axis in ((self.expert_data,) if EXPERT.search(name) else (self.data, self.context)))

    def may_send(self, name: str) -> bool:
        """True if this rank may send its part of `name`.

        Of a tensor that is whole on every tensor-parallel rank only the first rank may, because each rank updates it by
        its own arithmetic. Other copies have equal bits, which Megatron gathers.
        """
        return self.is_split(name) or self.sharing_axis(name).rank == 0

    def is_writer(self, name: str) -> bool:
        """True on the one rank, of all with the same part of `name`, that counts and saves it."""
        return self.may_send(name) and not self.is_replica(name)


def expert_tensor_size(hf: HfConfig, parallel: MegatronConfig) -> int:
    """Return policy.megatron_cfg.expert_tensor_parallel_size, which a dense model does not read."""
    return parallel.expert_tensor_parallel_size if hf.family.experts else parallel.tensor_model_parallel_size


def check_layout(hf: HfConfig, cfg: Config) -> None:
    """Raise UserError, with key, layer, dimension and sizes that fit, if the recipe cannot split the model."""
    parallel = cfg.policy.megatron_cfg
    tensor, expert = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    if not hf.family.experts and cfg.policy.router_replay.enabled:
        raise UserError("policy.router_replay.enabled=true: the model has no experts; set it to false")
    if not hf.family.experts and expert > 1:
        raise UserError(f"{KEY_PREFIX}.expert_model_parallel_size={expert}: the model has no experts; set it to 1")
    expert_tensor, ranks = expert_tensor_size(hf, parallel), cfg.cluster.train_ranks
    if ranks % (expert * expert_tensor * parallel.pipeline_model_parallel_size):
        raise UserError(
            f"cluster.train_ranks={ranks} is not a multiple of {KEY_PREFIX}.expert_model_parallel_size={expert} times "
            f"{KEY_PREFIX}.expert_tensor_parallel_size={expert_tensor} times "
            f"{KEY_PREFIX}.pipeline_model_parallel_size={parallel.pipeline_model_parallel_size}"
        )
    if hf.family.experts and tensor > 1 and not parallel.sequence_parallel:
        raise UserError(
            f"{KEY_PREFIX}.tensor_model_parallel_size={tensor} with experts needs {KEY_PREFIX}.sequence_parallel=true: "
            "Megatron trains a mixture in no other way"
        )
    if read_adapters(hf, parallel.peft).adapts_experts() and expert_tensor > 1:
        raise UserError(
            f"{KEY_PREFIX}.expert_tensor_parallel_size={expert_tensor} splits experts, and {KEY_PREFIX}.peft gives "
            "every expert an adapter on one rank; set it to 1 (left out, it is tensor_model_parallel_size), or leave "
            f"linear_fc1 and linear_fc2 out of {KEY_PREFIX}.peft.target_modules"
        )
    fp8 = requested_fp8_layers(hf, cfg)
    block = cfg.nemo_fp8rl.format.line_block[1]
    attention, mlp = attention_dimensions(hf, fp8, block), mlp_dimension(hf, fp8, block)
    if hf.family.experts:
        check_divides(f"{KEY_PREFIX}.tensor_model_parallel_size", tensor, *attention)
        check_divides(f"{KEY_PREFIX}.expert_model_parallel_size", expert, Dimension("num_experts", hf.num_experts))
        check_divides(f"{KEY_PREFIX}.expert_tensor_parallel_size", parallel.expert_tensor_parallel_size, mlp)
    else:
        check_divides(f"{KEY_PREFIX}.tensor_model_parallel_size", tensor, *attention, mlp)
    _check_vocabulary(hf, tensor, attention)
    _check_context(hf, parallel)
    _check_stages(hf, parallel)


def _check_vocabulary(hf: HfConfig, tensor: int, attention: Sequence[Dimension]) -> None:
    """Check that no rank is without tokens: parts are equal, except that the last may be shorter."""

    def fits(size: int) -> bool:
        return len(Layout(hf, tensor=Axis(size - 1, size)).vocabulary) > 0

    if not fits(tensor):
        all_fit = (n for n in range(1, tensor) if fits(n) and all(other.can_split_into(n) for other in attention))
        raise UserError(
            f"policy.megatron_cfg.tensor_model_parallel_size={tensor} leaves a rank without tokens of the model's "
            f"vocab_size={hf.vocab_size}; sizes that fit: {', '.join(map(str, all_fit))}"
        )


def _check_context(hf: HfConfig, parallel: MegatronConfig) -> None:
    """Check that context parallelism can split the heads of a tensor-parallel rank."""
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    heads, groups = hf.num_attention_heads // tensor, hf.num_key_value_heads // tensor
    if heads % context or (groups % context and context % groups):
        fits = [n for n in range(1, heads + 1) if not heads % n and not (groups % n and n % groups)]
        raise UserError(
            f"policy.megatron_cfg.context_parallel_size={context} does not divide the {heads} attention heads and "
            f"{groups} key-value heads of self_attn on a tensor-parallel rank; sizes that fit: "
            f"{', '.join(map(str, fits))}"
        )


def _check_stages(hf: HfConfig, parallel: MegatronConfig) -> None:
    size, layers = parallel.pipeline_model_parallel_size, hf.num_hidden_layers
    keys = {
        "num_layers_in_first_pipeline_stage": parallel.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": parallel.num_layers_in_last_pipeline_stage,
    }
    uneven = {key: n for key, n in keys.items() if n is not None}
    if not uneven:
        check_divides(f"{KEY_PREFIX}.pipeline_model_parallel_size", size, Dimension("num_hidden_layers", layers))
        return
    settings = " and ".join(f"{KEY_PREFIX}.{key}={n}" for key, n in uneven.items())
    if size == 1:
        raise UserError(f"{settings} needs {KEY_PREFIX}.pipeline_model_parallel_size above 1")
    stage_layers = pipeline_stages(layers, size, *keys.values())
    if stage_layers[-1].stop != layers or not all(stage_layers):
        raise UserError(
            f"{settings} {'leaves' if len(uneven) == 1 else 'leave'} {layers - sum(uneven.values())} of the model's "
            f"num_hidden_layers={layers} to the other {size - len(uneven)} of "
            f"{KEY_PREFIX}.pipeline_model_parallel_size={size} stages, which must have equal numbers of them"
        )
