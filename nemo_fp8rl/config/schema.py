"""A whole recipe, typed: NeMo RL's config dialect with one frozen dataclass a block.

`recipe.load` reads a YAML recipe (`defaults:` inheritance, `${...}` interpolation, dotted overrides) and checks it
against these classes. Type, default, range, resume behaviour and NeMo RL's spelling of a key stand at its field
(`common.field_rules`); `validate.check` has the rules between keys. docs/config.md is made from the classes, a key's
meaning there is the first sentence below its field. The precision flow and all keys that NeMo RL does not have are in
the block `nemo_fp8rl:`, apart from a few whose text says "ours".
"""

from dataclasses import dataclass, field
from typing import Annotated

from nemo_fp8rl.algorithms.loss_config import LossConfig
from nemo_fp8rl.common.field_rules import MAY_CHANGE, Block
from nemo_fp8rl.config.fp8rl_schema import Fp8RlConfig
from nemo_fp8rl.config.grpo_schema import GrpoConfig, SftConfig
from nemo_fp8rl.config.policy_schema import PolicyConfig
from nemo_fp8rl.config.run_schema import CheckpointingConfig, ClusterConfig, DataConfig, LoggerConfig


@dataclass(frozen=True)
class Config(Block):
    """A whole recipe."""

    policy: PolicyConfig
    data: DataConfig
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    loss_fn: LossConfig = field(default_factory=LossConfig)
    checkpointing: Annotated[CheckpointingConfig, MAY_CHANGE] = field(default_factory=CheckpointingConfig)
    logger: Annotated[LoggerConfig, MAY_CHANGE] = field(default_factory=LoggerConfig)
    cluster: Annotated[ClusterConfig, MAY_CHANGE] = field(default_factory=ClusterConfig)
    nemo_fp8rl: Fp8RlConfig = field(default_factory=Fp8RlConfig)

    @property
    def fp8_kv_cache(self) -> bool:
        return self.policy.generation.vllm_cfg.kv_cache_dtype == "fp8"

    @property
    def trainer_kv_window(self) -> int | None:
        """Generated tokens that a token sees in the trainer; None for all."""
        return self.policy.generation.vllm_cfg.kv_window if self.nemo_fp8rl.kv == "unified" else None

    @property
    def updates_in_flight(self) -> bool:
        """True where engines take new weights between two tokens of an answer."""
        return self.grpo.async_grpo.enabled and self.grpo.async_grpo.in_flight_weight_updates

    @property
    def num_cpus(self) -> int:
        """CPUs of all ranks and of the most engines, one a process."""
        engine = self.policy.generation.vllm_cfg.tensor_parallel_size
        return self.cluster.train_ranks + self.cluster.most_engines * engine

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model; each trains on its part of a batch."""
        parallel = self.policy.megatron_cfg
        model_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
        return self.cluster.train_ranks // (model_ranks * parallel.context_parallel_size)

    @property
    def rollout_batch_size(self) -> int:
        """Samples of a step: prompts times generations."""
        return self.grpo.num_prompts_per_step * self.grpo.num_generations_per_prompt

    @property
    def trained_batch_size(self) -> int:
        """Rows of a step that train: all samples, or as many as grpo.trajectory_sampling keeps."""
        if not self.grpo.trajectory_sampling.enabled:
            return self.rollout_batch_size
        return self.grpo.num_prompts_per_step * self.grpo.kept_pairs * 2
