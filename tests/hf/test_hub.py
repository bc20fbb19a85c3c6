"""Models by their names on the Hugging Face hub; its own client, and a hub on loopback."""

import os
import subprocess
import sys

import huggingface_hub
import pytest
from huggingface_hub.constants import HF_HUB_OFFLINE

from nemo_fp8rl.errors import UserError
from nemo_fp8rl.hf.config import read_hf_config
from nemo_fp8rl.hf.hub import checkpoint_folder, revision
from tests.conftest import RECIPES, SMALL
from tests.hf.fake_hub import COMMIT, fake_hub

NAME = "some-org/tiny-qwen3"


@pytest.fixture(scope="module")
def folder(tiny):
    """What is on the hub: more than a run reads."""
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


def test_a_model_comes_from_the_hub_once(hub, folder):
    there = checkpoint_folder(NAME)
    needed = {path.name for path in folder.iterdir()} - {"README.md"}
    assert set(hub) == {path.name for path in there.iterdir()} == needed
    assert (there / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    hub.clear()
    assert (checkpoint_folder(NAME), revision(NAME)) == (there, COMMIT)
    assert not hub
    assert read_hf_config(NAME) == read_hf_config(folder)


def test_what_a_download_left_out_is_fetched(hub, folder):
    (checkpoint_folder(NAME) / "model.safetensors").unlink()
    hub.clear()
    assert (checkpoint_folder(NAME) / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert hub in ([], ["model.safetensors"])  # its content may still be in the cache


def test_a_whole_cache_needs_no_hub(hub, monkeypatch):
    there = checkpoint_folder(NAME)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert checkpoint_folder(NAME) == there


def test_a_folder_comes_before_a_model_of_its_name(hub, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("some-org")
    os.symlink(folder, NAME)
    assert (str(checkpoint_folder(NAME)), revision(NAME)) == (NAME, "")
    assert not hub


@pytest.mark.parametrize("name", ["/absolute/folder", "a/b/c", "folder", "../up"])
def test_only_names_that_the_hub_may_have_are_asked_for(name):
    assert str(checkpoint_folder(name)) == name


@pytest.mark.parametrize("online", [True, False])
def test_a_model_that_is_not_to_be_had_is_named(hub, monkeypatch, online):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", not online)
    with pytest.raises(UserError, match=r"policy\.tokenizer\.name: some-org/other is no folder here.*HF_TOKEN"):
        checkpoint_folder("some-org/other", "policy.tokenizer.name")


def test_a_run_on_a_model_of_the_hub(folder, tmp_path):
    run = tmp_path / "run"
    overrides = (f"policy.model_name={NAME}", f"data.train.data_path={folder.parent}/data.jsonl", *SMALL)
    with fake_hub(NAME, folder) as (address, downloads):
        env = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home")}
        recipe = ("--config", RECIPES / "tiny_cpu.yaml", *overrides, f"logger.log_dir={run}", "grpo.max_num_steps=1")
        words = map(str, (sys.executable, "-m", "nemo_fp8rl.cli", "train", *recipe))
        done = subprocess.run(list(words), env=os.environ | env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert downloads
    assert f'"model": "{NAME} at {COMMIT}"' in (run / "environment.json").read_text()
    saved = run / "checkpoints" / "step_1" / "policy" / "weights"
    assert (saved / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert not (saved / "tokenizer.json").is_symlink()
