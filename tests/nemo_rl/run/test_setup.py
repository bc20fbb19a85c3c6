"""Whose workers a run of NeMo RL's loop has: as asked, or as there are GPUs. Ray's GPUs here are its own accounting."""

import os
import subprocess
import sys

import pytest

from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.nemo_rl.run.setup import uses_package_workers
from tests.nemo_rl import runs

PRETENDED = """
import os, subprocess, sys
import ray
from ray.cluster_utils import Cluster

cluster = Cluster()
for gpu in sys.argv[1].split(","):
    cluster.add_node(num_cpus=8, num_gpus=2, include_dashboard=False, resources={f"accelerator_type:{gpu}": 1})
cluster.wait_for_nodes()
code = subprocess.run([sys.executable, *sys.argv[2:]], env=os.environ | {"RAY_ADDRESS": cluster.address}).returncode
cluster.shutdown()
sys.exit(code)
"""
ASK = """
import os
import ray
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.nemo_rl.run.setup import check_cluster, uses_package_workers

print([uses_package_workers(workers, "fp8_e2e") for workers in ("auto", "ours", "nemo_rl")], ray.is_initialized())
ray.init(log_to_driver=False)
for flow in ("fp8_rollout", "fp8_e2e"):
    try:
        print(check_cluster(flow))
    except UserError as error:
        print(error)
os.environ["CUDA_VISIBLE_DEVICES"] = ""
print(uses_package_workers("auto", "fp8_e2e"), check_cluster("fp8_e2e"))
"""


def with_pretended_gpus(*arguments: str, gpus: str = "H100", **environment: str) -> str:
    """What a script says that joins a cluster with nodes of these, each with two."""
    shown = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"} | environment
    command = [sys.executable, "-c", PRETENDED, gpus, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=shown, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_without_gpus_they_are_ours(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert uses_package_workers("auto", "fp8_e2e") and uses_package_workers("ours", "fp8_e2e")
    with pytest.raises(UserError, match=r"nemo_fp8rl\.workers=nemo_rl: .* set it to ours"):
        uses_package_workers("nemo_rl", "fp8_e2e")


@pytest.mark.parametrize("address", ["banana", "127.0.0.1:1", "127.0.0.1:port", "127.0.0.1:99999"])
def test_a_cluster_that_cannot_be_joined_is_one_sentence_and_no_wait(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match=rf"^RAY_ADDRESS={address}: that Ray cluster cannot be joined .*; start it"):
        uses_package_workers("auto", "fp8_e2e")


def test_an_address_that_is_empty_is_none(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert uses_package_workers("auto", "fp8_e2e")


@pytest.mark.long
def test_gpus_of_a_cluster_make_them_nemo_rls_unless_ours_are_asked_for_and_are_held_to_the_flow():
    whose, *able, hidden = with_pretended_gpus("-c", ASK, gpus="A100,L40S").splitlines()
    assert (whose, hidden) == ("[False, True, False] False", "True None")
    assert able[0] == "None"  # an L40S can
    assert "blockwise FP8 training needs a GPU of compute capability 9.0 or higher, and L40S has 8.9: set" in able[1]


@pytest.mark.nemo_rl
@runs.needs_checkout
def test_ours_run_nemo_rls_loop_where_there_are_gpus(warm, tmp_path):
    """Two ranks and two engines beside them, which a cluster of two GPUs has no room for otherwise."""
    logs = tmp_path / "logs"
    keys = [*runs.overrides(warm, logs), "cluster.gpus_per_node=2", "policy.train_micro_batch_size=32"]
    keys += ["policy.logprob_batch_size=32", "grpo.max_num_steps=2", "++nemo_fp8rl.workers=ours"]
    command = ["-m", "nemo_fp8rl.cli", "nemo", "--config", str(runs.RECIPE), *keys]
    said = with_pretended_gpus(*command, **runs.environment(tmp_path))
    assert "flow fp8_e2e" in said
    values = runs.logged(logs)
    assert len(values["train/reward"]) == 2
    assert max(values["train/token_mult_prob_error"]) < 1.001
