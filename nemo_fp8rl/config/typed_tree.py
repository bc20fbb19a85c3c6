"""A tree of values against the typed blocks of `config`: unknown keys, defaults, and pydantic for the types.

Kept apart from `config` so that the blocks themselves need neither OmegaConf nor pydantic.
"""

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from nemo_fp8rl.common.errors import UserError

Block = TypeVar("Block")
LONGEST = 200
"""Characters of a value in a message."""
BITS = 63
"""Bits of a whole number in a recipe, at most: what takes more is too large to compute with, perhaps to be written."""


def shown(value: Any) -> str:
    """It as Python writes it, cut off where it is long: for messages."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        text = f"a {type(value).__name__} with a number of more than 4300 digits"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


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


def check_keys(given: Any, block: type, prefix: str = "", known: Sequence[str] = ()) -> None:
    """Raise UserError for unknown keys, and for what pydantic would quietly convert. prefix: where the block stands;
    known: all keys of what it stands in.
    """
    hints, known = _hints(block), known or _all_keys(block, prefix)
    for key, value in given.items():
        if reason := getattr(block, "removed_keys", {}).get(key):
            raise UserError(f"config key {prefix}{key} was removed, as {reason}; remove it from the recipe")
        if key not in hints:
            raise UserError(f"unknown config key {prefix}{key}; {_nearest(str(key), hints, prefix, known)}")
        child, element = _block_of(hints[key]), _list_of(hints[key])
        if element and value is not None:
            if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
                raise UserError(f"{prefix}{key} must be a list of blocks of keys, got {shown(value)}")
            for i, part in enumerate(value):
                check_keys(part, element, f"{prefix}{key}[{i}].", known)
        elif child and not (value is None and type(None) in get_args(hints[key])):
            if not isinstance(value, dict):
                raise UserError(f"{prefix}{key} must be a block of keys, got {shown(value)}")
            check_keys(value, child, f"{prefix}{key}.", known)
        elif isinstance(value, dict) and not _takes_mapping(hints[key]):
            raise UserError(f"{prefix}{key} must be one value, got the mapping {shown(value)}")
        elif value == "???":
            raise _required(f"{prefix}{key}")
        else:
            for name, hint, one in _single(f"{prefix}{key}", hints[key], value):
                if wanted := _no_number(hint, one):
                    raise UserError(f"{name}={shown(one)}: input should be {wanted}")


def _single(key: str, hint: Any, value: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, type hint, value) of the values in it: itself, or what is in a list."""
    if get_origin(hint) is tuple and isinstance(value, list):
        yield from ((f"{key}[{i}]", get_args(hint)[0], part) for i, part in enumerate(value))
    else:
        yield key, hint, value


def _required(key: str) -> UserError:
    """An entry of a list cannot be merged from the command line, only the whole list."""
    return UserError(f"{key} is required; set it in the recipe{'' if '[' in key else f' or as {key}=...'}")


def _no_number(hint: Any, value: Any) -> str:
    """What the value should be, where the hint is of numbers and it cannot be read as one; else "". What is none must
    not reach the ${mul:...} of a default; a reference, ${...}, is left to pydantic.
    """
    kinds = set(get_args(hint)) or {hint}
    if not kinds <= {int, float, type(None)} or type(value) in kinds:
        return ""
    wanted = "a number" if float in kinds else "a whole number"
    if isinstance(value, str):
        if "${" in value:
            return ""
        try:
            value = float(value)
        except ValueError:
            return wanted
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return "" if is_one and (float in kinds or float(value).is_integer()) else wanted


def _takes_mapping(hint: Any) -> bool:
    return any(get_origin(t) is dict for t in (hint, *get_args(hint)))


def _nearest(key: str, hints: dict[str, Any], prefix: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, hints, 1)
    elsewhere = [name for name in known if name.split(".")[-1] == key]
    hint = f"{prefix}{near[0]}" if near else elsewhere[0] if elsewhere else None
    return f"did you mean {hint}?" if hint else f"known here: {', '.join(hints)}"


def _all_keys(block: type, prefix: str = "") -> list[str]:
    keys = []
    for name, hint in _hints(block).items():
        child = _block_of(hint)
        keys += _all_keys(child, f"{prefix}{name}.") if child else [prefix + name]
    return keys


def defaults(block: Any, given: Any, prefix: str = "") -> dict[str, Any]:
    """Default values as a tree, so that interpolations in them resolve against the recipe. Raises UserError for a key
    that has none and is not given: what refers to it would be named instead. prefix: where the block stands.
    """
    values: dict[str, Any] = {}
    hints = _hints(block)
    for f in dataclasses.fields(block):
        child, key = _block_of(hints[f.name]), prefix + f.name
        if f.default is not dataclasses.MISSING:
            optional_block_given = child and isinstance(given.get(f.name), dict)
            values[f.name] = defaults(child, given[f.name], f"{key}.") if optional_block_given else f.default
        elif child:
            values[f.name] = defaults(child, given.get(f.name) or {}, f"{key}.")
        elif f.default_factory is dataclasses.MISSING and f.name not in given:
            raise _required(key)
    return values


def typed(values: Any, block: type[Block], prefix: str = "") -> Block:
    """The block with these values. Raises UserError, which names the key, for one of another type."""
    from pydantic import TypeAdapter, ValidationError

    check_numbers(values, prefix)
    try:
        return TypeAdapter(block).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        key = f"{prefix.rstrip('.')}{key}".strip(".")
        if first["type"] in ("missing", "missing_argument"):
            raise _required(key) from None
        message = first["msg"][0].lower() + first["msg"][1:]
        raise UserError(f"{key}={shown(first['input'])}: {message}") from None


def check_numbers(values: Any, prefix: str = "") -> None:
    """Raise UserError for a whole number that takes more than BITS bits, anywhere below `prefix`."""
    if isinstance(values, int) and values.bit_length() > BITS:
        raise UserError(f"{prefix.rstrip('.')} is a whole number of more than {BITS} bits; lower it")
    below = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in below:
        check_numbers(value, f"{prefix}{key}.")
