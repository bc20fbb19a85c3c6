"""The checkout that NEMO_RL_SRC names: path, version, and what is said without one."""

import pytest

from nemo_fp8rl.nemo_rl.recipe.checkout import Checkout
from nemo_fp8rl.nemo_rl.recipe.read_recipe import load_recipe
from tests.nemo_rl.conftest import OF_MAIN, write
from tests.nemo_rl.recipe.conftest import CHILD


def test_a_relative_checkout_is_relative_to_the_working_directory(checkout, recipe, tmp_path, monkeypatch):
    """Not of the folder of the recipe that inherits from it."""
    monkeypatch.chdir(checkout.parent)
    monkeypatch.setenv("NEMO_RL_SRC", checkout.name)
    elsewhere = write(tmp_path / "elsewhere/recipe.yaml", CHILD)
    assert load_recipe(elsewhere).values["grpo"]["seed"] == 42


def test_a_missing_checkout_is_explained_in_one_sentence(refusal, monkeypatch, tmp_path):
    monkeypatch.delenv("NEMO_RL_SRC")
    assert refusal().startswith("NEMO_RL_SRC is not set: clone https://github.com/NVIDIA-NeMo/RL")
    monkeypatch.setenv("NEMO_RL_SRC", str(tmp_path / "nowhere"))
    assert "nowhere is no checkout of NeMo RL" in refusal()


@pytest.mark.parametrize("version", [(0, 7, 3), (0, 6, 0), (0, 8, 0), (1, 12, 3)])
def test_a_recipe_is_read_whatever_the_versions_number(checkout, recipe, version):
    """What a version has decides (`interface_check`)."""
    parts = zip(("MAJOR", "MINOR", "PATCH"), version, strict=True)
    write(checkout / "nemo_rl/package_info.py", "\n".join(f"{name} = {part}" for name, part in parts))
    assert recipe().checkout.version == ".".join(map(str, version))


def test_a_refit_lifecycle_keeps_fp8_weights_valid(main_checkout, recipe):
    assert recipe().checkout.engines_survive_fp8_refit


def test_without_a_refit_lifecycle_fp8_weights_are_processed_once_more(checkout, main_checkout, recipe):
    write(main_checkout / "nemo_rl/models/generation/vllm/vllm_backend.py", OF_MAIN.replace("_lifecycle", ""))
    assert not recipe().checkout.engines_survive_fp8_refit


def test_main_has_defaults_for_an_absent_estimator(checkout):
    """v0.7.0 takes it from the block grpo; a config class that says nothing about it is neither."""
    fields = {"": False, "    adv_estimator: NotRequired[A]\n": True, "    adv_estimator: A = A()\n": False}
    for i, (field, expected) in enumerate(fields.items()):
        root = checkout / str(i)
        write(root / "nemo_rl/algorithms/grpo.py", f"class GRPOConfig:\n    seed: int\n{field}")
        assert Checkout(root, "").takes_estimator_from_grpo == expected, field
