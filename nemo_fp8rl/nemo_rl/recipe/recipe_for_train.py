"""Convert a NeMo RL recipe for `nemo-fp8rl train`, the package's own loop.

`config_from_recipe` converts trainer and engine; this module adds the blocks grpo, data, checkpointing and logger. A
key that `train` does not support is refused if it would change a number, and reported if not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_fp8rl.batch import Prompt
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.field_rules import NemoRl, fields_of
from nemo_fp8rl.config.grpo_schema import GrpoConfig
from nemo_fp8rl.config.recipe import complete
from nemo_fp8rl.config.run_schema import CheckpointingConfig, LoggerConfig
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.config.yaml_tree import register_resolvers
from nemo_fp8rl.data.dataset import read_first_row
from nemo_fp8rl.data.prompts import load_prompts
from nemo_fp8rl.data.records import FieldNames
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.nemo_rl.recipe.checkout import find_checkout
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
DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {
        **{"normalize_rewards": True, "use_leave_one_out_baseline": True, "val_period": 10, "val_at_start": False},
        **{"val_at_end": False, "max_val_samples": 256, "dynamic_sampling_max_gen_batches": 10, "seed": 42},
    },
    "grpo.adv_estimator": {"normalize_rewards": True, "use_leave_one_out_baseline": True, "minus_baseline": True},
    "grpo.reward_shaping": {
        name: None for name in ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length")
    },
}
"""NeMo RL's values of keys that a recipe leaves out, where this package has others or might get others."""
OTHER_GRPO_KEYS = {
    *("val_batch_size", "val_start_at", "calculate_advantages_on_gpu", "async_grpo"),
    *("skip_reference_policy_logprobs_calculation", "stop_at_validation_threshold", "stop_at_validation_metric"),
    *("debug_payload_metrics",),
}
REQUIRED_VALUES = {
    "grpo.max_rollout_turns": (1, "conversations of several turns are not supported"),
    "grpo.batch_multiplier": (1, "a step asks for exactly num_prompts_per_step prompts"),
    "grpo.val_num_generations_per_prompt": (1, "validation takes one answer of each prompt"),
    "grpo.reward_scaling.enabled": (False, "rewards are not scaled"),
    "grpo.advantage_clip_low": (None, "advantages are not clipped"),
    "grpo.advantage_clip_high": (None, "advantages are not clipped"),
    "data.use_multiple_dataloader": (False, "there is one stream of prompts"),
    "data.shuffle": (True, "prompts are shuffled anew in every epoch"),
    "env.math.math_verify_impl": ("hf_math_verify", "rewards follow math-verify's own rules"),
    "env.math.verifier_type": ("math", "answers are compared by math-verify"),
    "env.math.stop_strings": (None, "an answer ends by policy.generation.stop_strings alone"),
}
"""Key -> (the only value that `train` supports, the reason)."""
REWARDS = {"math": "hf_math_verify", "exact_match": "exact_match"}
"""NeMo RL's environment -> the verifier of this package that gives the same rewards."""
PROCESSORS = ("default", "math_hf_data_processor")
"""NeMo RL's processors that make a user's message of the prompt, as `train` does."""
IGNORED_DATASET_KEYS = {"dataset_name", "env_name", "processor", "num_workers", "download_dir", "subset"}
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
    convert_keys_for_train(path, recipe)  # a key is refused before a file is read
    _prefer_messages(recipe["data"])
    cfg = complete_for_model(convert_keys_for_train(path, recipe))
    prompts = load_prompts(cfg, read_hf_config(cfg.policy.model_name).vocab_size)
    for prompt in (*prompts.train, *prompts.validation):
        _check_prompt(prompt)
    steps = prompts.limit_steps(cfg)[0].grpo.max_num_steps
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
        is_set = value is not None and value is not False and value != {}
        if is_set and name not in known:
            raise UserError(f"grpo.{name}={value!r}: `nemo-fp8rl train` has no such key; use `nemo-fp8rl nemo`")
    for name, value in (recipe.get("reward_penalties") or {}).items():
        if value:
            raise UserError(f"reward_penalties.{name}={value!r}: `nemo-fp8rl train` has none; set it to false")
    check_launcher(recipe)
    _check_shaping(recipe)
    cfg = convert_keys(recipe)
    train_blocks: dict[str, Any] = {"data": _convert_data(recipe["data"])}
    _check_length(recipe)
    generation, tree = recipe["policy"]["generation"], asdict(cfg)
    if generation.get("temperature") is not None:  # NeMo RL validates at this temperature, too
        tree["policy"]["generation"]["val_temperature"] = generation["temperature"]
    tree["policy"]["megatron_cfg"]["scheduler"]["per_rollout"] = True
    tokenizer = recipe["policy"].get("tokenizer") or {}
    if "chat_template" in tokenizer:  # NeMo RL's null is no template, and an absent key is the tokenizer's own
        tree["policy"]["tokenizer"]["chat_template"] = tokenizer["chat_template"]
    for block, names in COPIED_KEYS.items():
        values = {**DEFAULTS.get(block, {}), **recipe[block]}
        train_blocks[block] = {
            name: values.get(name) for name in names if name in NULLABLE_KEYS or values.get(name) is not None
        }
    grpo = train_blocks["grpo"]
    for name in ("adv_estimator", "reward_shaping"):
        grpo[name] = {**_defaults_of(recipe, name), **(recipe["grpo"].get(name) or {})}
    grpo["adv_estimator"].pop("reward_weights", None)  # of several rewards, which no estimator here has
    grpo["async_grpo"] = asdict(cfg.grpo.async_grpo)
    grpo["max_val_samples"] = _count_validation_samples(recipe["grpo"], grpo["max_val_samples"])
    register_resolvers()
    tree |= train_blocks
    return complete(str(path), tree, tree)


def _defaults_of(recipe: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return NeMo RL's values of the keys that this block leaves out; v0.7.0 takes an absent estimator from grpo."""
    values = DEFAULTS[f"grpo.{name}"]
    if name == "adv_estimator" and recipe["grpo"].get(name) is None and find_checkout().takes_estimator_from_grpo:
        keys = {"normalize_rewards": True, "use_leave_one_out_baseline": False}
        return {**values, **{key: recipe["grpo"].get(key, default) for key, default in keys.items()}}
    return values


def _count_validation_samples(grpo: Mapping[str, Any], most: int | None) -> int | None:
    """Return how many prompts NeMo RL validates on: whole batches of val_batch_size. Raises UserError for none."""
    size = grpo.get("val_batch_size", 256)
    if most is None or size is None:
        return most
    if not isinstance(size, int) or size < 1 or most < size:
        raise UserError(
            f"grpo.max_val_samples={most} is below grpo.val_batch_size={size}, so NeMo RL would validate on no prompt: "
            "lower val_batch_size"
        )
    return most // size * size


def _check_shaping(recipe: Mapping[str, Any]) -> None:
    """Refuse what NeMo RL computes otherwise: its penalty grows beyond the longest answer, its RLOO drops samples."""
    longest = at(recipe, "grpo.reward_shaping.max_response_length", None)
    new_tokens = at(recipe, "policy.generation.max_new_tokens", None)
    is_soft = at(recipe, "grpo.reward_shaping.stop_properly_penalty_coef", None) is None
    if at(recipe, "grpo.reward_shaping.enabled", False) and is_soft and longest and new_tokens and longest < new_tokens:
        raise UserError(
            f"grpo.reward_shaping.max_response_length={longest} is below policy.generation.max_new_tokens="
            f"{new_tokens}: NeMo RL's penalty grows beyond it, that of `nemo-fp8rl train` does not; set them alike, or "
            "use `nemo-fp8rl nemo`"
        )
    leave_one_out = recipe["grpo"].get("use_leave_one_out_baseline", DEFAULTS["grpo"]["use_leave_one_out_baseline"])
    if recipe["grpo"].get("use_dynamic_sampling") and leave_one_out:
        raise UserError(
            "grpo.use_dynamic_sampling=true with grpo.use_leave_one_out_baseline=true: NeMo RL drops single samples, "
            "`nemo-fp8rl train` whole groups; set use_leave_one_out_baseline to false, or use `nemo-fp8rl nemo`"
        )


def _check_prompt(prompt: Prompt) -> None:
    """Refuse a conversation that NeMo RL reads otherwise: the first message is its prompt, the second its answer."""
    messages = prompt.fields["prompt"]
    if not isinstance(messages, list):
        return
    roles = [message["role"] for message in messages]
    if roles != ["user"] or prompt.fields.get("tools") or "messages" not in prompt.fields:
        raise UserError(
            f"{prompt.place}: NeMo RL reads a user's message and an assistant's from `messages`, without tools, and "
            "this is another conversation; use a recipe of `nemo-fp8rl train`"
        )


def _prefer_messages(data: dict[str, Any]) -> None:
    """Make `messages` the input where a dataset has that field: NeMo RL then reads neither input_key nor output_key."""
    for name in ("train", "validation"):
        block = {**(data.get("default") or {}), **data[name]} if isinstance(data.get(name), Mapping) else {}
        if path := block.get("data_path"):
            names = FieldNames(f"data.{name}")
            if "messages" in read_first_row(path, names, block.get("split")):
                data[name] |= {"input_key": "messages", "output_key": None}


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
    """Convert the block data to files of prompts and answers; keys of a set override those of data.default."""
    default = data.get("default") or {}
    rewards: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name in ("train", "validation"):
        if (keys_of_set := data.get(name)) is None:
            continue
        if not isinstance(keys_of_set, Mapping):
            raise UserError(f"data.{name} is a list: `nemo-fp8rl train` reads one file; use `nemo-fp8rl nemo`")
        block = {**default, **keys_of_set}
        _check_dataset(name, block)
        rewards[name] = str(block.get("env_name"))
        reward = _reward_name(name, block)
        values[name] = {
            "data_path": block["data_path"],
            "input_key": block.get("input_key", "input"),
            "output_key": block.get("output_key", "output"),
            "split": block.get("split"),
        }
    if len(set(rewards.values())) > 1:
        raise UserError(
            f"data.train has env_name={rewards['train']} and data.validation {rewards['validation']}: `nemo-fp8rl "
            "train` has one verifier; use `nemo-fp8rl nemo`, or set them alike"
        )
    if "train" not in values:
        raise UserError("data.train is missing; give the file of the prompts")
    train = {**default, **data["train"]}
    share = train.get("split_validation_size", 0)
    if data.get("validation") is None:
        if not share:
            raise UserError(
                "data.validation is not set and data.train.split_validation_size is 0, so NeMo RL has nothing to "
                "validate on: set one of them for `nemo-fp8rl train`, or run NeMo RL's own loop with `nemo-fp8rl nemo`"
            )
        if share >= 1:
            raise UserError(
                f"data.train.split_validation_size={share} is a number of samples in NeMo RL; `nemo-fp8rl train` takes "
                "a share between 0 and 1"
            )
        values["train"] |= {"split_validation_size": share, "seed": train.get("seed", 42)}
    elif share:
        raise UserError(
            f"data.train.split_validation_size={share} beside data.validation: NeMo RL validates on both, `nemo-fp8rl "
            "train` on data.validation alone; set it to 0"
        )
    return values | {"default": {"env_name": reward}}


def _check_dataset(name: str, block: Mapping[str, Any]) -> None:
    """Raise UserError, with the key, for a dataset that `train` reads otherwise than NeMo RL, or not at all."""
    if block.get("dataset_name", "ResponseDataset") != "ResponseDataset" or not block.get("data_path"):
        raise UserError(f"data.{name}: `nemo-fp8rl train` reads a JSONL file: set data_path, or use `nemo-fp8rl nemo`")
    for file in ("prompt_file", "system_prompt_file"):
        if block.get(file) is not None:
            raise UserError(
                f"data.{name}: {file}={block[file]}, and `nemo-fp8rl train` takes prompts from the JSONL file alone; "
                "use `nemo-fp8rl nemo`, or set it to null"
            )
    if (processor := block.get("processor", "default")) not in PROCESSORS:
        raise UserError(
            f"data.{name}.processor={processor}: `nemo-fp8rl train` makes prompts as {' or '.join(PROCESSORS)} does; "
            "use `nemo-fp8rl nemo`, or set it to that"
        )
    read = {"data_path", "input_key", "output_key", "split", "split_validation_size", "seed"}
    for key, value in block.items():
        if value is not None and key not in {*read, *IGNORED_DATASET_KEYS, "prompt_file", "system_prompt_file"}:
            raise UserError(f"data.{name}.{key}={value!r}: `nemo-fp8rl train` has no such key; use `nemo-fp8rl nemo`")
    if block.get("subset") is not None:
        raise UserError(f"data.{name}.subset={block['subset']}: give data_path the folder of the subset instead")


def _reward_name(name: str, block: Mapping[str, Any]) -> str:
    """Return the reward that gives what NeMo RL's environment gives. Raises UserError for other environments."""
    env_name = block.get("env_name")
    if env_name is None:
        raise UserError(f"data.{name}.env_name is missing; set it to math, exact_match or package.module:function")
    if ":" in str(env_name):
        return str(env_name)
    if env_name not in REWARDS:
        raise UserError(
            f"data.{name}.env_name={env_name}: `nemo-fp8rl train` has the rewards {', '.join(REWARDS)} and "
            "package.module:function; use `nemo-fp8rl nemo`"
        )
    return REWARDS[env_name]
