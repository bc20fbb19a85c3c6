"""The checkout that NEMO_RL_SRC names: path, version, and what is said without one."""

import pytest

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


@pytest.mark.parametrize(("version", "fits"), [((0, 7, 3), True), ((0, 6, 0), False), ((0, 8, 0), False)])
def test_versions(checkout, recipe, refusal, version, fits):
    parts = zip(("MAJOR", "MINOR", "PATCH"), version, strict=True)
    write(checkout / "nemo_rl/package_info.py", "\n".join(f"{name} = {part}" for name, part in parts))
    if fits:
        assert recipe().checkout.version == "0.7.3"
    else:
        assert f"is NeMo RL {'.'.join(map(str, version))}; supported are 0.7.x and main" in refusal()


def test_main_calls_itself_0_6_0(main_checkout, recipe):
    assert recipe().checkout.version == "0.6.0"


def test_a_main_without_the_refit_lifecycle_is_refused(main_checkout, refusal):
    write(main_checkout / "nemo_rl/weight_sync/__init__.py", "")
    write(main_checkout / "nemo_rl/models/generation/vllm/vllm_backend.py", OF_MAIN.replace("_lifecycle", ""))
    assert "is NeMo RL 0.6.0; supported are 0.7.x and main of August 2026" in refusal()
