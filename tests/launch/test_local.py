"""One machine: who has which of its GPUs, and an exit code that is the driver's."""

import subprocess
import sys

import pytest

from nemo_fp8rl.errors import UserError
from nemo_fp8rl.launch.local import choose, visible_gpus
from tests.conftest import RECIPES


def values(asynchronous: bool = False, trainer: int = 1, engine: int = 1) -> dict:
    return {
        "grpo": {"async_grpo": {"enabled": asynchronous}},
        "policy": {
            "megatron_cfg": {"tensor_model_parallel_size": trainer, "pipeline_model_parallel_size": 1},
            "generation": {"vllm_cfg": {"tensor_parallel_size": engine}},
        },
    }


@pytest.mark.parametrize("gpus", range(9))
def test_a_synchronous_loop_shares_all_gpus(gpus):
    overrides, layout = choose(values(), gpus)
    assert f"cluster.gpus_per_node={max(gpus, 1)}" in overrides
    assert "++policy.generation.colocated.enabled=true" in overrides
    assert layout == f"trainer and engines share {max(gpus, 1)}"


@pytest.mark.parametrize(
    ("gpus", "trainer", "engine", "alone"),
    [(0, 1, 1, 1), (2, 1, 1, 1), (8, 1, 1, 4), (8, 4, 2, 4), (8, 2, 4, 4), (7, 2, 1, 3)],
)
def test_an_asynchronous_one_divides_them(gpus, trainer, engine, alone):
    overrides, layout = choose(values(True, trainer, engine), gpus)
    assert f"++policy.generation.colocated.resources.gpus_per_node={alone}" in overrides
    assert "++policy.generation.colocated.enabled=false" in overrides
    assert layout == f"{max(gpus, 2) - alone} to train and {alone} for engines"


@pytest.mark.parametrize(("gpus", "trainer", "engine"), [(1, 1, 1), (8, 8, 1), (2, 1, 2), (4, 3, 2)])
def test_where_they_cannot_be_divided_it_says_so(gpus, trainer, engine):
    with pytest.raises(UserError, match="async_grpo"):
        choose(values(True, trainer, engine), gpus)


def test_gpus_are_those_that_are_shown(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,5")
    assert visible_gpus() == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == 0


def test_gpus_that_nvidia_smi_cannot_see_are_not_none(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus() == 0
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'Failed to initialize NVML:\n  Driver/library version mismatch'\nexit 18\n")
    fake.chmod(0o700)
    with pytest.raises(UserError, match=r"Failed to initialize NVML: Driver/library .*; mend .* --set gpus_per_node=N"):
        visible_gpus()


def launch(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "nemo_fp8rl.cli", "launch", "local", "--config", str(RECIPES / "tiny_cpu.yaml")]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)


def test_the_exit_code_is_the_drivers_and_a_dry_run_starts_nothing(tmp_path):
    overrides = (f"policy.model_name={tmp_path}/no where", f"logger.log_dir={tmp_path}/log")
    done = launch(*overrides, "--set", "env.A=b c")
    assert done.returncode == 2
    assert f"{tmp_path}/no where" in done.stderr
    dry = launch("--dry-run", *overrides, "--set", "env.A=b c")
    assert dry.returncode == 0
    assert "export A='b c'" in dry.stdout
    assert f"'policy.model_name={tmp_path}/no where'" in dry.stdout
    assert not list(tmp_path.iterdir())
