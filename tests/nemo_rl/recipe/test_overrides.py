"""Overrides on the command line and their values, compared with Hydra's own parser where it is installed."""

from contextlib import suppress

import pytest

from nemo_fp8rl.nemo_rl.recipe.keys import at
from nemo_fp8rl.nemo_rl.recipe.overrides import read_value
from tests.nemo_rl import runs
from tests.nemo_rl.recipe.conftest import CHILD

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


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("grpo.seed=7", "grpo.seed", 7),
        ("policy.megatron_cfg.env_vars=null", "policy.megatron_cfg.env_vars", None),
        (r"+policy.hf_config_overrides.rope=x\=y", "policy.hf_config_overrides.rope", "x=y"),
        ("+policy.hf_config_overrides.rope={type:yarn,factor: 4.0}", "policy.hf_config_overrides.rope.type", "yarn"),
        ("+policy.hf_config_overrides.rope={a:'b,c:d'}", "policy.hf_config_overrides.rope.a", "b,c:d"),
        ("+policy.hf_config_overrides.x=[1,2]", "policy.hf_config_overrides.x", [1, 2]),
        ("++grpo.seed=1e-6", "grpo.seed", 1e-6),
        ("+grpo.val_at_end=true", "grpo.val_at_end", True),
        ("grpo.seed=${grpo.num_prompts_per_step}", "grpo.seed", 32),
        ("+env.my-env.x=1", "env.my-env.x", 1),
        ("++checkpointing.checkpoint_dir=10:00:00:00", "checkpointing.checkpoint_dir", "10:00:00:00"),
    ],
)
def test_overrides_in_hydras_grammar(recipe, override, key, value):
    assert at(recipe(CHILD, override).values, key, "nothing") == value


def test_a_key_is_removed(recipe):
    assert "seed" not in recipe(CHILD, "~grpo.seed").values["grpo"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.val_at_end=true", "grpo.val_at_end is not in the recipe; add it with +grpo.val_at_end=true"),
        ("+grpo.seed=3", "grpo.seed is already in the recipe; change it with grpo.seed=3"),
        ("~grpo.val_at_end", "grpo.val_at_end is not in the recipe"),
        ("grpo.seed", "is not of the form key=value"),
        ("=3", "is not of the form key=value"),
        ("grpo.seed=1,2", "sweep"),
        ("grpo.seed=[1", "cannot be read: a comma or ] is missing at character 3; quote the value"),
        ("grpo.seed=x=y", "cannot be read: '=' is not expected at character 2"),
        ("grpo.seed=int(3)", "functions and casts"),
        ("grpo.seed=" + "[" * 5000, "too many brackets"),
        ("grpo.seed=${grpo.nowhere}", "nowhere"),
    ],
)
def test_an_override_that_hydra_would_not_take(refusal, override, message):
    assert message in refusal(CHILD, override)
