"""A YAML file with its parents, as one OmegaConf tree: the part of NeMo RL's config dialect that needs no schema.

`defaults:` names one file or a list, relative to the file that says so; parents are merged depth first, the file itself
last. A top-level block that says `_override_: true` replaces its parents' instead of merging with it. Works with
OmegaConf 2.3, which NeMo RL has, and 2.4.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_fp8rl.common.errors import UserError, one_line
from nemo_fp8rl.config.typed_tree import shown

RESOLVERS: dict[str, Callable[..., Any]] = {
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "div": lambda a, b: a / b,
    "max": lambda *values: max(values),
}
"""NeMo RL's."""
OVERRIDE = "_override_"
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
NOT_SET = re.compile(r"Environment variable '(.+?)' not found")
IS_NULL = "is null, and a number is made of it"


PATHS = (
    *("logger.log_dir", "checkpointing.checkpoint_dir", "policy.model_name", "policy.tokenizer.name"),
    *("data.train.data_path", "data.validation.data_path", "data.default.data_path"),
)
"""Keys of recipes, ours and NeMo RL's, that may name a folder or a file."""


def register_resolvers() -> None:
    """Make RESOLVERS known to OmegaConf; 2.4 gave the function the name of an older one that lacks `replace`."""
    import omegaconf

    is_old = omegaconf.__version__.startswith("2.3.")
    register = omegaconf.OmegaConf.register_new_resolver if is_old else omegaconf.OmegaConf.register_resolver
    for name, resolver in RESOLVERS.items():
        register(name, _of_numbers(resolver), replace=True)


def _of_numbers(resolver: Callable[..., Any]) -> Callable[..., Any]:
    """The resolver, but that a null is named by its key. OmegaConf knows the last two parameters by their names."""
    from omegaconf import OmegaConf

    def resolve(*values: Any, _node_: Any, _root_: Any) -> Any:
        if None in values:
            named = REFERENCE.findall(str(_node_._value()))
            nulls = [key for key in named if OmegaConf.select(_root_, key) is None]
            raise ValueError(f"{', '.join(nulls) or 'null'} {IS_NULL}")
        return resolver(*values)

    return resolve


def unreadable() -> tuple[type[Exception], ...]:
    """What reading a damaged file may raise: PyYAML most of it, for a date that is none or too many brackets."""
    import yaml

    python = (OSError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError)
    return (*python, yaml.YAMLError)


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn what YAML and OmegaConf raise on a user's tree into a UserError that begins with `what`."""
    from omegaconf.errors import OmegaConfBaseException

    refused: tuple[type[Exception], ...] = (*unreadable(), OmegaConfBaseException)
    try:
        yield
    except UserError:
        raise
    except RecursionError:
        raise UserError(f"{what}: blocks are nested too deeply, or in themselves") from None
    except refused as error:
        raise UserError(f"{what}: {_message(error)}") from None


def _message(error: Exception) -> str:
    """The error without the machinery around what a user mends: a variable, a null."""
    text, key = one_line(error), getattr(error, "full_key", None)
    where = f"{key}: " if key else ""
    if unset := NOT_SET.search(text):
        return f"{where}the environment variable {unset[1]} is not set; set it"
    if IS_NULL in text:
        null = text.partition(IS_NULL)[0].rpartition("interpolation: ")[2]
        return f"{where}{null}{IS_NULL}; set it"
    return text


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


def quoted(value: Any) -> str:
    """JSON in the part of it that YAML reads alike: ASCII, other characters as \\u or \\U and not in two halves."""
    text = json.dumps(value, ensure_ascii=False)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"{value!r} holds bytes that are not text; give it another name")
    return "".join(c if " " <= c <= "~" else f"\\u{ord(c):04x}" if c <= "\uffff" else f"\\U{ord(c):08x}" for c in text)


def read_override(override: str) -> Any:
    """`a.b=value` as a tree; a leading + or ++, which Hydra asks for with new keys, is accepted."""
    from omegaconf import OmegaConf

    key, equals, _ = override.partition("=")
    if not equals or not key.strip("+"):
        raise UserError(f"override {shown(override)} is not of the form key=value")
    with refusing(f"override {shown(override)} cannot be read, quote the value"):
        return OmegaConf.from_dotlist([override.lstrip("+")])


def with_override(tree: Any, override: str) -> Any:
    """The tree with `a.b=value` merged over it. Raises UserError for one that does not fit."""
    from omegaconf import OmegaConf

    own = read_override(override)
    with refusing(f"override {shown(override)} does not fit what the file says"):
        return OmegaConf.merge(tree, own)


def _read(path: Path) -> Any:
    from omegaconf import DictConfig, OmegaConf

    with refusing(f"{path} cannot be read as YAML"):
        try:
            own = OmegaConf.load(path)
        except FileNotFoundError:
            raise UserError(f"there is no file {path}; give the path of a YAML file") from None
    if not isinstance(own, DictConfig):
        raise UserError(f"{path} must hold a mapping of blocks (policy:, data:, grpo:, ...)")
    return own


def _take_parents(path: Path, own: Any) -> list[Path]:
    """Remove `defaults:` and say which files it names."""
    from omegaconf import OmegaConf

    with refusing(f"{path}: `defaults:`"):
        named = own.pop("defaults", None) or []
        named = OmegaConf.to_container(named, resolve=True) if OmegaConf.is_config(named) else named
    parents = [named] if isinstance(named, str) else named
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise UserError(f"{path}: `defaults:` must be the path of a recipe or a list of paths, got {shown(named)}")
    return [path.parent / parent for parent in parents]


def _merge(path: Path, parent: Any, child: Any) -> Any:
    from omegaconf import OmegaConf

    with refusing(f"{path} cannot be merged with what it inherits"):
        for key in list(child):
            if OmegaConf.is_missing(child, key) or OmegaConf.is_interpolation(child, key):
                continue
            if OmegaConf.is_dict(child[key]) and child[key].get(OVERRIDE):
                child[key].pop(OVERRIDE)
                parent.pop(key, None)
        return OmegaConf.merge(parent, child)


def expand_homes(values: dict[str, Any], keys: Sequence[str]) -> None:
    """A leading ~/ of these paths is the home folder, as a shell has it, and no folder of that name."""
    for key in keys:
        *blocks, name = key.split(".")
        block: Any = values
        for part in blocks:
            block = block.get(part) if isinstance(block, dict) else None
        if isinstance(block, dict) and str(block.get(name)).startswith("~/"):
            block[name] = os.path.expanduser(block[name])


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return leaves
