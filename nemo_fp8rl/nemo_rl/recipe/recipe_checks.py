"""Check what NeMo RL's launcher, loops and `setup` assert of a recipe, before anything starts.

`run_loop` replaces the launcher for both kinds of workers, and the package's workers replace `setup`. NeMo RL itself
would refuse a recipe late: its loop after the workers are loaded, its `setup` after the cluster has started.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from nemo_fp8rl.algorithms.correction_config import CorrectionConfig
from nemo_fp8rl.algorithms.loss_config import LossConfig, resolve_correction
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.typed_tree import read_block, to_block
from nemo_fp8rl.data.chat_template import why_no_template
from nemo_fp8rl.nemo_rl.recipe.gpu_division import (
    check_division,
    is_asynchronous,
    is_colocated,
    is_single_controller,
)
from nemo_fp8rl.nemo_rl.recipe.keys import KV_WINDOW, at
from nemo_fp8rl.nemo_rl.recipe.rewards import dataset_blocks, reward_names

OTHER_LAUNCHERS = {
    "async_rl": "is for NeMo RL's single controller (examples/run_grpo_single_controller.py), which runs other workers",
    "data_plane.enabled": "needs NeMo RL's loop over TransferQueue (grpo_train_sync), which has its own policy",
    "on_policy_distillation.enabled": "needs teachers beside the policy, which this command does not start",
    "env.should_use_nemo_gym": "needs NeMo Gym's servers, which this command does not start",
}
"""Keys for which NeMo RL has other launchers or other components, and the reason."""
SINGLE_CONTROLLER_KEYS = ("async_rl", "data_plane.enabled")
"""Keys that the single controller needs and no other loop has."""
VALIDATION = {"grpo.val_period": 0, "grpo.val_at_start": False, "grpo.val_at_end": False}
"""Keys of the validation, and the values with which there is none."""
NEEDS_NEMO_RLS = (
    "async_rl is for NeMo RL's single controller, which gives batches to its own workers over TransferQueue, and this "
    "package's have no such client: run it on GPUs with nemo_fp8rl.workers=nemo_rl, or remove async_rl and set "
    "grpo.async_grpo.enabled=true and data_plane.enabled=false"
)
"""Refusal of the package's workers."""
SYNCHRONOUS_KEYS = (
    *("grpo.use_dynamic_sampling", "grpo.reward_shaping.enabled", "grpo.reward_scaling.enabled"),
    "data.use_multiple_dataloader",
)
"""Keys that NeMo RL's asynchronous loop ignores and its launcher refuses."""
METRIC_PREFIXES = ("train:", "val:")
"""Prefixes of checkpointing.metric_name: a metric of training or of validation."""
NO_LOGPROBS = "the log-probs that loss_fn.force_on_policy_ratio does not compute; remove one of the two"


def check_loop(master: Mapping[str, Any]) -> None:
    """Check a recipe for NeMo RL's two loops, with either kind of workers, and for its single controller.

    Raises: UserError, with the key, for what the loops do not support, what NeMo RL's `setup` would refuse, and an
        invalid loss
    """
    single_controller = is_single_controller(master)
    check_launcher(master, SINGLE_CONTROLLER_KEYS if single_controller else ())
    if single_controller:
        check_single_controller(master)
    elif at(master, "grpo.async_grpo", {}) is None:
        raise UserError(
            "grpo.async_grpo is null, which is for NeMo RL's single controller: set grpo.async_grpo.enabled=false"
        )
    if is_asynchronous(master):
        for key in SYNCHRONOUS_KEYS:
            if at(master, key, False):
                raise UserError(f"{key}=true is not supported by NeMo RL's asynchronous loop: set it to false")
    if weight := at(master, "loss_fn.positive_example_nll_weight", 0):
        raise UserError(
            f"loss_fn.positive_example_nll_weight={weight}: NeMo RL's GRPO loops give their loss no rewards, which "
            "this term needs; set it to 0, or use `nemo-fp8rl train`"
        )
    for name, value in (master.get("reward_penalties") or {}).items():
        if value is True:
            raise UserError(f"reward_penalties.{name}=true needs NeMo Gym, which is not supported: set it to false")
    metric = at(master, "grpo.stop_at_validation_metric", None)
    if metric is not None and at(master, "grpo.stop_at_validation_threshold", None) is None:
        raise UserError(f"grpo.stop_at_validation_metric={metric} needs grpo.stop_at_validation_threshold; set it, too")
    if metric == "pass_k" and at(master, "grpo.val_num_generations_per_prompt", 1) in (None, 1):
        raise UserError("grpo.stop_at_validation_metric=pass_k needs grpo.val_num_generations_per_prompt above 1")
    best_by = at(master, "checkpointing.metric_name", None)
    saves = at(master, "checkpointing.enabled", False)
    if best_by is not None and saves and not str(best_by).startswith(METRIC_PREFIXES):
        raise UserError(
            f"checkpointing.metric_name={best_by} needs the prefix train: or val:, which NeMo RL asserts at the first "
            f"checkpoint: set it to val:{best_by} or train:{best_by}"
        )
    template = at(master, "policy.tokenizer.chat_template", None)
    if isinstance(template, str) and (reason := why_no_template(template)):
        raise UserError(reason)
    _check_validation(master)
    _check_reward_shaping(master)
    _check_environments(master)
    check_loss(master)
    check_setup(master)


def check_single_controller(master: Mapping[str, Any]) -> None:
    """Raise UserError, with the key, for what NeMo RL's launcher or setup of the single controller would refuse.

    Its rules of staleness, buffers and batch sizes are checked by its own function (`run.single_controller`).
    """
    if at(master, "grpo.async_grpo", {}) is not None:  # NeMo RL's default is a block
        raise UserError("async_rl, NeMo RL's single controller, needs grpo.async_grpo=null: set one of the two")
    if not at(master, "data_plane.enabled", False):
        raise UserError("async_rl, NeMo RL's single controller, needs data_plane.enabled=true")
    for key, without in VALIDATION.items():
        if value := at(master, key, without):
            raise UserError(f"{key}={value}: NeMo RL's single controller cannot validate; set it to {without}")
    if at(master, "nemo_fp8rl.mismatch_alarm", None) == "stop":
        raise UserError(
            "nemo_fp8rl.mismatch_alarm=stop: NeMo RL's single controller logs in an actor of its own, where this "
            "package cannot watch the metric; set it to none"
        )


def _check_validation(master: Mapping[str, Any]) -> None:
    """Require numbers that NeMo RL divides by, at its first validation, and at least one batch to validate."""
    starts_or_ends = any(at(master, f"grpo.{name}", False) for name in ("val_at_start", "val_at_end"))
    if not starts_or_ends and (at(master, "grpo.val_period", 10) or 0) <= 0:
        return
    samples, batch = (at(master, f"grpo.{name}", 256) for name in ("max_val_samples", "val_batch_size"))
    for name, value in (("max_val_samples", samples), ("val_batch_size", batch)):
        if value is None:
            raise UserError(f"grpo.{name}=null is for NeMo Gym, and NeMo RL's validation divides by it: set a number")
    if samples < batch:
        raise UserError(
            f"grpo.max_val_samples={samples} is below grpo.val_batch_size={batch}: NeMo RL validates whole batches "
            f"alone, none here, and would log an accuracy of 0; set grpo.val_batch_size={samples}"
        )


def _check_reward_shaping(master: Mapping[str, Any]) -> None:
    shaping = at(master, "grpo.reward_shaping", None) or {}
    if not shaping.get("enabled") or shaping.get("stop_properly_penalty_coef") is not None:
        return
    for name in ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length"):
        if shaping.get(name) is None:
            raise UserError(
                f"grpo.reward_shaping.{name} is missing or null, and grpo.reward_shaping.enabled=true: set a number, "
                "or stop_properly_penalty_coef"
            )


def _check_environments(master: Mapping[str, Any]) -> None:
    """Require the block `env.NAME` of each environment that data names, except those that this package fills in."""
    data = master.get("data") or {}
    for entry in dataset_blocks(data):
        name = entry.get("env_name")
        if isinstance(name, str) and name not in reward_names(data):
            block = (master.get("env") or {}).get(name)
            if not isinstance(block, Mapping):
                raise UserError(f"data has env_name={name}, and there is no block env.{name}: add its keys")
            if name == "math" and block.get("num_workers") is None:
                raise UserError("env.math.num_workers is missing or null: set how many processes verify answers")


def check_launcher(master: Mapping[str, Any], allowed: Collection[str] = ()) -> None:
    """Raise UserError, with the key, for a recipe that needs another launcher or other components of NeMo RL.

    allowed: keys of OTHER_LAUNCHERS that the caller can follow
    """
    for key, why in OTHER_LAUNCHERS.items():
        if (value := at(master, key, None)) and key not in allowed:
            subject = key if isinstance(value, Mapping) else f"{key}={value}"
            raise UserError(f"{subject} {why}: remove it, or run the recipe with NeMo RL alone")
    if at(master, "grpo.adv_estimator.name", None) == "opd":
        raise UserError(
            "grpo.adv_estimator.name=opd needs teachers beside the policy, which are not supported: set it to grpo"
        )


def why_corrections_conflict(master: Mapping[str, Any]) -> str:
    """Return a sentence if an asynchronous recipe sets the correction by loss_fn and by nemo_fp8rl.correction; else "".

    The asynchronous loop requires use_importance_sampling_correction, so that key is no contradiction there.
    """
    package_correction = at(master, "nemo_fp8rl.correction", None)
    loss_correction = at(master, "loss_fn.truncated_importance_sampling_type", None)
    if not is_asynchronous(master) or package_correction is None or loss_correction is None:
        return ""
    return (
        "nemo_fp8rl.correction contradicts loss_fn.truncated_importance_sampling_type: set that and its ratios to null"
    )


def loss_keys(master: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the block loss_fn that LossConfig has.

    The asynchronous loop requires use_importance_sampling_correction; with nemo_fp8rl.correction the returned value is
    False, as that key says how to correct.
    Raises: UserError if another key of loss_fn says it, too
    """
    if refusal := why_corrections_conflict(master):
        raise UserError(refusal)
    known = {field.name for field in fields(LossConfig)}
    for name, value in master["loss_fn"].items():
        if value and name not in known:
            raise UserError(f"loss_fn.{name}={value!r}: the loss of this package has no such key; remove it")
    keys = {name: value for name, value in master["loss_fn"].items() if name in known}
    if is_asynchronous(master) and at(master, "nemo_fp8rl.correction", None) is not None:
        keys["use_importance_sampling_correction"] = False
    return keys


def read_correction(master: Mapping[str, Any]) -> CorrectionConfig | None:
    """Return the block nemo_fp8rl.correction, None without one. Raises UserError, with the key."""
    values = at(master, "nemo_fp8rl.correction", None)
    return None if values is None else read_block(values, CorrectionConfig, "nemo_fp8rl.correction.")


def check_loss(master: Mapping[str, Any]) -> None:
    """Raise UserError, with the key, for a loss or correction that `GrpoLoss` does not support; every run uses it."""
    loss = to_block(loss_keys(master), LossConfig, "loss_fn.")
    loss.check()
    resolve_correction(loss, read_correction(master))


def check_setup(master: Mapping[str, Any]) -> None:
    """Check what NeMo RL's `setup` and asynchronous loop assert of a recipe, with either kind of workers.

    If a version of NeMo RL lacks one of these assertions, it computes something wrong instead.
    Raises: UserError, with the key
    """
    grpo, loss, generation = master["grpo"], master["loss_fn"], master["policy"]["generation"]
    if loss.get("force_on_policy_ratio"):
        _check_on_policy(master)
    if is_asynchronous(master) and not is_single_controller(master):
        _check_asynchronous(master)
    if not grpo.get("use_dynamic_sampling") and grpo.get("batch_multiplier", 1) != 1:
        raise UserError("grpo.batch_multiplier needs grpo.use_dynamic_sampling=true; set it to 1")
    if grpo.get("skip_reference_policy_logprobs_calculation") and loss.get("reference_policy_kl_penalty"):
        raise UserError(
            "grpo.skip_reference_policy_logprobs_calculation=true needs loss_fn.reference_policy_kl_penalty=0"
        )
    for name in ("temperature", "top_p", "top_k"):  # v0.7.0 does not know the val_ keys
        same = (None, generation.get(name), *((-1,) if name == "top_k" and generation.get(name) is None else ()))
        if generation.get(f"val_{name}") not in same:
            raise UserError(
                f"policy.generation.val_{name} differs from {name}, with which NeMo RL's loop validates; set them alike"
            )
    check_division(master)


def check_for_package_workers(master: Mapping[str, Any]) -> None:
    """Raise UserError, with the key, for what the package's workers and setup do not support."""
    if is_single_controller(master):
        raise UserError(NEEDS_NEMO_RLS)
    if at(master, "data.use_multiple_dataloader", False):
        raise UserError("data.use_multiple_dataloader=true is not supported without NeMo RL's setup; set it to false")
    window, turns = at(master, KV_WINDOW, None), at(master, "grpo.max_rollout_turns", 1)
    if window is not None and turns > 1 and at(master, "nemo_fp8rl.kv", "unified") == "unified":
        raise UserError(
            f"{KV_WINDOW}={window}: an engine keeps the answers of earlier turns, which the trainer's window leaves "
            f"out: set grpo.max_rollout_turns=1 in place of {turns}, or nemo_fp8rl.kv=rollout"
        )
    if not master["loss_fn"].get("force_on_policy_ratio"):
        return
    correction = read_correction(master)
    if at(master, "nemo_fp8rl.gates", None):
        raise UserError(f"nemo_fp8rl.gates need {NO_LOGPROBS}")
    if at(master, "nemo_fp8rl.sharpness.period", 0):
        raise UserError(f"nemo_fp8rl.sharpness needs {NO_LOGPROBS}")
    if correction is not None and (why := correction.resolve().of_whole_batch):
        raise UserError(f"nemo_fp8rl.correction.{why} needs {NO_LOGPROBS}")


def _check_on_policy(master: Mapping[str, Any]) -> None:
    """Require one update per rollout, and no use of log-probs: NeMo RL's loop has zeros instead, unless another key
    needs them.
    """
    grpo, loss = master["grpo"], master["loss_fn"]
    rollout = grpo["num_prompts_per_step"] * grpo["num_generations_per_prompt"]
    if (batch := master["policy"]["train_global_batch_size"]) != rollout:
        raise UserError(
            f"loss_fn.force_on_policy_ratio=true is for one update a rollout: set policy.train_global_batch_size="
            f"{rollout}, all samples of a step, in place of {batch}"
        )
    penalty = loss.get("reference_policy_kl_penalty", LossConfig.reference_policy_kl_penalty)
    if loss.get("use_kl_in_reward") and penalty and at(master, "grpo.seq_logprob_error_threshold", None) is None:
        raise UserError(f"loss_fn.use_kl_in_reward needs {NO_LOGPROBS}")


def _check_asynchronous(master: Mapping[str, Any]) -> None:
    """Check what NeMo RL's asynchronous loop asserts of vLLM after workers and engines have started."""
    key, generation = "grpo.async_grpo.enabled=true", master["policy"]["generation"]
    if generation.get("backend", "vllm") == "vllm":
        if not at(generation, "vllm_cfg.async_engine", False):
            raise UserError(f"{key} needs policy.generation.vllm_cfg.async_engine=true")
        if is_colocated(generation):
            raise UserError(
                f"{key} generates while it trains: set policy.generation.colocated.enabled=false and, in "
                "policy.generation.colocated.resources, how many GPUs generate"
            )
    if not master["loss_fn"].get("use_importance_sampling_correction"):
        raise UserError(f"{key} needs loss_fn.use_importance_sampling_correction=true, because samples are off-policy")
