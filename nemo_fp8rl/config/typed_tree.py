"""Make a typed block from a tree of values: unknown keys, defaults, types (by pydantic) and ranges.

The blocks of `schema` need neither OmegaConf nor pydantic; this module imports pydantic when it checks types.
"""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.field_rules import Block, all_fields, check_fields, fields_of

AnyBlock = TypeVar("AnyBlock")
LONGEST = 200
"""Characters of a value in a message."""
BITS = 63
"""Bits of a whole number in a recipe, at most: a larger one cannot be computed with, perhaps not even be written."""


def short_repr(value: Any) -> str:
    """Return the value as Python writes it, cut off where it is long; for messages."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        text = f"a {type(value).__name__} with a number of more than 4300 digits"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def read_block(values: Mapping[str, Any], block: type[AnyBlock], prefix: str) -> AnyBlock:
    """Return the block with these values and its defaults.

    values:  without references to other keys
    prefix:  what stands before the keys in a recipe, such as "loss_fn."
    Raises:  UserError, naming the key, for an unknown key, a type or a value out of range
    """
    check_keys(values, block, prefix)
    return to_block({**defaults(block, values, prefix), **values}, block, prefix)


def check_keys(values: Any, block: type, prefix: str = "", known: Sequence[str] = ()) -> None:
    """Raise UserError for an unknown key, and for a value that pydantic would convert without a word.

    prefix:  what stands before the keys of the block
    known:   all keys of the whole recipe, to find the nearest of an unknown key
    """
    fields = {field.name: field for field in fields_of(block, prefix)}
    known = known or [field.key for field in all_fields(block, prefix) if not field.block]
    for name, value in values.items():
        if reason := _removed_keys(block).get(name):
            raise UserError(f"config key {prefix}{name} was removed, as {reason}; remove it from the recipe")
        if name not in fields:
            raise UserError(f"unknown config key {prefix}{name}; {_nearest(str(name), list(fields), prefix, known)}")
        field = fields[name]
        if field.element and value is not None:
            if not isinstance(value, list | tuple) or not all(isinstance(entry, dict) for entry in value):
                raise UserError(f"{field.key} must be a list of blocks of keys, got {short_repr(value)}")
            for i, entry in enumerate(value):
                check_keys(entry, field.element, f"{field.key}[{i}].", known)
        elif field.block and not (value is None and type(None) in get_args(field.hint)):
            if not isinstance(value, dict):
                names = ", ".join(f"{field.key}.{inner.name}" for inner in fields_of(field.block)[:3])
                empty = f"; leave it out, or set what it holds: {names}, ..." if value is None else ""
                shown = "null" if value is None else short_repr(value)
                raise UserError(f"{field.key} must be a block of keys, got {shown}{empty}")
            check_keys(value, field.block, f"{field.key}.", known)
        elif isinstance(value, dict) and not _takes_mapping(field.hint):
            raise UserError(f"{field.key} must be one value, got the mapping {short_repr(value)}")
        elif value == "???":
            raise _required(field.key)
        else:
            for key, hint, entry in _entries(field.key, field.hint, value):
                if expected := _expected_number(hint, entry):
                    raise UserError(f"{key}={short_repr(entry)}: input should be {expected}")


def defaults(block: Any, values: Any, prefix: str = "") -> dict[str, Any]:
    """Return the default values as a tree, so that references in them resolve against the recipe.

    values:  the keys that the recipe gives; they decide about optional blocks and presets
    prefix:  what stands before the keys of the block
    Raises:  UserError for a key without default that `values` lacks; later a reference to it would be named instead
    """
    tree: dict[str, Any] = {}
    for field in fields_of(block, prefix):
        if field.block and field.default is None:
            is_given = isinstance(values.get(field.name), dict)
            tree[field.name] = defaults(field.block, values[field.name], f"{field.key}.") if is_given else None
        elif field.block:
            tree[field.name] = defaults(field.block, values.get(field.name) or {}, f"{field.key}.")
        elif field.default is not dataclasses.MISSING:
            tree[field.name] = field.default
        elif field.name not in values:
            raise _required(field.key)
    return {**tree, **block.preset_values(values)} if issubclass(block, Block) else tree


def to_block(values: Any, block: type[AnyBlock], prefix: str = "") -> AnyBlock:
    """Return the block with these values, or a value of another type hint. Raises UserError, naming the key, for a
    value of another type or out of range.
    """
    from pydantic import TypeAdapter, ValidationError

    check_numbers(values, prefix)
    try:
        made = TypeAdapter(block).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        key = f"{prefix.rstrip('.')}{key}".strip(".")
        if first["type"] in ("missing", "missing_argument"):
            raise _required(key) from None
        message = first["msg"][0].lower() + first["msg"][1:]
        raise UserError(f"{key}={short_repr(first['input'])}: {message}") from None
    if dataclasses.is_dataclass(made):
        check_fields(made, prefix)
    return made


def check_numbers(values: Any, prefix: str = "") -> None:
    """Raise UserError for a whole number of more than BITS bits, anywhere below `prefix`."""
    if isinstance(values, int) and values.bit_length() > BITS:
        raise UserError(f"{prefix.rstrip('.')} is a whole number of more than {BITS} bits; lower it")
    entries = (
        values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list | tuple) else ()
    )
    for key, value in entries:
        check_numbers(value, f"{prefix}{key}.")


def _removed_keys(block: type) -> Mapping[str, str]:
    return block.removed_keys if issubclass(block, Block) else {}


def _entries(key: str, hint: Any, value: Any) -> Iterator[tuple[str, Any, Any]]:
    """(key, type hint, value) of the value itself, or of each entry of a list."""
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        yield from ((f"{key}[{i}]", get_args(hint)[0], entry) for i, entry in enumerate(value))
    else:
        yield key, hint, value


def _required(key: str) -> UserError:
    """The error of a missing key. The command line can give a whole list, but not a key of one entry."""
    return UserError(f"{key} is required; set it in the recipe{'' if '[' in key else f' or as {key}=...'}")


def _expected_number(hint: Any, value: Any) -> str:
    """Return the expected kind of number if the hint allows numbers alone and the value is none; else an empty text.

    Such a value must not reach the ${mul:...} of a default. A reference, ${...}, is left to pydantic.
    """
    kinds = set(get_args(hint)) or {hint}
    if not kinds <= {int, float, type(None)} or type(value) in kinds:
        return ""
    expected = "a number" if float in kinds else "a whole number"
    if isinstance(value, str):
        if "${" in value:
            return ""
        try:
            value = float(value)
        except ValueError:
            return expected
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return "" if is_number and (float in kinds or float(value).is_integer()) else expected


def _takes_mapping(hint: Any) -> bool:
    return any(get_origin(option) is dict for option in (hint, *get_args(hint)))


def _nearest(name: str, names: Sequence[str], prefix: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    elsewhere = [key for key in known if key.split(".")[-1] == name]
    hint = f"{prefix}{near[0]}" if near else elsewhere[0] if elsewhere else None
    return f"did you mean {hint}?" if hint else f"known here: {', '.join(names)}"
