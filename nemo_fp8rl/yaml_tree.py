"""A YAML file with its parents, as one OmegaConf tree: the part of NeMo RL's config dialect that needs no schema.

`defaults:` names one file or a list, relative to the file that says so; parents are merged depth first, the file itself
last. A top-level block that says `_override_: true` replaces its parents' instead of merging with it. Works with
OmegaConf 2.3, which NeMo RL has, and 2.4.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_fp8rl.errors import UserError, one_line

RESOLVERS: dict[str, Callable[..., Any]] = {
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "div": lambda a, b: a / b,
    "max": lambda *values: max(values),
}
"""NeMo RL's."""
OVERRIDE = "_override_"


def register_resolvers() -> None:
    """Make RESOLVERS known to OmegaConf; 2.4 gave the function the name of an older one that lacks `replace`."""
    import omegaconf

    is_old = omegaconf.__version__.startswith("2.3.")
    register = omegaconf.OmegaConf.register_new_resolver if is_old else omegaconf.OmegaConf.register_resolver
    for name, resolver in RESOLVERS.items():
        register(name, resolver, replace=True)


def read_with_parents(path: Path, children: tuple[Path, ...] = ()) -> Any:
    """The file merged over its parents. Raises UserError for what cannot be read, and for a cycle."""
    from omegaconf import OmegaConf

    own = _read(path)
    if path.resolve() in children:
        raise UserError(f"{path}: `defaults:` leads back to the file itself; remove the cycle")
    merged: Any = OmegaConf.create()
    for parent in _take_parents(path, own):
        merged = _merge(path, merged, read_with_parents(parent, (*children, path.resolve())))
    return _merge(path, merged, own)


def read_override(override: str) -> Any:
    """`a.b=value` as a tree; a leading + or ++, which Hydra asks for with new keys, is accepted."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key, equals, _ = override.partition("=")
    if not equals or not key.strip("+"):
        raise UserError(f"override {override!r} is not of the form key=value")
    try:
        return OmegaConf.from_dotlist([override.lstrip("+")])
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise UserError(f"override {override!r} cannot be read ({one_line(error)}); quote the value") from None


def _read(path: Path) -> Any:
    import yaml
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        own = OmegaConf.load(path)
    except FileNotFoundError:
        raise UserError(f"there is no file {path}; give the path of a YAML file") from None
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path} cannot be read as YAML: {one_line(error)}") from None
    if not isinstance(own, DictConfig):
        raise UserError(f"{path} must hold a mapping of blocks (policy:, data:, grpo:, ...)")
    return own


def _take_parents(path: Path, own: Any) -> list[Path]:
    """Remove `defaults:` and say which files it names."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        named = own.pop("defaults", None) or []
        named = OmegaConf.to_container(named, resolve=True) if OmegaConf.is_config(named) else named
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: `defaults:` {one_line(error)}") from None
    parents = [named] if isinstance(named, str) else named
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise UserError(f"{path}: `defaults:` must be the path of a recipe or a list of paths, got {named!r}")
    return [path.parent / parent for parent in parents]


def _merge(path: Path, parent: Any, child: Any) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for key in list(child):
        if OmegaConf.is_missing(child, key) or OmegaConf.is_interpolation(child, key):
            continue
        if OmegaConf.is_dict(child[key]) and child[key].get(OVERRIDE):
            child[key].pop(OVERRIDE)
            parent.pop(key, None)
    try:
        return OmegaConf.merge(parent, child)
    except OmegaConfBaseException as error:
        raise UserError(f"{path} cannot be merged with what it inherits: {one_line(error)}") from None


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return leaves
