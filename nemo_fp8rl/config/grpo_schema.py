"""The blocks `grpo:` and `sft:` of a recipe: how many prompts and steps, and how rewards become advantages."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from nemo_fp8rl.common.field_rules import (
    ABOVE_0,
    AT_LEAST_0,
    MAY_CHANGE,
    NEMO_RL,
    NEMO_RL_LOOP,
    Block,
    EarlierRuns,
    MayChange,
    Range,
    reference,
)

SEED = Range(at_least=0, below=2**32)  # the engine hands it to numpy


@dataclass(frozen=True)
class AdvEstimatorConfig(Block):
    name: Literal["grpo", "reinforce_plus_plus"] = "grpo"
    """The estimator. grpo is RLOO with normalize_rewards: false and use_leave_one_out_baseline: true."""
    normalize_rewards: bool = reference("${grpo.normalize_rewards}")
    """Divide by the deviation of the group (grpo)."""
    use_leave_one_out_baseline: bool = reference("${grpo.use_leave_one_out_baseline}")
    """Compare with the others of the group (grpo)."""
    minus_baseline: bool = True
    """Subtract the prompt's mean reward (reinforce_plus_plus)."""


@dataclass(frozen=True)
class RewardShapingConfig(Block):
    enabled: bool = False
    """Lower the rewards of long or truncated answers (DAPO)."""
    overlong_buffer_length: int | None = 128
    """Tokens in which the penalty grows. It has its maximum at max_response_length."""
    overlong_buffer_penalty: float | None = 1.0
    """Maximum of the penalty."""
    max_response_length: int | None = reference("${policy.max_total_sequence_length}")
    """Tokens from which the maximum applies."""
    stop_properly_penalty_coef: Annotated[float | None, Range(at_least=0, at_most=1)] = None
    """Factor of the rewards of truncated answers, instead of the penalty."""


@dataclass(frozen=True)
class AsyncGrpoConfig(Block):
    """Generation while the trainer trains (NeMo RL's keys)."""

    enabled: Annotated[bool, EarlierRuns(False), NEMO_RL] = False
    """Generate answers with older weights while the trainer takes a step."""
    max_trajectory_age_steps: Annotated[int, Range(at_least=1, at_most=100), EarlierRuns(1), NEMO_RL] = 1
    """Steps by which answers may be older than the trainer. So many steps ahead prompts are asked."""
    in_flight_weight_updates: Annotated[bool, EarlierRuns(False), NEMO_RL] = False
    """Refit engines without waiting for answers in progress, which go on with the new weights. Every token is labelled
    with the version it was sampled from. This needs policy.generation.vllm_cfg.async_engine."""
    recompute_kv_cache_after_weight_updates: Annotated[bool, EarlierRuns(False), NEMO_RL] = False
    """Compute the keys and values of answers in progress again with the new weights. Otherwise those of the old weights
    stay."""


@dataclass(frozen=True)
class TrajectorySamplingConfig(Block):
    """Which answers of a step train, and how often (ours; Shuffle-R1, arXiv 2508.05612)."""

    keep_pairs: Annotated[float, Range(above=0, at_most=1), EarlierRuns(1.0)] = 1.0
    """Share of the pairs of a group that train (ours). The best answer by its advantage is the partner of the worst,
    the second best of the second worst, and so on; the first pairs are kept. 1 keeps all. The paper takes 0.5 of 16
    answers."""
    shuffle_rounds: Annotated[
        int, Range(at_least=2, or_value=0, hint="0 draws nothing, and one round would draw every pair"), EarlierRuns(0)
    ] = 0
    """Rounds that draw the step's batch from the kept pairs, with chances by their advantages (ours). The batch keeps
    its number of rows. Pairs without an advantage do not train, others up to once a round. 0 trains every kept answer
    once. The paper takes 8."""

    @property
    def enabled(self) -> bool:
        return self.keep_pairs < 1 or self.shuffle_rounds > 0


@dataclass(frozen=True)
class HintsConfig(Block):
    """Beginnings of reference solutions for prompts that the policy never answers (ours; GHPO, arXiv 2507.10628)."""

    enabled: Annotated[bool, EarlierRuns(False)] = False
    """Ask prompts without a right answer again, with the beginning of a solution (ours). None is right where the
    verifier gives all of them 0 or less. The answers to the last question train, as answers to the prompt with its
    hint. Validation has no hints."""
    shares: Annotated[tuple[float, ...], EarlierRuns((0.25, 0.5, 0.75))] = (0.25, 0.5, 0.75)
    """Shares of the solution's tokens, one after another until an answer is right (ours)."""
    start_step: Annotated[int, AT_LEAST_0, EarlierRuns(0)] = 0
    """Steps at the start of the run that have no hints (ours)."""
    template: Annotated[str, EarlierRuns("{prompt}\n\nA solution begins as follows:\n{hint}")] = (
        "{prompt}\n\nA solution begins as follows:\n{hint}"
    )
    """Question and hint in the user's message (ours). The chat template comes after it. A conversation that does not
    end with a user's message has no hint."""


@dataclass(frozen=True)
class GrpoConfig(Block):
    num_prompts_per_step: Annotated[int, ABOVE_0, NEMO_RL] = 32
    """Prompts of a step."""
    num_generations_per_prompt: Annotated[
        int, Range(at_least=2, hint="one sample has no group to compare with"), NEMO_RL
    ] = 16
    """Answers of a prompt, which are its group."""
    max_num_steps: Annotated[int, ABOVE_0, MAY_CHANGE, NEMO_RL] = 100
    """Steps of the run."""
    max_num_epochs: Annotated[int | None, ABOVE_0, MAY_CHANGE, NEMO_RL_LOOP] = None
    """Epochs after which a run ends that has not ended before; null sets no limit. An epoch has as many whole steps as
    the prompts fill."""
    normalize_rewards: Annotated[bool, NEMO_RL_LOOP] = True
    """Default of adv_estimator.normalize_rewards."""
    use_leave_one_out_baseline: Annotated[bool, NEMO_RL_LOOP] = False
    """Default of adv_estimator.use_leave_one_out_baseline."""
    adv_estimator: Annotated[AdvEstimatorConfig, NEMO_RL_LOOP] = field(default_factory=AdvEstimatorConfig)
    use_dynamic_sampling: Annotated[bool, NEMO_RL_LOOP] = False
    """Ask on until rewards differ in each group (DAPO). Further prompts replace groups with equal rewards."""
    dynamic_sampling_max_gen_batches: Annotated[
        int, ABOVE_0, MayChange("a run that found too little signal can go on"), NEMO_RL_LOOP
    ] = 10
    """Generation rounds after which dynamic sampling fails."""
    overlong_filtering: Annotated[bool, NEMO_RL_LOOP] = False
    """Leave truncated answers out of the loss."""
    reward_shaping: Annotated[RewardShapingConfig, NEMO_RL_LOOP] = field(default_factory=RewardShapingConfig)
    trajectory_sampling: TrajectorySamplingConfig = field(default_factory=TrajectorySamplingConfig)
    hints: HintsConfig = field(default_factory=HintsConfig)
    val_period: Annotated[int, AT_LEAST_0, MAY_CHANGE, NEMO_RL_LOOP] = 10
    """Steps between validations; 0 never validates."""
    val_at_start: Annotated[bool, MAY_CHANGE, NEMO_RL_LOOP] = True
    """Validate before the first step."""
    val_at_end: Annotated[bool, MAY_CHANGE, NEMO_RL_LOOP] = True
    """Validate after the last step."""
    max_val_samples: Annotated[int | None, ABOVE_0, NEMO_RL_LOOP] = 256
    """Validation prompts; null takes all."""
    seed: Annotated[int, SEED, NEMO_RL] = 42
    """Seed of prompts' order and of sampling."""
    async_grpo: AsyncGrpoConfig = field(default_factory=AsyncGrpoConfig)

    @property
    def kept_pairs(self) -> int:
        """Pairs of a group that train with trajectory_sampling."""
        return round(self.trajectory_sampling.keep_pairs * (self.num_generations_per_prompt // 2))


@dataclass(frozen=True)
class SftConfig(Block):
    """Supervised training (`nemo-fp8rl sft`). A step takes policy.train_global_batch_size examples."""

    max_num_steps: Annotated[int, ABOVE_0, MAY_CHANGE] = 200
    """Steps of the run."""
    max_num_epochs: Annotated[int | None, ABOVE_0, MAY_CHANGE] = None
    """Epochs after which a run ends that has not ended before; null sets no limit. An epoch has as many whole steps as
    the examples fill."""
    val_period: Annotated[int, AT_LEAST_0, MAY_CHANGE] = 10
    """Steps between measurements of the held-out loss; 0 never measures it on the way."""
    val_at_start: Annotated[bool, MAY_CHANGE] = True
    """Measure before the first step."""
    val_at_end: Annotated[bool, MAY_CHANGE] = True
    """Measure after the last step."""
    val_batches: Annotated[int, AT_LEAST_0, MAY_CHANGE] = 8
    """Batches of a measurement; 0 takes all held-out examples."""
    val_global_batch_size: Annotated[int, ABOVE_0, MAY_CHANGE] = 32
    """Examples of such a batch."""
    seed: Annotated[int, AT_LEAST_0] = 42
    """Seed of the order of its samples."""
