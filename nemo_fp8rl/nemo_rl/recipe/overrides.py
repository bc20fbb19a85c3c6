r"""Overrides on the command line, in Hydra's grammar as NeMo RL uses it, without Hydra.

    a.b=value      change a key of the recipe
    +a.b=value     add a key that the recipe lacks
    ++a.b=value    change or add
    ~a.b           remove a key

Values follow Hydra's grammar, not YAML: otherwise the run would see other values than were checked.

    true, False          a boolean; null: none
    8, 1_000, 1e-6, inf  decimal numbers only: 010, 0x10, 10:00:00 and yes are text
    'a, b', "a"          text; \' or \" stands for a quote
    a b, x/y.z, \,       text without quotes; \ ( ) [ ] { } : = and a comma need a backslash
    ${a.b}               a reference
    [a, 1], {a:1, b: 2}  containers of these

Hydra itself needs an older OmegaConf than the lock file has. Where it is installed, tests compare its parser with this
one (`make test-nemo-rl`). Left out: sweeps, casts and functions.
Source: https://github.com/facebookresearch/hydra/tree/1.3_branch/hydra/grammar
"""

import re
from typing import Any, cast

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.typed_tree import short_repr
from nemo_fp8rl.config.yaml_tree import yaml_errors_as_user_error

FORM = re.compile(r"(?P<sign>~|\+{0,2})(?P<key>[A-Za-z_$][\w$-]*(?:\.[\w$-]+)*)(?P<equals>=(?P<value>.*))?", re.DOTALL)
INT = re.compile(r"[+-]?(0|[1-9](_?[0-9])*)")
FLOAT = re.compile(
    r"[+-]?((0|[1-9](_?[0-9])*)\.|(0|[1-9](_?[0-9])*)?\.[0-9](_?[0-9])*"
    r"|((0|[1-9](_?[0-9])*)\.?|(0|[1-9](_?[0-9])*)?\.[0-9](_?[0-9])*)e[+-]?[0-9](_?[0-9])*|inf|nan)",
    re.IGNORECASE,
)
MAX_DIGITS = 4300
WORDS = {"true": True, "false": False, "null": None}
QUOTED = re.compile(r"""(["'])((\\\\)*|.*?[^\\](\\\\)*)\1""", re.DOTALL)
PART = re.compile(r"\$\{[^}]+\}|(\\[\\()\[\]{}:=, \t])|[A-Za-z0-9_/\-\\+.$%*@?|: \t]")
PART_OF_KEY = re.compile(r"(\\[\\()\[\]{}:=, \t])|[A-Za-z0-9_/\-\\+.$%*@?| \t]")


def parse_key(override: str) -> str:
    """Return the dotted key of an override.

    Raises: UserError if the override has none of the forms above
    """
    form = FORM.fullmatch(override)
    if not form or not (form["equals"] or form["sign"] == "~"):
        raise UserError(
            f"override {short_repr(override)} is not of the form key=value, +key=value, ++key=value or ~key"
        )
    return form["key"]


def apply_override(tree: Any, override: str) -> None:
    """Apply one override to the tree.

    Raises: UserError for an override that Hydra would not accept
    """
    from omegaconf import OmegaConf

    key, form = parse_key(override), cast(re.Match[str], FORM.fullmatch(override))
    sign = form["sign"]
    with yaml_errors_as_user_error(f"override {short_repr(override)}"):
        exists = _has(tree, key)
        if sign == "~":
            _remove(tree, key, exists)
            return
        value = _read_override_value(override, form["value"])
        if not sign and not exists:
            raise UserError(f"{key} is not in the recipe; add it with +{override}")
        if sign == "+" and exists and OmegaConf.select(tree, key) is not None and not isinstance(value, (dict, list)):
            raise UserError(f"{key} is already in the recipe; change it with {override[1:]}")
        OmegaConf.update(tree, key, value, merge=True, force_add=True)


def adds_key(tree: Any, override: str) -> bool:
    """Return whether the override adds a key that the tree lacks."""
    return override.startswith("+") and not _has(tree, parse_key(override))


def _has(tree: Any, key: str) -> bool:
    from omegaconf import OmegaConf

    block, _, last = key.rpartition(".")
    parent = OmegaConf.select(tree, block) if block else tree
    return OmegaConf.is_config(parent) and last in [str(name) for name in _names(parent)]


def _names(block: Any) -> Any:
    from omegaconf import OmegaConf

    return block.keys() if OmegaConf.is_dict(block) else range(len(block))


def _remove(tree: Any, key: str, exists: bool) -> None:
    from omegaconf import OmegaConf

    if not exists:
        raise UserError(f"override '~{key}': {key} is not in the recipe")
    block, _, last = key.rpartition(".")
    del (OmegaConf.select(tree, block) if block else tree)[last]


def _read_override_value(override: str, text: str) -> Any:
    try:
        return read_value(text)
    except RecursionError:
        raise UserError(f"override {short_repr(override)} cannot be read: too many brackets are nested") from None
    except ValueError as error:
        raise UserError(f"override {short_repr(override)} cannot be read: {error}; quote the value") from None


def read_value(text: str) -> Any:
    """Return the value that Hydra reads from the text.

    Raises: ValueError with what is wrong
    """
    if not text.strip(" \t"):
        return ""
    value, end = _read_element(text, 0)
    if text[end : end + 1] == ",":
        raise ValueError("Hydra reads the comma as a sweep")
    if end < len(text):
        raise ValueError(f"{text[end]!r} is not expected at character {end + 1}")
    return value


def _read_element(text: str, start: int) -> tuple[Any, int]:
    """Return the value that begins at `start`, and the position behind it."""
    start = _skip_spaces(text, start)
    if text[start : start + 1] == "[":
        return _read_list(text, start + 1)
    if text[start : start + 1] == "{":
        return _read_mapping(text, start + 1)
    if quoted := QUOTED.match(text, start):
        quote = quoted[1]
        unescaped = re.sub(rf"(\\+)({quote}|$)", lambda match: "\\" * (len(match[1]) // 2) + match[2], quoted[2])
        return unescaped, _skip_spaces(text, quoted.end())
    return _read_unquoted(text, start, PART)


def _read_unquoted(text: str, start: int, part: re.Pattern[str]) -> tuple[Any, int]:
    parts, end = [], start
    while match := part.match(text, end):
        parts.append(match)
        end = match.end()
    while parts and parts[-1][0] in (" ", "\t"):
        parts.pop()
    if not parts:
        raise ValueError(
            "the text ends where a value is expected" if end == len(text) else f"no value begins with {text[end]!r}"
        )
    if text[end : end + 1] == "(":
        raise ValueError("functions and casts are not supported")
    raw = "".join(match[0] for match in parts)
    if raw.lower() in WORDS:
        return WORDS[raw.lower()], end
    if INT.fullmatch(raw):
        if len(raw) > MAX_DIGITS:
            raise ValueError(f"Python reads no number of more than {MAX_DIGITS} digits")
        return int(raw), end
    if FLOAT.fullmatch(raw):
        return float(raw), end
    return "".join(match[0][1:] if match[1] else match[0] for match in parts), end


def _read_list(text: str, start: int) -> tuple[list[Any], int]:
    values: list[Any] = []
    at = _skip_spaces(text, start)
    while text[at : at + 1] != "]" or values:
        value, at = _read_element(text, at)
        values.append(value)
        if _has_comma(text, at, "]"):
            at += 1
        else:
            break
    return values, _skip_spaces(text, at + 1)


def _read_mapping(text: str, start: int) -> tuple[dict[Any, Any], int]:
    values: dict[Any, Any] = {}
    at = _skip_spaces(text, start)
    while text[at : at + 1] != "}" or values:
        key, at = _read_unquoted(text, _skip_spaces(text, at), PART_OF_KEY)
        if text[at : at + 1] != ":":
            raise ValueError(f"the key {key!r} of a mapping has no value")
        values[key], at = _read_element(text, at + 1)
        if _has_comma(text, at, "}"):
            at += 1
        else:
            break
    return values, _skip_spaces(text, at + 1)


def _has_comma(text: str, at: int, end: str) -> bool:
    """Return True at a comma, False at the end of the container."""
    if text[at : at + 1] not in (",", end) or at == len(text):
        raise ValueError(f"a comma or {end} is missing at character {at + 1}")
    return text[at] == ","


def _skip_spaces(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t"):
        at += 1
    return at
