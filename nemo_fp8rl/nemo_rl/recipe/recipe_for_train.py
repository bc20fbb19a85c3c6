"""A NeMo RL recipe for our own loop: what its blocks grpo, data, checkpointing and logger say, as `config.from_nemo_rl`
does for the rest. A key that our loop has no like of is refused where it would change a number, and said where not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import completed
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.config.yaml_tree import register_resolvers
from nemo_fp8rl.data.prompts import load_prompts
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.nemo_rl.recipe.config_from_recipe import for_model, of_keys
from nemo_fp8rl.nemo_rl.recipe.keys import at
from nemo_fp8rl.nemo_rl.recipe.read_recipe import load
from nemo_fp8rl.nemo_rl.recipe.recipe_checks import check_not_elsewhere

COPIED = {
    "grpo": (
        *("num_prompts_per_step", "num_generations_per_prompt", "max_num_steps", "seed", "normalize_rewards"),
        *("use_leave_one_out_baseline", "adv_estimator", "use_dynamic_sampling", "dynamic_sampling_max_gen_batches"),
        *("overlong_filtering", "reward_shaping", "val_period", "val_at_start", "val_at_end", "max_val_samples"),
    ),
    "checkpointing": ("enabled", "checkpoint_dir", "save_period", "keep_top_k"),
    "logger": ("log_dir", "tensorboard_enabled"),
}
NULL_IS_ALL = ("max_val_samples", "keep_top_k")
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
    "grpo.advantage_clip_low": (None, "advantages are not clipped"),
    "grpo.advantage_clip_high": (None, "advantages are not clipped"),
    "data.use_multiple_dataloader": (False, "it has one stream of prompts"),
    "data.shuffle": (True, "every epoch has an order of its own"),
    "env.math.math_verify_impl": ("hf_math_verify", "math-verify's own rules decide"),
    "policy.tokenizer.chat_template": (None, "the template is the tokenizer's own"),
}
LONGEST = "data.max_input_seq_length"
PASSED_OVER = {
    "checkpointing.metric_name": "the latest checkpoints are kept, not the best",
    "checkpointing.checkpoint_must_save_by": "a run ends by its steps or a signal, not by a time",
    "checkpointing.ft_save_period": "checkpoints are saved by save_period alone",
    "checkpointing.ft_keep_latest_k": "keep_top_k says how many checkpoints are kept",
    "logger.wandb_enabled": "metrics go to files and to TensorBoard",
    "logger.swanlab_enabled": "metrics go to files and to TensorBoard",
    "logger.mlflow_enabled": "metrics go to files and to TensorBoard",
    "grpo.stop_at_validation_threshold": "a run takes all its steps, however well it validates",
    "grpo.val_start_at": "it validates from the first val_period on",
}
"""What changes no number of training, and our loop does otherwise."""


def load_for_own_loop(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The recipe as `nemo-fp8rl train` runs it. Raises UserError, naming the key, where our loop would do otherwise."""
    recipe = load(path, overrides).values
    for key, instead in PASSED_OVER.items():
        if given := at(recipe, key, None):
            print(f"nemo-fp8rl: {key}={given} is of NeMo RL's loop; in our own {instead}", flush=True)
    cfg = for_model(of_keys_for_own_loop(path, recipe))
    prompts = load_prompts(cfg, read_hf_config(cfg.policy.model_name).vocab_size).train
    epochs = recipe["grpo"]["max_num_epochs"] * (len(prompts) // cfg.grpo.num_prompts_per_step)
    steps = min(cfg.grpo.max_num_steps, epochs)
    recipe["grpo"]["max_num_steps"] = recipe["policy"]["megatron_cfg"]["train_iters"] = steps  # as NeMo RL's setup does
    return for_model(of_keys_for_own_loop(path, recipe))


def of_keys_for_own_loop(path: Path, recipe: Mapping[str, Any]) -> Config:
    """What the keys alone say, without the model's files and the data. recipe: the values of the one at `path`."""
    for key, (value, why) in REQUIRED.items():
        if (given := at(recipe, key, value)) not in (value, None):
            fix = f"{key}={'null' if value is None else value}"
            raise UserError(f"{key}={given}: {why} in our own loop; use `nemo-fp8rl nemo`, or set {fix}")
    known = {*COPIED["grpo"], *USED_OR_UNUSED, *(key.split(".")[1] for key in REQUIRED if key.startswith("grpo."))}
    for name, given in recipe["grpo"].items():
        if given and name not in known:
            raise UserError(f"grpo.{name}={given!r}: our own loop has no such thing; use `nemo-fp8rl nemo`")
    check_not_elsewhere(recipe)
    cfg = of_keys(recipe)
    values: dict[str, Any] = {"data": _data(recipe["data"])}
    _check_length(recipe)
    generation, ours = recipe["policy"]["generation"], asdict(cfg)
    if generation.get("temperature") is not None:  # at which NeMo RL validates, too
        ours["policy"]["generation"]["val_temperature"] = generation["temperature"]
    for block, names in COPIED.items():
        values[block] = {
            name: recipe[block].get(name)
            for name in names
            if name in NULL_IS_ALL or recipe[block].get(name) is not None
        }
    register_resolvers()
    tree = ours | values
    return completed(str(path), tree, tree)


def _check_length(recipe: Mapping[str, Any]) -> None:
    """NeMo RL keeps longer prompts from training; our loop drops those that the engine has no room for."""
    longest, room = (at(recipe, key, None) for key in (LONGEST, "policy.generation.vllm_cfg.max_model_len"))
    if longest is not None and room is not None and longest < room:
        raise UserError(
            f"{LONGEST}={longest}: our own loop takes prompts of up to policy.generation.vllm_cfg.max_model_len={room}"
            "; use `nemo-fp8rl nemo`, or set it to that or to null"
        )


def _data(given: Mapping[str, Any]) -> dict[str, Any]:
    """JSONL files of `prompt` and `answer`: what our loop reads. What a set says is before data.default's."""
    usual = given.get("default") or {}
    verifiers: dict[str, str] = {}
    values: dict[str, Any] = {}
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
        for file in ("prompt_file", "system_prompt_file"):
            if block.get(file) is not None:
                raise UserError(
                    f"data.{name}: {file}={block[file]}, and in our own loop prompts are the JSONL file's; use "
                    "`nemo-fp8rl nemo`, or set it to null"
                )
        verifiers[name] = block.get("env_name") or "exact_match"
        names = ("data_path", "split_validation_size", "seed") if name == "train" else ("data_path",)
        values[name] = {key: block[key] for key in names if key in block}
    if len(set(verifiers.values())) > 1:
        raise UserError(
            f"data.train has env_name={verifiers['train']} and data.validation {verifiers['validation']}: our own loop "
            "has one verifier; use `nemo-fp8rl nemo`, or set them alike"
        )
    return values | {"default": {"env_name": next(iter(verifiers.values()), "exact_match")}}
