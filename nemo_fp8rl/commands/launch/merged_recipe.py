"""A recipe as one text: its parents and its overrides are in it, so that it needs no other file where it runs.

Interpolations stay as they are: `${oc.env:NAME}` means the variable there, not here. Comments are lost.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.yaml_tree import read_with_parents, register_resolvers, with_override


def merge(recipe: Path, overrides: Sequence[str], for_nemo_rl: bool) -> str:
    """YAML. Raises UserError for a recipe that would not be read back as it is, and for what its loader refuses."""
    from omegaconf import OmegaConf

    values = _values(recipe, overrides, for_nemo_rl)
    text = OmegaConf.to_yaml(_tree(recipe, overrides, for_nemo_rl))
    with tempfile.TemporaryDirectory(prefix="nemo_fp8rl_") as folder:
        copy = Path(folder) / "recipe.yaml"
        try:
            copy.write_text(text, encoding="utf-8")
            same = _values(copy, (), for_nemo_rl) == values
        except (UnicodeError, UserError):
            same = False
    if not same:
        raise UserError(
            f"{recipe} with its overrides cannot be written as one file that says the same; look for values that are "
            "not text, nor numbers, or that name files relative to the recipe"
        )
    return text


def _tree(recipe: Path, overrides: Sequence[str], for_nemo_rl: bool) -> Any:

    from nemo_fp8rl.nemo_rl.recipe.overrides import apply_override

    register_resolvers()
    tree = read_with_parents(recipe)
    for override in overrides:
        if for_nemo_rl:
            apply_override(tree, override)
        else:
            tree = with_override(tree, override)
    return tree


def _values(recipe: Path, overrides: Sequence[str], for_nemo_rl: bool) -> dict[str, Any]:
    """The recipe's values by the loader that the run will use, checked and resolved."""
    if for_nemo_rl:
        from nemo_fp8rl.nemo_rl.recipe.read_recipe import load_recipe as load_nemo_rl

        return load_nemo_rl(recipe, overrides).values
    from dataclasses import asdict

    from nemo_fp8rl.config.recipe import load

    return asdict(load(recipe, overrides))
