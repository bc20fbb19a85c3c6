"""Whether a run may go on: what it has saved, its recipe and its data against what it began with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_fp8rl.common.errors import UserError, one_line
from nemo_fp8rl.config.recipe import to_yaml
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.config.yaml_tree import flat, unreadable

MAY_CHANGE = (
    "grpo.max_num_steps",
    "grpo.val_",
    "grpo.dynamic_sampling_max_gen_batches",  # so that a run that found too little signal can go on
    "sft.",
    "checkpointing.",
    "logger.",
    "cluster.",
    "nemo_fp8rl.gates",  # so that a run that a gate stopped can go on
    "nemo_fp8rl.refit.",  # all ways give the same bytes
    "nemo_fp8rl.fp8_param",
    "nemo_fp8rl.workers",
    "policy.generation.vllm_cfg.enforce_eager",  # so that a run that CUDA graphs stopped can go on
    "policy.generation.vllm_cfg.gpu_memory_utilization",
    "policy.generation.vllm_cfg.kv_cache_memory_gib",
    "policy.generation.vllm_cfg.max_num_",  # so that a run whose memory was full can go on
    "policy.train_micro_batch_size",  # how a batch is cut up: other replicas need other sizes
    "policy.logprob_batch_size",
    "policy.dynamic_batching.",
    "policy.sequence_packing.",
    "policy.megatron_cfg.tensor_",  # a checkpoint loads on any layout
    "policy.megatron_cfg.pipeline_",
    "policy.megatron_cfg.num_layers_in_",
    "policy.megatron_cfg.context_",
    "policy.megatron_cfg.expert_",
    "policy.megatron_cfg.sequence_parallel",
    "policy.megatron_cfg.activation_checkpointing",
    "policy.megatron_cfg.offload_between_phases",
    "policy.generation.colocated.",
    "policy.generation.vllm_cfg.sleep_level",
    "policy.model_name",  # weights come from the checkpoint; the folder may have moved
    "policy.tokenizer.name",
    "data.train.data_path",
    "data.validation.data_path",
)
"""Keys that a resumed run may give otherwise."""
LATER = {"policy.megatron_cfg.freeze_moe_router": False}
"""Keys that older runs do not have, and what they did."""
REMOVED = ("nemo_fp8rl.kernel",)
"""Keys of older runs that changed no number and are no more."""
FILES = "data.train.data_path and data.validation.data_path the old files"
BEGAN_WITH = {
    "training": ("training prompts are", FILES),
    "validation": ("validation prompts are", FILES),
    "tokens": ("tokens of the prompts are", "policy.tokenizer.name the old tokenizer with its chat template"),
    "model": ("RoPE, eps and eos tokens of the model are", "policy.model_name a folder with the old config.json"),
    "reference": ("weights of the reference policy are", "policy.model_name the model that the run began with"),
}
"""Name of a digest -> what a resumed run must have as it was, and the key that gives it."""


def begun(cfg: Config) -> dict[str, Any]:
    """The recipe of the run in logger.log_dir, by dotted key; empty where there is none. Raises UserError."""
    path = Path(cfg.logger.log_dir) / "config.yaml"
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ValueError("it is no block of keys")
        return flat(tree)
    except FileNotFoundError:
        return {}
    except unreadable() as error:
        raise UserError(f"--resume: {path}, the run's recipe, cannot be read: {one_line(error)}") from None


def with_later_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe, by dotted key, and what a run under it did by keys that there were none of then: of those that change
    no number, what a new one says.
    """
    present = {key: value for key, value in old.items() if key not in REMOVED}
    return {key: new[key] for key in new if key.startswith(MAY_CHANGE)} | LATER | present


def check_start(
    cfg: Config, data: Mapping[str, str], done: int, logged: int | None, *, resume: bool, restartable: bool
) -> None:
    """Raise UserError where a run that is there was not asked to go on, and where one that was asked to cannot.

    data: digests, of `BEGAN_WITH`. done: the step of its latest checkpoint, 0 before there is one. logged: of its last
    metrics, None before there are any. resume, restartable: see `RunDirectory`.
    """
    path, checkpoints = Path(cfg.logger.log_dir), Path(cfg.checkpointing.checkpoint_dir)
    if not (resume or restartable):
        if logged is not None:
            raise UserError(f"{path} holds a run: add --resume to continue it, or set another logger.log_dir")
        if done:
            raise UserError(f"{checkpoints} holds checkpoints; set another checkpointing.checkpoint_dir")
        if (path / "config.yaml").exists() and not (path / "environment.json").exists():
            raise UserError(
                f"{path / 'config.yaml'} is of no run and would be overwritten: move it, or set another logger.log_dir"
            )
    elif not (logged or done or restartable or (path / "config.yaml").exists()):
        raise UserError(
            f"--resume: {path} holds no run; give the logger.log_dir of one, or --restartable to start one "
            "where there is none"
        )
    elif logged and not done and not restartable:
        raise UserError(
            f"--resume: {path} holds {logged} steps but {checkpoints} no checkpoint to continue from; "
            "set another logger.log_dir to start anew"
        )
    elif done or logged:  # without a checkpoint, too: it may be on a volume that is away
        _check_same_recipe(cfg, path)
        _check_same_digests(path / "environment.json", data)


def _check_same_recipe(cfg: Config, path: Path) -> None:
    """Refuse to continue under a recipe that would have given other numbers."""
    old, new = begun(cfg), flat(yaml.safe_load(to_yaml(cfg)))
    if not old:
        raise UserError(f"--resume: {path} has no config.yaml that says the recipe of the run; give it back")
    old = with_later_keys(old, new)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key) and not key.startswith(MAY_CHANGE):
            raise UserError(
                f"--resume: {key} was {old.get(key)} and is now {new.get(key)}; give the old value, or set another "
                "logger.log_dir to start a run of its own"
            )


def _check_same_digests(path: Path, data: Mapping[str, str]) -> None:
    """Paths may change, not what is in them: which prompts a step asks goes by their number."""
    try:
        known = dict(json.loads(path.read_text(encoding="utf-8")).get("data", {}))  # none of an older run
    except FileNotFoundError:
        return
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(
            f"--resume: {path}, which says what prompts the run began with, cannot be read: {one_line(error)}; "
            "remove it to go on without that check"
        ) from None
    for kind in BEGAN_WITH.keys() & known.keys() & data.keys():
        if known[kind] != data[kind]:
            what, fix = BEGAN_WITH[kind]
            raise UserError(
                f"--resume: the {what} not those that the run began with: give {fix}, or set another logger.log_dir"
            )
