"""The settings of the checkpoint engine, and the ranks that it pairs."""

import pytest

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.nemo_rl.recipe.read_recipe import load_recipe
from nemo_fp8rl.nemo_rl.refit_transport.settings import ENGINE, read_settings, settings_of_recipe
from nemo_fp8rl.nemo_rl.refit_transport.topology import Peer, choose_sources, split_peers
from nemo_fp8rl.refit.manifest import RefitError
from tests.nemo_rl.conftest import write
from tests.nemo_rl.recipe.conftest import CHILD


def test_what_nemo_rl_reads_itself_is_no_unknown_key():
    block = {
        "update_weights_bucket_memory_ratio": 0.1,
        "release_after_refit": True,
        "fp8_layers": {"first": 1, "end": 3},
    }
    assert read_settings(block).layers.quantizes("model.layers.2.mlp.up_proj.weight")
    assert not read_settings({}).layers


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"retrys": 2}, r"unknown config key .*retrys; did you mean .*retries\?"),
        ({"retries": -1}, r"retries=-1 must lie in 0\.\.10"),
        ({"mode": "auto"}, r"mode='auto': input should be 'full' or 'delta'"),
        ({"fp8_layers": {"last": 3}}, r"unknown config key .*fp8_layers\.last"),
    ],
)
def test_a_wrong_setting_is_named(block, message):
    with pytest.raises(UserError, match=message):
        read_settings(block)


@pytest.mark.parametrize("refit_cfg", [None, {}, {"nixl": {}}, {ENGINE: None}])
def test_a_recipe_without_the_block_is_told_so(refit_cfg):
    with pytest.raises(UserError, match=r"needs the block .* which may be empty"):
        settings_of_recipe({"refit_transport": ENGINE, "refit_cfg": refit_cfg})


def test_a_recipe_of_a_checkout_with_the_key_may_name_the_class(checkout, tmp_path):
    config = checkout / "nemo_rl/algorithms/grpo.py"
    field = "    vllm_cfg: VllmSpecificArgs\n"
    refit = f"{field}    refit_transport: NotRequired[str | None]\n    refit_cfg: NotRequired[RefitConfig | None]\n"
    write(config, config.read_text().replace(field, refit) + "\nclass RefitConfig(BaseModel):\n    nixl: int\n")
    block = f"    refit_transport: {ENGINE}\n    refit_cfg:\n      {ENGINE}: {{retries: 2}}\n"
    recipe = write(tmp_path / "recipe.yaml", f"{CHILD}\npolicy:\n  generation:\n{block}")
    generation = load_recipe(recipe).values["policy"]["generation"]
    assert settings_of_recipe(generation).retries == 2


def peer(domain: str) -> Peer:
    return Peer("127.0.0.1", 1, "token", domain, "")


@pytest.mark.parametrize(
    ("policy", "rollout", "sources"),
    [
        ("aaaa", "bb", [0, 1]),
        ("aabb", "bbaa", [2, 3, 0, 1]),
        ("ab", "bbbb", [1, 1, 1, 1]),
        ("aa", "ccccc", [0, 1, 0, 1, 0]),
    ],
)
def test_a_source_is_of_the_same_machine_and_shared_evenly(policy, rollout, sources):
    assert choose_sources([*map(peer, policy)], [*map(peer, rollout)]) == sources


def test_metadata_of_another_engine_is_refused():
    with pytest.raises(RefitError, match="both sides need the same one"):
        split_peers([peer("a").to_metadata(), {"agent_metadata": b"", "rank": 0}], 1, 1)
    with pytest.raises(RefitError, match="1 ranks instead of 2 policy and 1 rollout"):
        split_peers([peer("a").to_metadata()], 2, 1)
