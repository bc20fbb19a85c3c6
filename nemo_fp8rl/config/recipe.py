"""Read a recipe of `nemo-fp8rl train`: the YAML tree with overrides, typed by `config` and checked."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.config.typed_tree import check_keys, defaults, typed
from nemo_fp8rl.config.validate import check
from nemo_fp8rl.config.yaml_tree import (
    PATHS,
    expand_homes,
    read_with_parents,
    refusing,
    register_resolvers,
    with_override,
)


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The recipe at `path` with `key=value` overrides, checked. Raises UserError for anything wrong in either."""
    return completed(str(path), *read(path, overrides))


def read(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Any, Any]:
    """What recipe, parents and overrides say, without defaults: the tree, and its values with ${...} left as it is.

    Raises UserError on what cannot be read and on an unknown key.
    """
    from omegaconf import OmegaConf

    register_resolvers()
    tree = read_with_parents(Path(path))
    for override in overrides:
        tree = with_override(tree, override)
    with refusing(str(path)):
        given = OmegaConf.to_container(tree)
    check_keys(given, Config)
    return tree, given


def completed(source: str, tree: Any, given: Any) -> Config:
    """The tree with every default, typed and checked. source: what a refusal begins with; given: the tree's values, as
    far as they decide which defaults there are.
    """
    from omegaconf import OmegaConf

    with refusing(source):
        tree = OmegaConf.merge(defaults(Config, given), tree)
        values: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    expand_homes(values, PATHS)
    cfg = typed(values, Config)
    check(cfg)
    return cfg


def to_yaml(cfg: Config) -> str:
    """The resolved recipe, every default written out."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(cfg)))
