"""Convert a NeMo RL recipe for `nemo-fp8rl train`, the package's own loop.

`config_from_recipe` converts trainer and engine; this module adds the blocks grpo, data, checkpointing and logger. A
key that `train` does not support is refused if it would change a number, and reported if not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.field_rules import NemoRl, fields_of
from nemo_fp8rl.config.grpo_schema import GrpoConfig
from nemo_fp8rl.config.recipe import complete
from nemo_fp8rl.config.run_schema import CheckpointingConfig, LoggerConfig
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.config.yaml_tree import register_resolvers
from nemo_fp8rl.data.prompts import load_prompts
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.nemo_rl.recipe.config_from_recipe import complete_for_model, convert_keys
from nemo_fp8rl.nemo_rl.recipe.keys import at
from nemo_fp8rl.nemo_rl.recipe.read_recipe import load_recipe
from nemo_fp8rl.nemo_rl.recipe.recipe_checks import check_launcher

COPIED_KEYS = {
    block: tuple(field.name for field in fields_of(kind) if (marker := field.marker(NemoRl)) and not marker.spelling)
    for block, kind in (("grpo", GrpoConfig), ("checkpointing", CheckpointingConfig), ("logger", LoggerConfig))
}
"""Block -> its keys that carry `NEMO_RL` or `NEMO_RL_LOOP` at the field."""
NULLABLE_KEYS = ("max_val_samples", "keep_top_k")
"""Keys whose null means "no limit"."""
OTHER_GRPO_KEYS = {
    *("max_num_epochs", "val_batch_size", "val_start_at", "calculate_advantages_on_gpu", "async_grpo"),
    *("skip_reference_policy_logprobs_calculation", "stop_at_validation_threshold"),
}
REQUIRED_VALUES = {
    "grpo.max_rollout_turns": (1, "conversations of several turns are not supported"),
    "grpo.batch_multiplier": (1, "a step asks for exactly num_prompts_per_step prompts"),
    "grpo.val_num_generations_per_prompt": (1, "validation takes one answer of each prompt"),
    "grpo.async_grpo.enabled": (False, "generation and training take turns"),
    "grpo.reward_scaling.enabled": (False, "rewards are not scaled"),
    "grpo.advantage_clip_low": (None, "advantages are not clipped"),
    "grpo.advantage_clip_high": (None, "advantages are not clipped"),
    "data.use_multiple_dataloader": (False, "there is one stream of prompts"),
    "data.shuffle": (True, "prompts are shuffled anew in every epoch"),
    "env.math.math_verify_impl": ("hf_math_verify", "rewards follow math-verify's own rules"),
    "policy.tokenizer.chat_template": (None, "the template is the tokenizer's own"),
}
"""Key -> (the only value that `train` supports, the reason)."""
MAX_INPUT_LENGTH = "data.max_input_seq_length"
IGNORED_KEYS = {
    "checkpointing.metric_name": "the latest checkpoints are kept, not the best",
    "checkpointing.checkpoint_must_save_by": "a run ends after its steps or on a signal, not at a time",
    "checkpointing.ft_save_period": "checkpoints are saved by save_period alone",
    "checkpointing.ft_keep_latest_k": "keep_top_k says how many checkpoints are kept",
    "logger.wandb_enabled": "metrics go to files and to TensorBoard",
    "logger.swanlab_enabled": "metrics go to files and to TensorBoard",
    "logger.mlflow_enabled": "metrics go to files and to TensorBoard",
    "grpo.stop_at_validation_threshold": "a run takes all its steps, however well it validates",
    "grpo.val_start_at": "validation starts at the first val_period",
}
"""Keys that change no number of training, and what `train` does instead."""


def load_for_train(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a NeMo RL recipe as `nemo-fp8rl train` runs it.

    Raises: UserError, with the key, if `train` does not support a value
    """
    recipe = load_recipe(path, overrides).values
    for key, instead in IGNORED_KEYS.items():
        if value := at(recipe, key, None):
            print(f"nemo-fp8rl: {key}={value} has no effect in `nemo-fp8rl train`: {instead}", flush=True)
    cfg = complete_for_model(convert_keys_for_train(path, recipe))
    prompts = load_prompts(cfg, read_hf_config(cfg.policy.model_name).vocab_size).train
    epochs = recipe["grpo"]["max_num_epochs"] * (len(prompts) // cfg.grpo.num_prompts_per_step)
    steps = min(cfg.grpo.max_num_steps, epochs)
    recipe["grpo"]["max_num_steps"] = recipe["policy"]["megatron_cfg"]["train_iters"] = steps  # as NeMo RL's setup does
    return complete_for_model(convert_keys_for_train(path, recipe))


def convert_keys_for_train(path: Path, recipe: Mapping[str, Any]) -> Config:
    """Convert the recipe's values without reading the model's files or the data. path: named in errors."""
    for key, (required, why) in REQUIRED_VALUES.items():
        if (value := at(recipe, key, required)) not in (required, None):
            fix = f"{key}={'null' if required is None else required}"
            raise UserError(f"{key}={value}: in `nemo-fp8rl train` {why}; use `nemo-fp8rl nemo`, or set {fix}")
    checked = (key.removeprefix("grpo.") for key in REQUIRED_VALUES if key.startswith("grpo."))
    known = {*COPIED_KEYS["grpo"], *OTHER_GRPO_KEYS, *(name.partition(".")[0] for name in checked)}
    for name, value in recipe["grpo"].items():
        if value and name not in known:
            raise UserError(f"grpo.{name}={value!r}: `nemo-fp8rl train` has no such key; use `nemo-fp8rl nemo`")
    check_launcher(recipe)
    cfg = convert_keys(recipe)
    train_blocks: dict[str, Any] = {"data": _convert_data(recipe["data"])}
    _check_length(recipe)
    generation, tree = recipe["policy"]["generation"], asdict(cfg)
    if generation.get("temperature") is not None:  # NeMo RL validates at this temperature, too
        tree["policy"]["generation"]["val_temperature"] = generation["temperature"]
    for block, names in COPIED_KEYS.items():
        train_blocks[block] = {
            name: recipe[block].get(name)
            for name in names
            if name in NULLABLE_KEYS or recipe[block].get(name) is not None
        }
    register_resolvers()
    tree |= train_blocks
    return complete(str(path), tree, tree)


def _check_length(recipe: Mapping[str, Any]) -> None:
    """Refuse a limit on prompts below the engine's: NeMo RL does not train on longer prompts, `train` drops them."""
    longest = at(recipe, MAX_INPUT_LENGTH, None)
    limit = at(recipe, "policy.generation.vllm_cfg.max_model_len", None)
    if longest is not None and limit is not None and longest < limit:
        raise UserError(
            f"{MAX_INPUT_LENGTH}={longest}: `nemo-fp8rl train` takes prompts of up to policy.generation.vllm_cfg."
            f"max_model_len={limit}; use `nemo-fp8rl nemo`, or set it to that or to null"
        )


def _convert_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the block data to JSONL files of `prompt` and `answer`; keys of a set override those of data.default."""
    default = data.get("default") or {}
    verifiers: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name in ("train", "validation"):
        if (keys_of_set := data.get(name)) is None:
            continue
        if not isinstance(keys_of_set, Mapping):
            raise UserError(f"data.{name} is a list: `nemo-fp8rl train` reads one file; use `nemo-fp8rl nemo`")
        block = {**default, **keys_of_set}
        columns = (block.get("input_key", "input"), block.get("output_key", "output"))
        if block.get("dataset_name", "ResponseDataset") != "ResponseDataset" or not block.get("data_path"):
            raise UserError(
                f"data.{name}: `nemo-fp8rl train` reads a JSONL file: set data_path, or use `nemo-fp8rl nemo`"
            )
        if columns != ("prompt", "answer"):
            raise UserError(
                f"data.{name}: `nemo-fp8rl train` reads input_key=prompt and output_key=answer, got {columns[0]} and "
                f"{columns[1]}"
            )
        for file in ("prompt_file", "system_prompt_file"):
            if block.get(file) is not None:
                raise UserError(
                    f"data.{name}: {file}={block[file]}, and `nemo-fp8rl train` takes prompts from the JSONL file "
                    "alone; use `nemo-fp8rl nemo`, or set it to null"
                )
        verifiers[name] = block.get("env_name") or "exact_match"
        names = ("data_path", "split_validation_size", "seed") if name == "train" else ("data_path",)
        values[name] = {key: block[key] for key in names if key in block}
    if len(set(verifiers.values())) > 1:
        raise UserError(
            f"data.train has env_name={verifiers['train']} and data.validation {verifiers['validation']}: `nemo-fp8rl "
            "train` has one verifier; use `nemo-fp8rl nemo`, or set them alike"
        )
    return values | {"default": {"env_name": next(iter(verifiers.values()), "exact_match")}}
