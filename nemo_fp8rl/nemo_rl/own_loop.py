"""A NeMo RL recipe for our own loop: what its blocks grpo, data, checkpointing and logger say, as `config.from_nemo_rl`
does for the rest. A key that our loop has no like of is refused where it would change a number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_fp8rl.config import Config
from nemo_fp8rl.data.prompts import load_prompts
from nemo_fp8rl.errors import UserError
from nemo_fp8rl.hf.config import read_hf_config
from nemo_fp8rl.nemo_rl.checks import check_not_elsewhere
from nemo_fp8rl.nemo_rl.config import for_model, of_keys
from nemo_fp8rl.nemo_rl.keys import at
from nemo_fp8rl.nemo_rl.recipe import load
from nemo_fp8rl.recipe import completed
from nemo_fp8rl.yaml_tree import register_resolvers

COPIED = {
    "grpo": (
        *("num_prompts_per_step", "num_generations_per_prompt", "max_num_steps", "seed", "normalize_rewards"),
        *("use_leave_one_out_baseline", "adv_estimator", "use_dynamic_sampling", "dynamic_sampling_max_gen_batches"),
        *("overlong_filtering", "reward_shaping", "val_period", "val_at_start", "val_at_end", "max_val_samples"),
    ),
    "checkpointing": ("enabled", "checkpoint_dir", "save_period", "keep_top_k"),
    "logger": ("log_dir", "tensorboard_enabled"),
}
USED_OR_UNUSED = {
    *("max_num_epochs", "val_batch_size", "val_start_at", "calculate_advantages_on_gpu", "async_grpo"),
    *("skip_reference_policy_logprobs_calculation", "stop_at_validation_threshold"),
}
REQUIRED = {
    "grpo.max_rollout_turns": (1, "it has no conversations of several turns"),
    "grpo.batch_multiplier": (1, "it asks for as many prompts as a step has"),
    "grpo.val_num_generations_per_prompt": (1, "it validates on one answer each"),
    "grpo.async_grpo.enabled": (False, "it takes turns"),
    "grpo.reward_scaling.enabled": (False, "it takes rewards as they are"),
    "data.use_multiple_dataloader": (False, "it has one stream of prompts"),
    "data.default.prompt_file": (None, "prompts are the file's"),
    "data.default.system_prompt_file": (None, "prompts are the file's"),
    "policy.tokenizer.chat_template": (None, "the template is the tokenizer's own"),
}


def load_for_own_loop(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The recipe as `nemo-fp8rl train` runs it. Raises UserError, naming the key, where our loop would do otherwise."""
    recipe = load(path, overrides).values
    cfg = for_model(of_keys_for_own_loop(path, recipe))
    prompts = load_prompts(cfg, read_hf_config(cfg.policy.model_name).vocab_size).train
    epochs = recipe["grpo"]["max_num_epochs"] * (len(prompts) // cfg.grpo.num_prompts_per_step)
    steps = min(cfg.grpo.max_num_steps, epochs)
    recipe["grpo"]["max_num_steps"] = recipe["policy"]["megatron_cfg"]["train_iters"] = steps  # as NeMo RL's setup does
    return for_model(of_keys_for_own_loop(path, recipe))


def of_keys_for_own_loop(path: Path, recipe: Mapping[str, Any]) -> Config:
    """What the keys alone say, without the model's files and the data. recipe: the values of the one at `path`."""
    for key, (value, why) in REQUIRED.items():
        if (given := at(recipe, key, value)) != value:
            raise UserError(f"{key}={given}: {why} in our own loop; use `nemo-fp8rl nemo`, or set it otherwise")
    known = {*COPIED["grpo"], *USED_OR_UNUSED, *(key.split(".")[1] for key in REQUIRED if key.startswith("grpo."))}
    for name, given in recipe["grpo"].items():
        if given and name not in known:
            raise UserError(f"grpo.{name}={given!r}: our own loop has no such thing; use `nemo-fp8rl nemo`")
    check_not_elsewhere(recipe)
    cfg = of_keys(recipe)
    values: dict[str, Any] = {"data": _data(recipe["data"])}
    for block, names in COPIED.items():
        values[block] = {name: recipe[block][name] for name in names if recipe[block].get(name) is not None}
    register_resolvers()
    return completed(str(path), asdict(cfg) | values, values)


def _data(given: Mapping[str, Any]) -> dict[str, Any]:
    """JSONL files of `prompt` and `answer`: what our loop reads."""
    usual = given.get("default") or {}
    values: dict[str, Any] = {"default": {"env_name": usual.get("env_name", "exact_match")}}
    for name in ("train", "validation"):
        if (own := given.get(name)) is None:
            continue
        if not isinstance(own, Mapping):
            raise UserError(f"data.{name} is a list: our own loop reads one file; use `nemo-fp8rl nemo`")
        block = {**usual, **own}
        keys = (block.get("input_key", "input"), block.get("output_key", "output"))
        if block.get("dataset_name", "ResponseDataset") != "ResponseDataset" or not block.get("data_path"):
            raise UserError(f"data.{name}: our own loop reads a JSONL file: set data_path, or use `nemo-fp8rl nemo`")
        if keys != ("prompt", "answer"):
            raise UserError(
                f"data.{name}: our own loop reads input_key=prompt and output_key=answer, here they are {keys[0]} and "
                f"{keys[1]}"
            )
        names = ("data_path", "split_validation_size", "seed") if name == "train" else ("data_path",)
        values[name] = {key: block[key] for key in names if key in block}
    return values
