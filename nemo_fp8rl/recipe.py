"""Read a recipe: YAML, `defaults:` inheritance, interpolation and overrides by OmegaConf, types by pydantic.

Kept apart from `config` so that the typed blocks need neither OmegaConf nor pydantic.
"""

import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from nemo_fp8rl.config import Config
from nemo_fp8rl.config_check import check
from nemo_fp8rl.errors import UserError


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The recipe at `path` with `key=value` overrides, checked. Raises UserError for anything wrong in either."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _register_resolvers()
    tree = _read_with_parents(Path(path), ())
    try:
        for override in overrides:
            tree = OmegaConf.merge(tree, _read_override(override))
        given = OmegaConf.to_container(tree)
        _check_keys(given, Config, "")
        tree = OmegaConf.merge(_defaults(Config, given), tree)
        values = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {_one_line(error)}") from None
    cfg = _typed(values)
    check(cfg)
    return cfg


def _read_override(override: str) -> Any:
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
        raise UserError(f"override {override!r} cannot be read ({_one_line(error)}); quote the value") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def to_yaml(cfg: Config) -> str:
    """The resolved recipe, every default written out."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(cfg)))


def _register_resolvers() -> None:
    from omegaconf import OmegaConf

    OmegaConf.register_resolver("mul", lambda a, b: a * b, replace=True)  # as in NeMo RL's recipes


def _read_with_parents(path: Path, children: tuple[Path, ...]) -> Any:
    """The file merged over the files that its `defaults:` names (one path or a list, relative to the file)."""
    import yaml
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if path.resolve() in children:
        raise UserError(f"{path}: `defaults:` leads back to the file itself; remove the cycle")
    try:
        own = OmegaConf.load(path)
    except FileNotFoundError:
        raise UserError(f"there is no recipe {path}; give the path of a YAML file") from None
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path} cannot be read as YAML: {_one_line(error)}") from None
    if not isinstance(own, DictConfig):
        raise UserError(f"{path} must hold a mapping of blocks (policy:, data:, grpo:, ...)")
    named = own.pop("defaults", None) or []
    if OmegaConf.is_config(named):
        named = OmegaConf.to_container(named)
    parents = [named] if isinstance(named, str) else named
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise UserError(f"{path}: `defaults:` must be the path of a recipe or a list of paths, got {named!r}")
    merged: Any = OmegaConf.create()
    for parent in parents:
        merged = OmegaConf.merge(merged, _read_with_parents(path.parent / parent, (*children, path.resolve())))
    return OmegaConf.merge(merged, own)


def _block_of(hint: Any) -> Any:
    """The dataclass behind a type hint, also behind `Block | None`; None when there is none."""
    if get_origin(hint) is tuple:
        return None
    return next((t for t in (hint, *get_args(hint)) if dataclasses.is_dataclass(t)), None)


def _list_of(hint: Any) -> Any:
    """The dataclass behind `tuple[Block, ...]`, a list of blocks; None for anything else."""
    return next((t for t in get_args(hint) if dataclasses.is_dataclass(t)), None) if get_origin(hint) is tuple else None


def _hints(block: type) -> dict[str, Any]:
    """Type hint of every key of a block."""
    hints = get_type_hints(block)
    return {f.name: hints[f.name] for f in dataclasses.fields(block)}


def _check_keys(given: Any, block: type, prefix: str) -> None:
    """Refuse unknown keys, and what pydantic would quietly convert."""
    hints = _hints(block)
    for key, value in given.items():
        if key not in hints:
            raise UserError(f"unknown config key {prefix}{key}; {_nearest(str(key), hints, prefix)}")
        child, element = _block_of(hints[key]), _list_of(hints[key])
        if element and value is not None:
            if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
                raise UserError(f"{prefix}{key} must be a list of blocks of keys, got {value!r}")
            for i, part in enumerate(value):
                _check_keys(part, element, f"{prefix}{key}[{i}].")
        elif child and value is not None:
            if not isinstance(value, dict):
                raise UserError(f"{prefix}{key} must be a block of keys, got {value!r}")
            _check_keys(value, child, f"{prefix}{key}.")
        elif isinstance(value, dict) and not _takes_mapping(hints[key]):
            raise UserError(f"{prefix}{key} must be one value, got the mapping {value!r}")
        elif value == "???":
            raise UserError(f"{prefix}{key} is required; set it in the recipe or as {prefix}{key}=...")
        elif isinstance(value, bool) and {int, float} & {hints[key], *get_args(hints[key])}:
            raise UserError(f"{prefix}{key}={value}: input should be a number")


def _takes_mapping(hint: Any) -> bool:
    return any(get_origin(t) is dict for t in (hint, *get_args(hint)))


def _nearest(key: str, hints: dict[str, Any], prefix: str) -> str:
    near = difflib.get_close_matches(key, hints, 1)
    elsewhere = [known for known in _all_keys(Config) if known.split(".")[-1] == key]
    hint = f"{prefix}{near[0]}" if near else elsewhere[0] if elsewhere else None
    return f"did you mean {hint}?" if hint else f"known here: {', '.join(hints)}"


def _all_keys(block: type, prefix: str = "") -> list[str]:
    keys = []
    for name, hint in _hints(block).items():
        child = _block_of(hint)
        keys += _all_keys(child, f"{prefix}{name}.") if child else [prefix + name]
    return keys


def _defaults(block: Any, given: Any) -> dict[str, Any]:
    """Default values as a tree, so that interpolations in them resolve against the recipe."""
    values: dict[str, Any] = {}
    hints = _hints(block)
    for f in dataclasses.fields(block):
        child = _block_of(hints[f.name])
        if f.default is not dataclasses.MISSING:
            optional_block_given = child and isinstance(given.get(f.name), dict)
            values[f.name] = _defaults(child, given[f.name]) if optional_block_given else f.default
        elif child:
            values[f.name] = _defaults(child, given.get(f.name) or {})
    return values


def _typed(values: Any) -> Config:
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(Config).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] in ("missing", "missing_argument"):
            raise UserError(f"{key} is required; set it in the recipe or as {key}=...") from None
        message = first["msg"][0].lower() + first["msg"][1:]
        raise UserError(f"{key}={first['input']!r}: {message}") from None
