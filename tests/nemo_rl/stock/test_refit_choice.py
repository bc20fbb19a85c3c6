"""Who carries a refit between NeMo RL's own workers, and what the run says of it."""

import pytest

from nemo_fp8rl.config.fp8rl_schema import RefitConfig
from nemo_fp8rl.nemo_rl.refit_transport.settings import ENGINE, settings_of_recipe
from nemo_fp8rl.nemo_rl.stock import refit_choice
from nemo_fp8rl.nemo_rl.stock.refit_choice import choose_refit
from tests.nemo_rl.stock.fake_trainer import policy


def recipe(colocated: bool = False, **generation):
    made = policy()
    made["generation"] |= {"colocated": {"enabled": colocated}, **generation}
    return made


def test_engines_with_gpus_of_their_own_get_our_checkpoint_engine():
    chosen = recipe(refit_transport=None, refit_cfg={"nixl": {"device": "cuda"}})
    said = choose_refit(chosen, RefitConfig(mode="full", transport="shared_memory"), 1, True)
    assert chosen["generation"]["refit_transport"] == ENGINE
    assert chosen["generation"]["refit_cfg"]["nixl"] == {"device": "cuda"}
    settings = settings_of_recipe(chosen["generation"])
    assert (settings.mode, settings.transport, settings.bucket_bytes) == ("full", "shared_memory", 256 * 2**20)
    assert "our checkpoint engine" in said
    assert "nemo_fp8rl.refit.transport=nemo_rl leaves them" in said


def test_over_nodes_it_is_chosen_with_nixl_alone(monkeypatch):
    chosen = recipe()
    assert "nemo_fp8rl.refit.transport=nixl alone" in choose_refit(chosen, RefitConfig(), 2, True)
    assert "refit_transport" not in chosen["generation"]
    monkeypatch.setattr(refit_choice, "find_spec", lambda name: object())
    choose_refit(chosen, RefitConfig(transport="nixl"), 2, True)
    assert settings_of_recipe(chosen["generation"]).transport == "nixl"


@pytest.mark.parametrize(
    ("made", "refit", "has_engines", "reason"),
    [
        (recipe(), RefitConfig(transport="nemo_rl"), True, "nemo_fp8rl.refit.transport=nemo_rl"),
        (recipe(), RefitConfig(), False, "this version has no checkpoint engines"),
        (recipe(colocated=True), RefitConfig(), True, "need policy.generation.colocated.enabled=false"),
        (recipe(), RefitConfig(transport="in_process"), True, "in_process is for our own loop"),
    ],
)
def test_where_it_does_not_fit_the_transport_is_nemo_rls(made, refit, has_engines, reason):
    said = choose_refit(made, refit, 1, has_engines)
    assert said.startswith("refits go by NeMo RL's own transport: ")
    assert reason in said
    assert "refit_transport" not in made["generation"]


def test_a_transport_that_the_recipe_names_stays():
    chosen = recipe(refit_transport="nixl", refit_cfg={"nixl": {}})
    assert choose_refit(chosen, RefitConfig(), 1, True) == "refits go by policy.generation.refit_transport=nixl"
    assert chosen["generation"]["refit_cfg"] == {"nixl": {}}
