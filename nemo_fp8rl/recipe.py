"""Read a recipe of `nemo-fp8rl train`: the YAML tree with overrides, typed by `config` and checked."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from nemo_fp8rl.config import Config
from nemo_fp8rl.config_check import check
from nemo_fp8rl.errors import UserError, one_line
from nemo_fp8rl.typed_tree import check_keys, defaults, typed
from nemo_fp8rl.yaml_tree import read_override, read_with_parents, register_resolvers


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The recipe at `path` with `key=value` overrides, checked. Raises UserError for anything wrong in either."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    register_resolvers()
    tree = read_with_parents(Path(path))
    try:
        for override in overrides:
            tree = OmegaConf.merge(tree, read_override(override))
        given = OmegaConf.to_container(tree)
        check_keys(given, Config)
        tree = OmegaConf.merge(defaults(Config, given), tree)
        values = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {one_line(error)}") from None
    cfg = typed(values, Config)
    check(cfg)
    return cfg


def to_yaml(cfg: Config) -> str:
    """The resolved recipe, every default written out."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(cfg)))
