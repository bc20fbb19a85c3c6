"""Models by their names on the Hugging Face hub; its own client, and a hub on loopback."""

import os
import shutil
import socket
import subprocess
import sys
import time
from unittest import mock

import huggingface_hub
import pytest
from huggingface_hub.constants import HF_HUB_OFFLINE

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.hf.hub import checkpoint_folder, pin_commits
from nemo_fp8rl.hf.model_config import read_hf_config
from nemo_fp8rl.nemo_rl.recipe.config_from_recipe import complete_for_model, convert_keys, convert_recipe
from tests.conftest import RECIPES, SMALL
from tests.hf.fake_hub import COMMIT, fake_hub
from tests.nemo_rl.recipe.test_config_from_recipe import master

NAME = "some-org/tiny-qwen3"


@pytest.fixture(scope="module")
def folder(tiny):
    """The folder on the hub; it has more files than a run reads."""
    (tiny / "model" / "README.md").write_text("not needed")
    yield tiny / "model"
    (tiny / "model" / "README.md").unlink()


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    """The files that are downloaded from it, as they are."""
    assert HF_HUB_OFFLINE, "tests/conftest.py sees to it"
    with fake_hub(NAME, folder) as (address, downloads):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        files = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield downloads


def test_a_model_comes_from_the_hub_once_and_weights_only_where_they_are_read(hub, folder):
    there = checkpoint_folder(NAME)
    small = {path.name for path in folder.iterdir()} - {"README.md", "model.safetensors"}
    assert set(hub) == {path.name for path in there.iterdir()} == small
    assert checkpoint_folder(NAME, weights=True) == there
    assert (there / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    hub.clear()
    assert checkpoint_folder(f"{NAME}@{COMMIT}", weights=True) == there
    assert not hub
    assert read_hf_config(NAME) == read_hf_config(folder)


def test_what_others_have_put_into_the_cache_is_not_taken_for_the_model(hub, folder):
    huggingface_hub.hf_hub_download(NAME, "config.json")
    there = checkpoint_folder(NAME, weights=True)
    assert (there / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.fixture
def unreachable(hub, monkeypatch) -> str:
    """An endpoint where nobody answers, of a run that is not told to stay offline."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        yield address


def test_a_hub_that_cannot_be_reached_costs_a_cached_model_no_retries(hub, monkeypatch, request):
    there = checkpoint_folder(NAME, weights=True)
    request.getfixturevalue("unreachable")
    begin = time.monotonic()
    assert checkpoint_folder(NAME, weights=True) == checkpoint_folder(f"{NAME}@{COMMIT}") == there
    with pytest.raises(UserError, match=r"does not answer, and it is not in the hub's cache.*HF_TOKEN"):
        checkpoint_folder("some-org/other")
    assert time.monotonic() - begin < 5  # the client retries for half a minute


@pytest.mark.parametrize("listed", [True, False], ids=["listed by the client", "weights are whole"])
def test_a_pinned_commit_on_disk_asks_for_nothing(hub, monkeypatch, listed):
    there = checkpoint_folder(NAME, weights=True)
    if not listed:
        shutil.rmtree(there.parents[1] / "trees")

    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(huggingface_hub, "get_session", refuse)
    monkeypatch.setattr("huggingface_hub._snapshot_download.HfApi", refuse if not listed else mock.Mock())
    assert checkpoint_folder(f"{NAME}@{COMMIT}", weights=True) == checkpoint_folder(f"{NAME}@{COMMIT}") == there


def test_a_commit_without_all_weights_is_completed(hub):
    there = checkpoint_folder(NAME)
    shutil.rmtree(there.parents[1] / "trees")
    hub.clear()
    assert (checkpoint_folder(f"{NAME}@{COMMIT}", weights=True) / "model.safetensors").is_file()
    assert hub == ["model.safetensors"]


def test_a_whole_cache_needs_no_hub(hub, monkeypatch):
    there = checkpoint_folder(NAME, weights=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert checkpoint_folder(NAME, weights=True) == checkpoint_folder(f"{NAME}@{COMMIT}") == there


def test_all_take_the_commit_that_one_has_seen_and_a_run_that_goes_on_keeps_its_own(hub, recipe):
    cfg = recipe(f"policy.model_name={NAME}")
    pinned = pin_commits(cfg).policy
    assert pinned.model_name == pinned.tokenizer.name == f"{NAME}@{COMMIT}"
    begun = {"policy.model_name": f"{NAME}@{'9' * 40}", "policy.tokenizer.name": f"{NAME}-2@{'9' * 40}"}
    assert pin_commits(cfg, begun).policy.model_name == f"{NAME}@{'9' * 40}"
    assert pin_commits(cfg, begun).policy.tokenizer.name == f"{NAME}@{COMMIT}"
    assert pin_commits(recipe()) == recipe()
    branch = pin_commits(recipe(f"policy.model_name={NAME}@main"), begun).policy.model_name
    assert branch == f"{NAME}@{'9' * 40}"
    asked = pin_commits(recipe(f"policy.model_name={NAME}@{COMMIT}"), begun).policy.model_name
    assert asked == f"{NAME}@{COMMIT}"


def test_a_folder_comes_before_a_model_of_its_name(hub, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("some-org")
    os.symlink(folder, NAME)
    assert str(checkpoint_folder(NAME)) == NAME
    assert str(checkpoint_folder(f"{NAME[:-1]}")) == NAME[:-1], "a slip in the name of a folder is not for the hub"
    assert not hub


@pytest.mark.parametrize("name", ["/absolute/folder", "a/b/c", "folder", "../up"])
def test_only_names_that_the_hub_may_have_are_asked_for(name):
    assert str(checkpoint_folder(name)) == name


@pytest.mark.parametrize("online", [True, False])
def test_a_model_that_is_not_to_be_had_is_named(hub, monkeypatch, online):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", not online)
    with pytest.raises(UserError, match=r"policy\.tokenizer\.name: there is no folder some-org/other here.*HF_TOKEN"):
        checkpoint_folder("some-org/other", "policy.tokenizer.name")


@pytest.mark.long
def test_a_run_on_a_model_of_the_hub(folder, tmp_path):
    run = tmp_path / "run"
    overrides = (f"policy.model_name={NAME}", f"data.train.data_path={folder.parent}/data.jsonl", *SMALL)
    with fake_hub(NAME, folder) as (address, downloads):
        online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        env = online | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home")}
        recipe = ("--config", RECIPES / "tiny_cpu.yaml", *overrides, f"logger.log_dir={run}", "grpo.max_num_steps=1")
        words = list(map(str, (sys.executable, "-m", "nemo_fp8rl.cli", "train", *recipe)))
        done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert downloads.count("model.safetensors") == 1
    assert f"model_name: {NAME}@{COMMIT}" in (run / "config.yaml").read_text()
    saved = run / "checkpoints" / "step_1" / "policy" / "weights"
    assert (saved / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert not (saved / "tokenizer.json").is_symlink()


def test_a_recipe_for_nemo_rl_names_a_commit_in_its_loop_and_leaves_it_to_ours(hub, tiny):
    """Our own loop pins the commit itself: it knows the recorded recipe of a resumed run."""
    values = master(tiny, policy__model_name=NAME, policy__tokenizer={"name": NAME})
    assert convert_recipe(values).policy.model_name == f"{NAME}@{COMMIT}"
    policy = complete_for_model(convert_keys(values)).policy
    assert policy.model_name == policy.tokenizer.name == NAME


def test_a_folder_of_the_owners_name_is_said_to_hide_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    with pytest.raises(UserError, match=r"a folder Qwen is here, so the model was looked for in it and not on the hub"):
        read_hf_config("Qwen/Qwen3-0.6B")
