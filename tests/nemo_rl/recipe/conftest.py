"""Fixtures that read a recipe from its text, against the stand-in checkout."""

import pytest

from nemo_fp8rl.nemo_rl.recipe.read_recipe import NemoRlRecipe, load_recipe
from tests.nemo_rl.conftest import write
from tests.refusals import refusal_of

CHILD = "defaults: ${oc.env:NEMO_RL_SRC}/examples/configs/grpo.yaml\n"


@pytest.fixture
def recipe(checkout, tmp_path):
    """recipe(text, *overrides) -> the recipe that `load_recipe` reads from this text."""

    def make(text: str = CHILD, *overrides: str) -> NemoRlRecipe:
        return load_recipe(write(tmp_path / "recipe.yaml", text), overrides)

    return make


@pytest.fixture
def refusal(recipe):
    """refusal(text, *overrides) -> the one-line message for the user."""

    def make(text: str = CHILD, *overrides: str) -> str:
        return refusal_of(recipe, text, *overrides)

    return make
