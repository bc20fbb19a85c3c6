"""The blocks `checkpointing:`, `data:`, `logger:` and `cluster:` of a recipe: files, trackers and processes."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from nemo_fp8rl.common.field_rules import (
    ABOVE_0,
    AT_LEAST_0,
    FILE_PATH,
    MAY_CHANGE,
    NEMO_RL,
    NEMO_RL_LOOP,
    Block,
    EarlierRuns,
    MayChange,
    NotBlank,
    Range,
    reference,
)

FOLDER = NotBlank("name a folder")  # the empty text is the working directory, and below it the root of the disk
SAME_PROMPTS = MayChange("the digests of prompts, answers and tokens must stay the same")


@dataclass(frozen=True)
class CheckpointingConfig(Block):
    enabled: Annotated[bool, NEMO_RL_LOOP] = True
    """Save checkpoints."""
    checkpoint_dir: Annotated[str, FOLDER, FILE_PATH, NEMO_RL_LOOP] = "${logger.log_dir}/checkpoints"
    """Folder of the checkpoints."""
    save_period: Annotated[int, ABOVE_0, NEMO_RL_LOOP] = 10
    """Steps between checkpoints."""
    keep_top_k: Annotated[int | None, ABOVE_0, NEMO_RL_LOOP] = 2
    """Latest checkpoints to keep; null keeps all. This is NeMo RL's meaning under `metric_name: null`."""


@dataclass(frozen=True)
class TrainDataConfig(Block):
    data_path: Annotated[str, MAY_CHANGE, FILE_PATH, NEMO_RL_LOOP]
    """File of prompts and answers, or folder of a dataset. JSONL, a JSON array, either compressed; parquet or arrow."""
    input_key: Annotated[str | None, EarlierRuns(None), SAME_PROMPTS, NEMO_RL_LOOP, NotBlank("name a field")] = None
    """Field of the prompt; null is prompt, messages or conversations."""
    output_key: Annotated[str | None, EarlierRuns(None), SAME_PROMPTS, NEMO_RL_LOOP, NotBlank("name a field")] = None
    """Field of the answer; null is answer, or the last message of a conversation."""
    solution_key: Annotated[str | None, EarlierRuns(None), SAME_PROMPTS, NotBlank("name a field")] = None
    """Field of a reference solution, of which grpo.hints takes the beginning; null is solution (ours)."""
    split: Annotated[str | None, EarlierRuns(None), SAME_PROMPTS, NEMO_RL_LOOP] = None
    """Part of a folder that has several; null is train."""
    kind: Annotated[Literal["answers", "text"], EarlierRuns("answers")] = "answers"
    """answers: prompts with answers, or conversations. text: raw documents, on all of whose tokens `sft` trains (ours).
    Documents are in the field `text`, or in input_key."""
    split_validation_size: Annotated[float, NEMO_RL_LOOP] = 0.05
    """Share of prompts held out for validation. Equal prompts count once; it applies where data.validation is null."""
    seed: Annotated[int, NEMO_RL_LOOP] = 42
    """Seed of the split. It is separate, so that runs with other training seeds validate on the same prompts."""


@dataclass(frozen=True)
class ValidationDataConfig(Block):
    data_path: Annotated[str, MAY_CHANGE, FILE_PATH, NEMO_RL_LOOP]
    """File of prompts and answers, or folder of a dataset."""
    input_key: Annotated[str | None, EarlierRuns(None), SAME_PROMPTS, NEMO_RL_LOOP, NotBlank("name a field")] = (
        reference("${data.train.input_key}")
    )
    """Field of the prompt."""
    output_key: Annotated[str | None, EarlierRuns(None), SAME_PROMPTS, NEMO_RL_LOOP, NotBlank("name a field")] = (
        reference("${data.train.output_key}")
    )
    """Field of the answer."""
    split: Annotated[str | None, EarlierRuns(None), SAME_PROMPTS, NEMO_RL_LOOP] = None
    """Part of a folder that has several; null is train."""


@dataclass(frozen=True)
class DataDefaultConfig(Block):
    env_name: Annotated[str, NEMO_RL_LOOP] = "exact_match"
    """The reward: exact_match, math, or package.module:function of your own."""


@dataclass(frozen=True)
class DataConfig(Block):
    train: TrainDataConfig
    validation: ValidationDataConfig | None = None
    default: DataDefaultConfig = field(default_factory=DataDefaultConfig)


@dataclass(frozen=True)
class WandbConfig(Block):
    project: str = "nemo-fp8rl"
    """Name of the project."""
    name: str | None = None
    """Name of the run; null is the run directory."""


@dataclass(frozen=True)
class MlflowConfig(Block):
    experiment_name: str = "nemo-fp8rl"
    """Name of the experiment."""
    run_name: str | None = None
    """Name of the run; null is the run directory."""
    tracking_uri: str | None = None
    """Address of the server; null follows MLflow. It reads MLFLOW_TRACKING_URI, for instance."""


@dataclass(frozen=True)
class LoggerConfig(Block):
    """metrics.jsonl is always written; the same metrics go to the trackers that are enabled."""

    log_dir: Annotated[str, FOLDER, FILE_PATH, NEMO_RL] = "runs/default"
    """The run directory."""
    tensorboard_enabled: Annotated[bool, NEMO_RL_LOOP] = True
    """Write metrics for TensorBoard."""
    wandb_enabled: bool = False
    """Send metrics to W&B (pip install wandb)."""
    mlflow_enabled: bool = False
    """Send metrics to MLflow (pip install mlflow)."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)


@dataclass(frozen=True)
class ClusterConfig(Block):
    backend: Literal["in_process", "ray"] = "in_process"
    """Trainer and engine in this process, or as Ray actors."""
    train_ranks: Annotated[int, ABOVE_0] = 1
    """All trainer ranks (Ray): tensor x pipeline x context x data parallel."""
    generation_engines: Annotated[int, ABOVE_0] = 1
    """vLLM engines that share the prompts (Ray); with the next two keys, those at the start of a run."""
    max_generation_engines: Annotated[int | None, ABOVE_0] = None
    """Most engines to which a run may grow (`nemo-fp8rl engines`); null is generation_engines."""
    min_generation_engines: Annotated[int | None, ABOVE_0] = None
    """Fewest engines with which a run goes on while others are away; null is generation_engines. With
    more engines than that, a dead one is replaced in the background."""
    engine_timeout_seconds: Annotated[float, Range(above=0, below=1e6)] = 1800.0  # poll(2): milliseconds in 32 bits
    """Time after which a silent engine counts as dead. It is for one task or prompt; a prompt has 0.1 s more for
    each token of max_new_tokens. It also holds for training ranks in a refit, and under Ray for the start of a worker's
    process."""
    max_engine_restarts: Annotated[int, AT_LEAST_0] = 3
    """Dead engines that a run replaces. One more ends it, or stays away where min_generation_engines are left."""

    @property
    def most_engines(self) -> int:
        """The places for engines."""
        return self.max_generation_engines or self.generation_engines

    @property
    def least_engines(self) -> int:
        """The engines that must get prompts, or an engine is started again before anything goes on."""
        return self.min_generation_engines or self.generation_engines
