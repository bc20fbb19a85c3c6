"""Rules by which a run may be resumed: its checkpoint, its recipe and its data must be those that it began with."""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from nemo_fp8rl.common.errors import UserError, single_line
from nemo_fp8rl.common.field_rules import EarlierRuns, Field, MayChange, all_fields
from nemo_fp8rl.config.recipe import to_yaml
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.config.yaml_tree import file_errors, flatten

Loop = Literal["grpo", "sft"]
COMMANDS: dict[Loop, str] = {"grpo": "train", "sft": "sft"}
"""The loop of a run, by the name of its block in a recipe, and the command that runs it."""
FILES = "data.train.data_path and data.validation.data_path the old files"
DIGESTS = {
    "training": ("training prompts are", FILES),
    "validation": ("validation prompts are", FILES),
    "examples": ("examples or their tokens are", f"{FILES}, and policy.tokenizer.name the old tokenizer"),
    "tokens": ("tokens of the prompts are", "policy.tokenizer.name the old tokenizer with its chat template"),
    "model": ("RoPE, eps and eos tokens of the model are", "policy.model_name a folder with the old config.json"),
    "base": ("weights of the base under the adapters are", "policy.model_name the model that the run began with"),
    "reference": ("weights of the reference policy are", "policy.model_name the model that the run began with"),
}
"""Name of a digest -> (what must be equal in a resumed run, the key that makes it so)."""


def may_change(key: str) -> bool:
    """True if a resumed run may give this dotted key another value."""
    return any(key == field.key or key.startswith(f"{field.key}.") for field in _fields_with(MayChange))


def recorded_recipe(cfg: Config) -> dict[str, Any]:
    """Return the recipe of the run in logger.log_dir by dotted key; empty where there is none. Raises UserError."""
    path = Path(cfg.logger.log_dir) / "config.yaml"
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ValueError("it is no block of keys")
        return flatten(tree)
    except FileNotFoundError:
        return {}
    except file_errors() as error:
        raise UserError(f"--resume: {path}, the run's recipe, cannot be read: {single_line(error)}") from None


def recorded_date(cfg: Config) -> datetime | None:
    """Return the date that the chat template of the run in logger.log_dir prints; None without one."""
    try:
        record = json.loads((Path(cfg.logger.log_dir) / "environment.json").read_text(encoding="utf-8"))
        return datetime.fromisoformat(record["chat_template_date"])
    except (OSError, ValueError, LookupError, TypeError):  # `_read_environment` says what is wrong with the file
        return None


def add_later_keys(recorded: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded recipe, by dotted key, with the keys of today.

    A key that was added later has the value by which earlier runs behaved; of a key that changes no number, it is the
    value of the new recipe. A key that was removed is left out.
    """
    removed = {
        f"{field.key}.{name}" for field in all_fields(Config) if field.block for name in field.block.removed_keys
    }
    unchanged = {key: value for key, value in new.items() if may_change(key)}
    later = (field for field in _fields_with(EarlierRuns) if field.key in new)  # a block that is null has no keys
    earlier = {field.key: field.marker(EarlierRuns).value for field in later}
    return unchanged | earlier | {key: value for key, value in recorded.items() if key not in removed}


def check_start(
    cfg: Config, loop: Loop, data: Mapping[str, str], done: int, logged: int | None, *, resume: bool, restartable: bool
) -> None:
    """Raise UserError where a run exists and `resume` is not set, and where a run cannot be resumed.

    loop:    that of the new run
    data:    digests by the names in `DIGESTS`
    done:    step of the latest checkpoint, 0 without one
    logged:  step of the last metrics, None without any
    resume, restartable: see `RunDirectory`
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
            "--restartable begins anew and keeps the old log aside, as does another logger.log_dir"
        )
    elif done or logged:  # without a checkpoint, too: it may be on a volume that is away
        record = _read_environment(path / "environment.json")
        if (recorded := record.get("loop", "grpo")) != loop:
            raise UserError(
                f"--resume: {path} is a run of `nemo-fp8rl {COMMANDS.get(recorded, recorded)}`: continue it by that "
                "command, or set another logger.log_dir"
            )
        _check_same_recipe(cfg, loop, path)
        _check_same_digests(record, data)


def _check_same_recipe(cfg: Config, loop: Loop, path: Path) -> None:
    """Refuse a recipe that would have given other numbers; blocks of other loops may differ."""
    old, new = recorded_recipe(cfg), flatten(yaml.safe_load(to_yaml(cfg)))
    if not old:
        raise UserError(f"--resume: {path} has no config.yaml, which holds the recipe of the run; put it back")
    old = add_later_keys(old, new)
    others = tuple(f"{name}." for name in COMMANDS if name != loop)
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key) and not may_change(key) and not key.startswith(others):
            raise UserError(
                f"--resume: {key} was {old.get(key)} and is now {new.get(key)}; give the old value, or set another "
                "logger.log_dir to start a run of its own"
            )


def _read_environment(path: Path) -> dict[str, Any]:
    """Return the record of a run, empty where there is none. Raises UserError where it cannot be read."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        dict(record.get("data", {}))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(
            f"--resume: {path}, which has the digests of the run's prompts, cannot be read: {single_line(error)}; "
            "remove it to go on without that check"
        ) from None
    return dict(record)


def _check_same_digests(record: Mapping[str, Any], data: Mapping[str, str]) -> None:
    """Refuse other files behind the paths, which may change: a step takes its prompts by their number."""
    known = dict(record.get("data", {}))  # none of an older run
    for kind in DIGESTS.keys() & known.keys() & data.keys():
        if known[kind] != data[kind]:
            what, fix = DIGESTS[kind]
            raise UserError(
                f"--resume: the {what} not those that the run began with: give {fix}, or set another logger.log_dir"
            )


@cache
def _fields_with(marker: type) -> tuple[Field, ...]:
    return tuple(field for field in all_fields(Config) if field.marker(marker))
