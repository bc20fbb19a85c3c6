"""Read a recipe: YAML, `defaults:` inheritance, interpolation and overrides by OmegaConf, types by pydantic.

Kept apart from `config` so that the typed blocks need nothing but the standard library.
"""

import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

from nemo_fp8rl.config import Config, check
from nemo_fp8rl.errors import UserError


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The recipe at `path` with `key=value` overrides, checked. Raises UserError for anything wrong in either."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    _register_resolvers()
    tree = _read_with_parents(Path(path), ())
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key.strip("+"):
            raise UserError(f"override {override!r} is not of the form key=value")
        tree = OmegaConf.merge(tree, OmegaConf.from_dotlist([override.lstrip("+")]))
    try:
        given = OmegaConf.to_container(tree)
        _refuse_unknown_keys(given, Config, "")
        tree = OmegaConf.merge(_defaults(Config, given), tree)
        values = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None
    cfg = _typed(values)
    check(cfg)
    return cfg


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

    if path.resolve() in children:
        raise UserError(f"{path}: `defaults:` leads back to the file itself; remove the cycle")
    try:
        own = OmegaConf.load(path)
    except FileNotFoundError:
        raise UserError(f"there is no recipe {path}; give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(own, DictConfig):
        raise UserError(f"{path} must hold a mapping of blocks (policy:, data:, grpo:, ...)")
    parents = own.pop("defaults", [])
    merged: Any = OmegaConf.create()
    for parent in [parents] if isinstance(parents, str) else parents:
        merged = OmegaConf.merge(merged, _read_with_parents(path.parent / parent, (*children, path.resolve())))
    return OmegaConf.merge(merged, own)


def _block_of(hint: Any) -> Any:
    """The dataclass behind a type hint, also behind `Block | None`; None when there is none."""
    return next((t for t in (hint, *get_args(hint)) if dataclasses.is_dataclass(t)), None)


def _refuse_unknown_keys(given: Any, block: type, prefix: str) -> None:
    hints = get_type_hints(block)
    for key, value in given.items():
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, 1)
            elsewhere = [k for k in _all_keys(Config) if k.split(".")[-1] == key]
            hint = f"{prefix}{near[0]}" if near else elsewhere[0] if elsewhere else None
            advice = f"did you mean {hint}?" if hint else f"known here: {', '.join(hints)}"
            raise UserError(f"unknown config key {prefix}{key}; {advice}")
        child = _block_of(hints[key])
        if child and value is not None:
            if not isinstance(value, dict):
                raise UserError(f"{prefix}{key} must be a block of keys, got {value!r}")
            _refuse_unknown_keys(value, child, f"{prefix}{key}.")


def _all_keys(block: type, prefix: str = "") -> list[str]:
    keys = []
    for name, hint in get_type_hints(block).items():
        child = _block_of(hint)
        keys += _all_keys(child, f"{prefix}{name}.") if child else [prefix + name]
    return keys


def _defaults(block: Any, given: Any) -> dict[str, Any]:
    """Default values as a tree, so that interpolations in them resolve against the recipe."""
    values: dict[str, Any] = {}
    hints = get_type_hints(block)
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
