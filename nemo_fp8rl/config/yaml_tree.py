"""A YAML file with its parents as one OmegaConf tree: the part of NeMo RL's config dialect that needs no schema.

`defaults:` names one file or a list, relative to its own file, or shipped recipes by their names; parents are merged
depth first, the file itself last. A top-level block with `_override_: true` replaces the parents' block instead of
merging with it. Works with OmegaConf 2.3, which NeMo RL has, and 2.4.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_fp8rl.common.errors import UserError, single_line
from nemo_fp8rl.config.recipe_names import shipped_recipe
from nemo_fp8rl.config.typed_tree import short_repr

RESOLVERS: dict[str, Callable[..., Any]] = {
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "div": lambda a, b: a / b,
    "max": lambda *values: max(values),
}
"""NeMo RL's resolvers."""
OVERRIDE = "_override_"
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
NOT_SET = re.compile(r"Environment variable '(.+?)' not found")
IS_NULL = "is null, and a number is made of it"


def register_resolvers() -> None:
    """Register RESOLVERS with OmegaConf; 2.4 gave the function the name of an older one that lacks `replace`."""
    import omegaconf

    is_old = omegaconf.__version__.startswith("2.3.")
    register = omegaconf.OmegaConf.register_new_resolver if is_old else omegaconf.OmegaConf.register_resolver
    for name, resolver in RESOLVERS.items():
        register(name, _of_numbers(resolver), replace=True)


def _of_numbers(resolver: Callable[..., Any]) -> Callable[..., Any]:
    """The resolver with an error that names the key of a null. OmegaConf finds the last two parameters by name."""
    from omegaconf import OmegaConf

    def resolve(*values: Any, _node_: Any, _root_: Any) -> Any:
        if None in values:
            named = REFERENCE.findall(str(_node_._value()))
            nulls = [key for key in named if OmegaConf.select(_root_, key) is None]
            raise ValueError(f"{', '.join(nulls) or 'null'} {IS_NULL}")
        return resolver(*values)

    return resolve


def file_errors() -> tuple[type[Exception], ...]:
    """Return the errors of reading a damaged YAML file; PyYAML raises most of them, for dates or nested brackets."""
    import yaml

    python = (OSError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError)
    return (*python, yaml.YAMLError)


@contextmanager
def yaml_errors_as_user_error(source: str) -> Iterator[None]:
    """Turn the errors of YAML and OmegaConf about a user's tree into a UserError that begins with `source`."""
    from omegaconf.errors import OmegaConfBaseException

    errors: tuple[type[Exception], ...] = (*file_errors(), OmegaConfBaseException)
    try:
        yield
    except UserError:
        raise
    except RecursionError:
        raise UserError(f"{source}: blocks are nested too deeply, or in themselves") from None
    except errors as error:
        raise UserError(f"{source}: {_message(error)}") from None


def _message(error: Exception) -> str:
    """The text of the error, without OmegaConf's words around a variable or a null that the user must set."""
    text, key = single_line(error), getattr(error, "full_key", None)
    where = f"{key}: " if key else ""
    if unset := NOT_SET.search(text):
        return f"{where}the environment variable {unset[1]} is not set; set it"
    if IS_NULL in text:
        null = text.partition(IS_NULL)[0].rpartition("interpolation: ")[2]
        return f"{where}{null}{IS_NULL}; set it"
    return text


def read_with_parents(path: Path, children: tuple[Path, ...] = ()) -> Any:
    """Return the file merged over its parents. Raises UserError for a file that cannot be read, and for a cycle."""
    from omegaconf import OmegaConf

    tree = _read(path)
    if path.resolve() in children:
        raise UserError(f"{path}: `defaults:` leads back to the file itself; remove the cycle")
    merged: Any = OmegaConf.create()
    for parent in _take_parents(path, tree):
        merged = _merge(path, merged, read_with_parents(parent, (*children, path.resolve())))
    return _merge(path, merged, tree)


def quote(value: Any) -> str:
    """Return JSON that YAML reads alike: ASCII, other characters as \\u or \\U and not as two surrogates."""
    text = json.dumps(value, ensure_ascii=False)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"{value!r} holds bytes that are not text; give it another name")
    return "".join(c if " " <= c <= "~" else f"\\u{ord(c):04x}" if c <= "\uffff" else f"\\U{ord(c):08x}" for c in text)


def read_override(override: str) -> Any:
    """Return `a.b=value` as a tree; a leading + or ++, which Hydra needs for new keys, is accepted."""
    from omegaconf import OmegaConf

    key, equals, _ = override.partition("=")
    if not equals or not key.strip("+"):
        raise UserError(f"override {short_repr(override)} is not of the form key=value")
    with yaml_errors_as_user_error(f"override {short_repr(override)} cannot be read, quote the value"):
        return OmegaConf.from_dotlist([override.lstrip("+")])


def merge_override(tree: Any, override: str) -> Any:
    """Return the tree with `a.b=value` merged over it. Raises UserError for an override that does not fit."""
    from omegaconf import OmegaConf

    change = read_override(override)
    with yaml_errors_as_user_error(f"override {short_repr(override)} does not fit what the file says"):
        return OmegaConf.merge(tree, change)


def _read(path: Path) -> Any:
    from omegaconf import DictConfig, OmegaConf

    if path.is_dir():
        run = f"; the recipe of this run is {path}/config.yaml" if (path / "config.yaml").is_file() else ""
        raise UserError(f"{path} is a folder; give the path of a YAML file{run}")
    with yaml_errors_as_user_error(f"{path} cannot be read as YAML"):
        try:
            tree = OmegaConf.load(path)
        except FileNotFoundError:
            raise UserError(f"there is no file {path}; give the path of a YAML file") from None
    if not isinstance(tree, DictConfig):
        raise UserError(f"{path} must hold a mapping of blocks (policy:, data:, grpo:, ...)")
    return tree


def _take_parents(path: Path, tree: Any) -> list[Path]:
    """Remove `defaults:` from the tree and return the files that it names."""
    from omegaconf import OmegaConf

    with yaml_errors_as_user_error(f"{path}: `defaults:`"):
        named = tree.pop("defaults", None) or []
        named = OmegaConf.to_container(named, resolve=True) if OmegaConf.is_config(named) else named
    parents = [named] if isinstance(named, str) else named
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise UserError(f"{path}: `defaults:` must be the path of a recipe or a list of paths, got {short_repr(named)}")
    return [_find_parent(path.parent / parent, parent) for parent in parents]


def _find_parent(path: Path, name: str) -> Path:
    return path if path.exists() else shipped_recipe(name) or path


def _merge(path: Path, parent: Any, child: Any) -> Any:
    from omegaconf import OmegaConf

    with yaml_errors_as_user_error(f"{path} cannot be merged with what it inherits"):
        for key in list(child):
            if OmegaConf.is_missing(child, key) or OmegaConf.is_interpolation(child, key):
                continue
            if OmegaConf.is_dict(child[key]) and child[key].get(OVERRIDE):
                child[key].pop(OVERRIDE)
                parent.pop(key, None)
        return OmegaConf.merge(parent, child)


def expand_homes(values: dict[str, Any], keys: Sequence[str]) -> None:
    """Replace a leading ~/ of the paths under these dotted keys by the home folder, as a shell does, in place."""
    for key in keys:
        *blocks, name = key.split(".")
        block: Any = values
        for part in blocks:
            block = block.get(part) if isinstance(block, dict) else None
        if isinstance(block, dict) and str(block.get(name)).startswith("~/"):
            block[name] = os.path.expanduser(block[name])


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by dotted key: {"a": {"b": 1}} -> {"a.b": 1}."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return leaves
