r"""The value of an override as Hydra's grammar reads it: a run is to see what was checked. Hydra itself asks for an
older OmegaConf than the lock's; where it is installed its parser is held against this one (`make test-nemo-rl`).

    true, False          a boolean; null: none
    8, 1_000, 1e-6, inf  numbers, decimal ones alone: 010, 0x10, 10:00:00 and yes are text
    'a, b', "a"          text, with \' or \" for a quote within
    a b, x/y.z, \,       text as it is; what is \ ( ) [ ] { } : = or a comma there stands behind a backslash
    ${a.b}               a reference
    [a, 1], {a:1, b: 2}  containers of these

Source: https://github.com/facebookresearch/hydra/tree/1.3_branch/hydra/grammar. Left out: sweeps, casts and functions.
"""

import re
from typing import Any

INT = re.compile(r"[+-]?(0|[1-9](_?[0-9])*)")
FLOAT = re.compile(
    r"[+-]?((0|[1-9](_?[0-9])*)\.|(0|[1-9](_?[0-9])*)?\.[0-9](_?[0-9])*"
    r"|((0|[1-9](_?[0-9])*)\.?|(0|[1-9](_?[0-9])*)?\.[0-9](_?[0-9])*)e[+-]?[0-9](_?[0-9])*|inf|nan)",
    re.IGNORECASE,
)
MOST_DIGITS = 4300
WORDS = {"true": True, "false": False, "null": None}
QUOTED = re.compile(r"""(["'])((\\\\)*|.*?[^\\](\\\\)*)\1""", re.DOTALL)
PART = re.compile(r"\$\{[^}]+\}|(\\[\\()\[\]{}:=, \t])|[A-Za-z0-9_/\-\\+.$%*@?|: \t]")
PART_OF_KEY = re.compile(r"(\\[\\()\[\]{}:=, \t])|[A-Za-z0-9_/\-\\+.$%*@?| \t]")


def read_value(text: str) -> Any:
    """Raises ValueError, which says what is wrong with it."""
    if not text.strip(" \t"):
        return ""
    value, end = _element(text, 0)
    if text[end : end + 1] == ",":
        raise ValueError("it has a comma, which Hydra takes for a sweep")
    if end < len(text):
        raise ValueError(f"{text[end]!r} is not expected at its character {end + 1}")
    return value


def _element(text: str, start: int) -> tuple[Any, int]:
    """The value that begins there, and where what follows it does."""
    start = _past_spaces(text, start)
    if text[start : start + 1] == "[":
        return _list(text, start + 1)
    if text[start : start + 1] == "{":
        return _mapping(text, start + 1)
    if quoted := QUOTED.match(text, start):
        quote = quoted[1]
        halved = re.sub(rf"(\\+)({quote}|$)", lambda found: "\\" * (len(found[1]) // 2) + found[2], quoted[2])
        return halved, _past_spaces(text, quoted.end())
    return _unquoted(text, start, PART)


def _unquoted(text: str, start: int, part: re.Pattern[str]) -> tuple[Any, int]:
    parts, end = [], start
    while found := part.match(text, end):
        parts.append(found)
        end = found.end()
    while parts and parts[-1][0] in (" ", "\t"):
        parts.pop()
    if not parts:
        raise ValueError(
            "it ends where a value is expected" if end == len(text) else f"no value begins with {text[end]!r}"
        )
    if text[end : end + 1] == "(":
        raise ValueError("functions and casts are not read here")
    raw = "".join(found[0] for found in parts)
    if raw.lower() in WORDS:
        return WORDS[raw.lower()], end
    if INT.fullmatch(raw):
        if len(raw) > MOST_DIGITS:
            raise ValueError(f"a number of more than {MOST_DIGITS} digits is none that Python reads")
        return int(raw), end
    if FLOAT.fullmatch(raw):
        return float(raw), end
    return "".join(found[0][1:] if found[1] else found[0] for found in parts), end


def _list(text: str, start: int) -> tuple[list[Any], int]:
    values: list[Any] = []
    at = _past_spaces(text, start)
    while text[at : at + 1] != "]" or values:
        value, at = _element(text, at)
        values.append(value)
        if _goes_on(text, at, "]"):
            at += 1
        else:
            break
    return values, _past_spaces(text, at + 1)


def _mapping(text: str, start: int) -> tuple[dict[Any, Any], int]:
    values: dict[Any, Any] = {}
    at = _past_spaces(text, start)
    while text[at : at + 1] != "}" or values:
        key, at = _unquoted(text, _past_spaces(text, at), PART_OF_KEY)
        if text[at : at + 1] != ":":
            raise ValueError(f"the key {key!r} of a mapping has no value")
        values[key], at = _element(text, at + 1)
        if _goes_on(text, at, "}"):
            at += 1
        else:
            break
    return values, _past_spaces(text, at + 1)


def _goes_on(text: str, at: int, end: str) -> bool:
    """Whether a comma is there, or the end of the container."""
    if text[at : at + 1] not in (",", end) or at == len(text):
        raise ValueError(f"a comma or {end} is missing at its character {at + 1}")
    return text[at] == ","


def _past_spaces(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t"):
        at += 1
    return at
