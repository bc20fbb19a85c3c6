"""The nodes where Ray may place workers, and the environment of a worker that needs no Ray."""

import os
import socket
from typing import Any

import pytest
import ray

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.workers import ROLE, find_cluster, is_single_host, ray_cluster, start_workers
from tests.conftest import COLOCATED, RECIPES

TRAIN, GENERATION = {ROLE: "train"}, {ROLE: "generation"}


def node(host: str, labels: dict[str, str], alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeManagerHostname": host, "Labels": labels, "Alive": alive, "Resources": resources}


HEAD = node("head", {}, memory=1e9)  # a head of Kubernetes, which offers no CPUs
LOGIN = node("login", {}, CPU=4)
A, B = node("a", TRAIN, CPU=8, GPU=8), node("b", GENERATION, CPU=8, GPU=8)


@pytest.mark.parametrize(
    ("nodes", "overrides", "one"),
    [
        pytest.param([A], (), True, id="one"),
        pytest.param([HEAD, A], (), True, id="a head without CPUs"),
        pytest.param([LOGIN, A], (), True, id="a node without GPUs beside one with some"),
        pytest.param([A, node("b", TRAIN, CPU=8, GPU=8)], (), False, id="two for the ranks"),
        pytest.param([A, node("b", TRAIN, alive=False, CPU=8, GPU=8)], (), True, id="one of two is dead"),
        pytest.param([A, node("a", GENERATION, CPU=8, GPU=8)], (), True, id="both roles on one host"),
        pytest.param([A, B], (), False, id="engines on another host"),
        pytest.param([A, B], COLOCATED, True, id="engines where the ranks are"),
        pytest.param([LOGIN, node("a", {}, CPU=8)], (), False, id="two without GPUs"),
    ],
)
def test_only_hosts_that_could_hold_a_worker_count(monkeypatch, nodes, overrides, one):
    alive = [node for node in nodes if node["Alive"]]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": sum(n["Resources"].get("GPU", 0) for n in alive)})
    assert is_single_host(load(RECIPES / "tiny_cpu.yaml", ["cluster.backend=ray", *overrides])) == one


def test_gpus_that_are_hidden_decide_nothing(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(ray, "nodes", lambda: [LOGIN, A])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 8})
    assert not is_single_host(load(RECIPES / "tiny_cpu.yaml", ["cluster.backend=ray"]))


def test_a_process_of_both_roles_has_the_environment_of_both_and_says_if_it_is_late(monkeypatch, caplog):
    for name in ("OF_RANKS", "OF_ENGINES"):
        monkeypatch.setenv(name, "before")
    given = ("policy.megatron_cfg.env_vars.OF_RANKS=r", "policy.generation.vllm_cfg.env_vars.OF_ENGINES=e")
    start_workers(object, "train", 1, load(RECIPES / "tiny_cpu.yaml", given))
    assert (os.environ["OF_RANKS"], os.environ["OF_ENGINES"]) == ("r", "e")
    assert "OF_RANKS, OF_ENGINES changes after libraries were imported" in caplog.text


@pytest.fixture
def started(monkeypatch, tmp_path):
    """A socket instead of a cluster that `ray start` began, and the file with its address."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        (tmp_path / "ray").mkdir()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        (tmp_path / "ray/ray_current_cluster").write_text(address)
        yield listening, address


def test_a_cluster_of_this_machine_is_found_while_it_answers(monkeypatch, started, tmp_path):
    listening, address = started
    assert find_cluster()
    assert os.environ.pop("RAY_ADDRESS") == address
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert find_cluster()  # empty is as if it were not set
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")
    assert not find_cluster()
    assert os.environ["RAY_ADDRESS"] == "elsewhere:1"
    monkeypatch.delenv("RAY_ADDRESS")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 4321)
        assert find_cluster() == (tmp_path.stat().st_uid == 0)  # root's
        os.environ.pop("RAY_ADDRESS", None)
    listening.close()
    assert not find_cluster()
    assert "RAY_ADDRESS" not in os.environ


@pytest.mark.parametrize("content", ["", "no address", "host:port"])
def test_a_file_of_rays_that_says_nothing_is_passed_over(started, tmp_path, content):
    (tmp_path / "ray/ray_current_cluster").write_text(content)
    assert not find_cluster()


def test_a_joined_cluster_gets_the_settings_and_no_secrets(monkeypatch):
    settings = {"NCCL_DEBUG": "INFO", "HF_HOME": "/models", "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE": "163840"}
    secrets = {"HF_TOKEN": "x", "HF_ENDPOINT": "https://me:password@mirror.test"}
    environment = {**settings, **secrets, "CUDA_VISIBLE_DEVICES": "1", "OTHER": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    forwarded = {name: value for name, value in ray_cluster._forwarded_variables().items() if name in environment}
    assert forwarded == settings


@pytest.mark.parametrize("address", [None, "192.0.2.1:6379"])
def test_a_cluster_that_this_process_is_in_stays_as_it_is(monkeypatch, address):
    """As in a user's own script that NeMo RL's init_ray joined to a cluster without RAY_ADDRESS."""
    for name, value in (("RAY_ADDRESS", address), ("RAY_AUTH_MODE", None)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("it joined or started another"))
    ray_cluster.connect(1)
    assert "RAY_AUTH_MODE" not in os.environ


def test_a_cluster_of_our_own_needs_a_token_before_ray_is_imported(monkeypatch):
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(UserError, match="Ray was imported before it could be given a token"):
        ray_cluster.connect(1)
