"""A finding in a manifest, and how its parts are read: whatever they are, since a check must not fail on them."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
LABEL_KEY = re.compile(
    r"([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,3})?")
"""Longer exponents are mistakes, too, and more than decimals take."""
LONGEST_QUANTITY = 100
SUFFIXES = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


@dataclass(frozen=True)
class Finding:
    """path: in the manifest. fix: what to do, in one sentence."""

    path: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}; {self.fix}"


def key_path(path: str, key: Any) -> str:
    """spec.groups[0].limits["nvidia.com/gpu"]"""
    if isinstance(key, int) and not isinstance(key, bool):
        return f"{path}[{key}]"
    return f"{path}.{key}".lstrip(".") if re.fullmatch(r"[\w-]+", str(key)) else f'{path}["{key}"]'


def quantity(value: Any) -> Decimal | None:
    """The number that 500m, 16Gi or 2 stand for; None for anything else."""
    text = str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    form = QUANTITY.fullmatch(text) if len(text) <= LONGEST_QUANTITY else None
    if not form:
        return None
    number, suffix = Decimal(form[1]), form[2] or ""
    if suffix in BINARY:
        return number * 2 ** BINARY[suffix]
    power = SUFFIXES[suffix] if suffix in SUFFIXES else int(suffix[1:]) if suffix else 0
    return number.scaleb(power)


def tags(metadata: Mapping[str, Any], path: str) -> Iterator[Finding]:
    """Labels and annotations."""
    for key, value in mapping(metadata.get("annotations")).items():
        if not isinstance(value, str):
            where = key_path(f"{path}.annotations", key)
            yield Finding(where, f"{value!r} is not a string", f'quote it: "{plain(value)}"')
    yield from labels_at(metadata.get("labels"), f"{path}.labels")


def labels_at(labels: Any, path: str) -> Iterator[Finding]:
    for key, value in mapping(labels).items():
        where = key_path(path, key)
        if not isinstance(value, str):
            yield Finding(where, f"{value!r} is not a string", f'quote it: "{plain(value)}"')
        elif not LABEL_VALUE.fullmatch(value):
            yield Finding(
                where,
                f"{value!r} is no label's value",
                "use at most 63 letters, digits, dashes, underscores and dots, a letter or digit at both ends",
            )
        if not LABEL_KEY.fullmatch(str(key)):
            yield Finding(where, "is no label's key", "write it as prefix.example/name, or as name")


def repeated(names: Sequence[Any], path: str, key: str) -> Iterator[tuple[Any, str]]:
    """Each name that is there more than once, and where it is for the last time."""
    for name, count in Counter(str(name) for name in names if name is not None).items():
        if count > 1:
            last = max(i for i, other in enumerate(names) if str(other) == name)
            yield name, f"{path}[{last}].{key}"


def mapping(value: Any) -> Mapping[str, Any]:
    return {str(k): v for k, v in value.items()} if isinstance(value, dict) else {}


def mappings(value: Any) -> list[tuple[int, Mapping[str, Any]]]:
    return [(i, mapping(part)) for i, part in enumerate(value)] if isinstance(value, list) else []


def plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
