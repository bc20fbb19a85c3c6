"""Where Ray may put workers, by what it says of its nodes."""

from typing import Any

import pytest
import ray

from nemo_fp8rl.recipe import load
from nemo_fp8rl.workers import ROLE, on_one_host
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
    assert on_one_host(load(RECIPES / "tiny_cpu.yaml", ["cluster.backend=ray", *overrides])) == one


def test_gpus_that_are_hidden_decide_nothing(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(ray, "nodes", lambda: [LOGIN, A])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 8})
    assert not on_one_host(load(RECIPES / "tiny_cpu.yaml", ["cluster.backend=ray"]))
