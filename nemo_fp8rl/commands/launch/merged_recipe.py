"""A recipe as one text that contains its parents and overrides, so that it needs no other file where it runs.

Interpolations stay: `${oc.env:NAME}` means the variable where the run is, not where it is submitted. Comments are lost.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.yaml_tree import merge_override, read_with_parents, register_resolvers


def merge(recipe: Path, overrides: Sequence[str], for_nemo_rl: bool) -> str:
    """Return the recipe as YAML. Raises UserError if its loader refuses it or would read the YAML back otherwise."""
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
            tree = merge_override(tree, override)
    return tree


def _values(recipe: Path, overrides: Sequence[str], for_nemo_rl: bool) -> dict[str, Any]:
    """Return the checked and resolved values, by the loader that the run will use."""
    if for_nemo_rl:
        from nemo_fp8rl.nemo_rl.recipe.read_recipe import load_recipe as load_nemo_rl

        return load_nemo_rl(recipe, overrides).values
    from dataclasses import asdict

    from nemo_fp8rl.config.recipe import load

    return asdict(load(recipe, overrides))
