"""Values of overrides, as Hydra reads them: its own parser says the same of each, where it is installed."""

from contextlib import suppress

import pytest

from nemo_fp8rl.nemo_rl.recipe.overrides import read_value
from tests.nemo_rl import runs

VALUES = {
    "": "",
    "1_000": 1000,
    "+3": 3,
    "010": "010",
    "0x10": "0x10",
    "10:00:00:00": "10:00:00:00",
    "2026-01-01": "2026-01-01",
    "1e-6": 1e-6,
    "1.": 1.0,
    ".5": 0.5,
    ".inf": ".inf",
    "-inf": float("-inf"),
    "yes": "yes",
    "off": "off",
    "TrUe": True,
    "false": False,
    "NULL": None,
    "'1'": "1",
    "''": "",
    r'"a\"b"': 'a"b',
    r"'it\'s \a \\'": "it's \\a \\",
    "'a, b'": "a, b",
    " a b ": "a b",
    r"a\,b\ ": "a,b ",
    "${a.b}": "${a.b}",
    "/x/${a}-y.z": "/x/${a}-y.z",
    "[]": [],
    "[ 1 , a b, 'c,d', [null]]": [1, "a b", "c,d", [None]],
    "{}": {},
    "{a:1,b-c: x:y, 2: {d.e: [on]}}": {"a": 1, "b-c": "x:y", 2: {"d.e": ["on"]}},
}
REFUSED = (
    "a,b",
    "[1",
    "[1,]",
    "{a}",
    "{'a':1}",
    "x=y",
    "'a'b",
    "a#b",
    "\u00e9",
    "a]",
    "~",
    "${a:${b}}",
    "'",
    "f(1)",
    "a\nb",
)


@pytest.mark.parametrize(("text", "value"), VALUES.items())
def test_a_value(text, value):
    read = read_value(text)
    assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_no_value(text):
    with pytest.raises(ValueError, match=r"\w"):
        read_value(text)


@pytest.mark.nemo_rl
@runs.needs_checkout
def test_hydras_own_parser_says_the_same():
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    for text, value in VALUES.items():
        assert parser.parse_override(f"key={text}").value() == value, text
    for text in REFUSED:
        with suppress(HydraException):
            assert parser.parse_override(f"key={text}").is_sweep_override(), text
