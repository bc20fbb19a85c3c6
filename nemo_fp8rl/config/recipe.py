"""Reader of a recipe of `nemo-fp8rl train`: the YAML tree with overrides, as a checked `Config`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_fp8rl.common.field_rules import FilePath, NullAs, all_fields
from nemo_fp8rl.config.recipe_names import check_command, find_recipe
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.config.typed_tree import check_keys, defaults, to_block
from nemo_fp8rl.config.validate.recipe import check
from nemo_fp8rl.config.yaml_tree import (
    expand_homes,
    merge_override,
    read_with_parents,
    register_resolvers,
    yaml_errors_as_user_error,
)

PATHS = (*(field.key for field in all_fields(Config) if field.marker(FilePath)), "data.default.data_path")
"""Keys of recipes that may name a folder or a file; the last is NeMo RL's alone."""


def load(path: str | Path, overrides: Sequence[str] = (), has_rollouts: bool = True) -> Config:
    """Return the checked recipe, of this path or name, with `key=value` overrides.

    has_rollouts:  False leaves out the rules about the sizes of rollouts, which `sft` has not
    Raises:        UserError for any fault of either
    """
    path = find_recipe(path)
    return complete(str(path), *read(path, overrides), has_rollouts)


def read(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Any, Any]:
    """Return the tree of recipe, parents and overrides without defaults, and its values with ${...} unresolved.

    Raises: UserError for a file that cannot be read and for an unknown key
    """
    from omegaconf import OmegaConf

    register_resolvers()
    path = find_recipe(path)
    tree = read_with_parents(path)
    for override in overrides:
        tree = merge_override(tree, override)
    with yaml_errors_as_user_error(str(path)):
        values: Any = OmegaConf.to_container(tree)
    check_command(path, values, "train")
    check_keys(values, Config)
    return tree, values


def complete(source: str, tree: Any, values: Any, has_rollouts: bool = True) -> Config:
    """Return the tree with every default, typed and checked.

    source:  what a message begins with
    values:  the tree's values, which decide about optional blocks and presets
    has_rollouts:  see `load`
    """
    from omegaconf import OmegaConf

    with yaml_errors_as_user_error(source):
        tree = OmegaConf.merge(defaults(Config, values), tree)
        resolved: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    expand_homes(resolved, PATHS)
    _spell_nulls(resolved)
    cfg = to_block(resolved, Config)
    check(cfg, has_rollouts)
    return cfg


def _spell_nulls(values: dict[str, Any]) -> None:
    """Replace other spellings of null, -1 of top_k, in place."""
    for field in all_fields(Config):
        *blocks, name = field.key.split(".")
        block: Any = values
        for part in blocks:
            block = block.get(part) if isinstance(block, dict) else None
        if (other := field.marker(NullAs)) and isinstance(block, dict) and block.get(name) == other.value:
            block[name] = None


def to_yaml(cfg: Config) -> str:
    """Return the resolved recipe with every default."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(cfg)))
