"""Overrides on the command line, in Hydra's grammar as NeMo RL uses it, without Hydra.

    a.b=value      change a key that the recipe has
    +a.b=value     add one that it has not
    ++a.b=value    either
    ~a.b           remove one

Values are read as Hydra does (`override_value`), not as YAML: the run would see others than were checked.
"""

import re
from typing import Any, cast

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.typed_tree import shown
from nemo_fp8rl.config.yaml_tree import refusing
from nemo_fp8rl.nemo_rl.recipe.override_value import read_value

FORM = re.compile(r"(?P<sign>~|\+{0,2})(?P<key>[A-Za-z_$][\w$-]*(?:\.[\w$-]+)*)(?P<equals>=(?P<value>.*))?", re.DOTALL)


def key_of(override: str) -> str:
    """The dotted key that it is about. Raises UserError when it has another form than the above."""
    form = FORM.fullmatch(override)
    if not form or not (form["equals"] or form["sign"] == "~"):
        raise UserError(f"override {shown(override)} is not of the form key=value, +key=value, ++key=value or ~key")
    return form["key"]


def apply_override(tree: Any, override: str) -> None:
    """Change the tree as one override says. Raises UserError for one that Hydra would not take here."""
    from omegaconf import OmegaConf

    key, form = key_of(override), cast(re.Match[str], FORM.fullmatch(override))
    sign = form["sign"]
    with refusing(f"override {shown(override)}"):
        exists = _has(tree, key)
        if sign == "~":
            _remove(tree, key, exists)
            return
        value = _read_value(override, form["value"])
        if not sign and not exists:
            raise UserError(f"{key} is not in the recipe; add it with +{override}")
        if sign == "+" and exists and OmegaConf.select(tree, key) is not None and not isinstance(value, (dict, list)):
            raise UserError(f"{key} is already in the recipe; change it with {override[1:]}")
        OmegaConf.update(tree, key, value, merge=True, force_add=True)


def adds(tree: Any, override: str) -> bool:
    """Whether the tree has no such key yet."""
    return override.startswith("+") and not _has(tree, key_of(override))


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


def _read_value(override: str, text: str) -> Any:
    try:
        return read_value(text)
    except RecursionError:
        raise UserError(f"override {shown(override)} cannot be read: it has too many brackets in one another") from None
    except ValueError as error:
        raise UserError(f"override {shown(override)} cannot be read: {error}; quote the value") from None
