"""What NeMo RL's launcher, loops and `setup` assert of a recipe; here before anything starts.

`run` takes the launcher's place for both kinds of worker, and our parts that of `setup`; NeMo RL's own workers would be
loaded before its loop, or the cluster there before its `setup`, says no.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from nemo_fp8rl.algorithms.correction_config import from_mapping
from nemo_fp8rl.algorithms.loss_config import LossConfig, loss_config, resolved_correction
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.typed_tree import typed
from nemo_fp8rl.nemo_rl.recipe.gpu_division import check_division, is_asynchronous, is_colocated
from nemo_fp8rl.nemo_rl.recipe.keys import at

ELSEWHERE = {
    "async_rl": "is of NeMo RL's single controller (examples/run_grpo_single_controller.py), which runs other workers",
    "data_plane.enabled": "asks for NeMo RL's loop over TransferQueue (grpo_train_sync), which has a policy of its own",
    "on_policy_distillation.enabled": "asks for teachers beside the policy, which this command does not start",
    "env.should_use_nemo_gym": "asks for NeMo Gym's servers, which this command does not hand to the loop",
}
"""What NeMo RL has other launchers or other parts for."""
ONLY_SYNCHRONOUS = (
    *("grpo.use_dynamic_sampling", "grpo.reward_shaping.enabled", "grpo.reward_scaling.enabled"),
    "data.use_multiple_dataloader",
)
"""What its asynchronous loop passes over, and its launcher refuses."""
PREFIXES = ("train:", "val:")
"""Beginnings of checkpointing.metric_name, which say whose metric it is."""
NO_LOGPROBS = "the log-probs that loss_fn.force_on_policy_ratio does without; drop one"


def check_loop(master: Mapping[str, Any]) -> None:
    """Raise UserError, naming the key, for what neither of NeMo RL's two loops does, whoever's the workers are, for
    what its `setup` would refuse, and for a loss that is none.
    """
    check_not_elsewhere(master)
    if at(master, "grpo.async_grpo", {}) is None:
        raise UserError(
            "grpo.async_grpo is null, which is for NeMo RL's single controller: set grpo.async_grpo.enabled=false"
        )
    if is_asynchronous(master):
        for key in ONLY_SYNCHRONOUS:
            if at(master, key, False):
                raise UserError(f"{key}=true is nothing that NeMo RL's asynchronous loop does: set it to false")
    if weight := at(master, "loss_fn.positive_example_nll_weight", 0):
        raise UserError(
            f"loss_fn.positive_example_nll_weight={weight}: NeMo RL's GRPO loops give their loss no rewards, so there "
            "is no such term; set it to 0, or use `nemo-fp8rl train`"
        )
    for name, on in (master.get("reward_penalties") or {}).items():
        if on is True:
            raise UserError(f"reward_penalties.{name}=true needs NeMo Gym, which is not here: set it to false")
    metric = at(master, "grpo.stop_at_validation_metric", None)
    if metric is not None and at(master, "grpo.stop_at_validation_threshold", None) is None:
        raise UserError(f"grpo.stop_at_validation_metric={metric} needs grpo.stop_at_validation_threshold; set it, too")
    if metric == "pass_k" and at(master, "grpo.val_num_generations_per_prompt", 1) in (None, 1):
        raise UserError("grpo.stop_at_validation_metric=pass_k needs grpo.val_num_generations_per_prompt above 1")
    best_by = at(master, "checkpointing.metric_name", None)
    if best_by is not None and at(master, "checkpointing.enabled", False) and not str(best_by).startswith(PREFIXES):
        raise UserError(
            f"checkpointing.metric_name={best_by} says neither train: nor val: before the metric's name, which NeMo RL "
            f"asks for at the first checkpoint: set it to val:{best_by} or train:{best_by}"
        )
    check_loss(master)
    check_set_up(master)


def check_not_elsewhere(master: Mapping[str, Any]) -> None:
    """Raise UserError, naming the key, for what NeMo RL runs by other launchers, or with parts that are not here."""
    for key, what in ELSEWHERE.items():
        if given := at(master, key, None):
            named = key if isinstance(given, Mapping) else f"{key}={given}"
            raise UserError(f"{named} {what}: remove it, or run the recipe with NeMo RL alone")
    if at(master, "grpo.adv_estimator.name", None) == "opd":
        raise UserError(
            "grpo.adv_estimator.name=opd needs teachers beside the policy, which are not started here: set it to grpo"
        )


def correction_said_twice(master: Mapping[str, Any]) -> str:
    """A sentence where the asynchronous loop, which asks for use_importance_sampling_correction, is told how to correct
    by a key of loss_fn and by nemo_fp8rl.correction; else empty.
    """
    ours = at(master, "nemo_fp8rl.correction", None)
    theirs = at(master, "loss_fn.truncated_importance_sampling_type", None)
    if not is_asynchronous(master) or ours is None or theirs is None:
        return ""
    return (
        "nemo_fp8rl.correction contradicts loss_fn.truncated_importance_sampling_type: set that and its ratios to null"
    )


def loss_keys(master: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the block loss_fn that LossConfig has. The asynchronous loop asks for
    use_importance_sampling_correction; beside that `nemo_fp8rl.correction` says how. Raises UserError where a key of
    loss_fn does, too.
    """
    if refusal := correction_said_twice(master):
        raise UserError(refusal)
    known = {field.name for field in fields(LossConfig)}
    keys = {name: value for name, value in master["loss_fn"].items() if name in known}
    if is_asynchronous(master) and at(master, "nemo_fp8rl.correction", None) is not None:
        keys["use_importance_sampling_correction"] = False
    return keys


def check_loss(master: Mapping[str, Any]) -> None:
    """Raise UserError, naming the key, for a loss or a correction that ours, which every run here has, cannot be."""
    loss = loss_config(typed(loss_keys(master), LossConfig, "loss_fn."))
    resolved_correction(loss, at(master, "nemo_fp8rl.correction", None))


def check_set_up(master: Mapping[str, Any]) -> None:
    """Raise UserError, naming the key, for what NeMo RL's `setup` and asynchronous loop assert of a recipe, whoever's
    the workers are: its own would be there already. What one of its versions does not assert, it does wrongly.
    """
    grpo, loss, generation = master["grpo"], master["loss_fn"], master["policy"]["generation"]
    if loss.get("force_on_policy_ratio"):
        _check_on_policy(master)
    if is_asynchronous(master):
        _check_asynchronous(master)
    if not grpo.get("use_dynamic_sampling") and grpo.get("batch_multiplier", 1) != 1:
        raise UserError("grpo.batch_multiplier needs grpo.use_dynamic_sampling=true; set it to 1")
    if grpo.get("skip_reference_policy_logprobs_calculation") and loss.get("reference_policy_kl_penalty"):
        raise UserError(
            "grpo.skip_reference_policy_logprobs_calculation=true needs loss_fn.reference_policy_kl_penalty=0"
        )
    for name in ("temperature", "top_p", "top_k"):  # which v0.7.0 does not know
        if generation.get(f"val_{name}") not in (None, generation.get(name)):
            raise UserError(
                f"policy.generation.val_{name} differs from {name}: NeMo RL's loop validates by that; set them alike"
            )
    check_division(master)


def check_without_set_up(master: Mapping[str, Any]) -> None:
    """Raise UserError, naming the key, for what our parts cannot have in the place of NeMo RL's `setup` and workers."""
    if at(master, "data.use_multiple_dataloader", False):
        raise UserError("data.use_multiple_dataloader=true is not supported without NeMo RL's setup; set it to false")
    if not master["loss_fn"].get("force_on_policy_ratio"):
        return
    correction = at(master, "nemo_fp8rl.correction", None)
    if at(master, "nemo_fp8rl.gates", None):
        raise UserError(f"nemo_fp8rl.gates need {NO_LOGPROBS}")
    if correction is not None and (why := from_mapping(correction).of_whole_batch):
        raise UserError(f"nemo_fp8rl.correction.{why} needs {NO_LOGPROBS}")


def _check_on_policy(master: Mapping[str, Any]) -> None:
    """One update a rollout, and nothing that asks for log-probs: NeMo RL's loop has zeros in their place, unless
    another key asks for them.
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
    """What its asynchronous loop asserts when workers and engines are there already; of other engines, other things."""
    here, generation = "grpo.async_grpo.enabled=true", master["policy"]["generation"]
    if generation.get("backend", "vllm") == "vllm":
        if not at(generation, "vllm_cfg.async_engine", False):
            raise UserError(f"{here} needs policy.generation.vllm_cfg.async_engine=true")
        if is_colocated(generation):
            raise UserError(
                f"{here} generates while it trains: set policy.generation.colocated.enabled=false and say in "
                "policy.generation.colocated.resources how many GPUs generate"
            )
    if not master["loss_fn"].get("use_importance_sampling_correction"):
        raise UserError(f"{here} needs loss_fn.use_importance_sampling_correction=true, for samples are off-policy")
