"""One machine: who has which of its GPUs, and an exit code that is the driver's."""

import os
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

from nemo_fp8rl.cli import main
from nemo_fp8rl.commands.launch.local import choose, choose_for_train, render, visible_gpus
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from tests.commands.launch.conftest import settings, shellcheck
from tests.commands.launch.slurm.test_job_script import HOSTILE
from tests.conftest import COLOCATED, RECIPES

TINY = RECIPES / "tiny_cpu.yaml"
SMALL_BATCHES = ("policy.train_micro_batch_size=32",)
APART = ("policy.generation.colocated.enabled=false",)


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


def ours(gpus: int, *overrides: str, asked: bool = False) -> tuple[tuple[int, int, bool], str]:
    """Ranks, engines, and whether these share their GPUs, as a recipe of our loop is run; and what is said of it."""
    overrides = (*SMALL_BATCHES, *overrides)
    chosen, layout = choose_for_train(TINY, overrides, gpus, asked)
    cfg = load(TINY, (*chosen, *overrides))
    assert cfg.cluster.backend == "ray"
    shared = cfg.policy.generation.colocated.enabled
    return (cfg.cluster.train_ranks, cfg.cluster.generation_engines, shared), layout


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_recipe_of_ours_stays_in_one_process_without_several_gpus(gpus):
    assert choose_for_train(TINY, (), gpus, is_setting=True) == ((), "")


@pytest.mark.parametrize(("gpus", "engine", "engines"), [(2, 1, 2), (8, 1, 8), (8, 2, 4)])
def test_ranks_and_engines_of_ours_share_all_gpus(gpus, engine, engines):
    sizes, layout = ours(gpus, f"policy.generation.vllm_cfg.tensor_parallel_size={engine}")
    assert (sizes, layout) == ((gpus, engines, True), f"trainer and engines share {gpus}")


@pytest.mark.parametrize(
    ("gpus", "engine", "sizes"),
    [(2, 1, (1, 1, False)), (8, 1, (4, 4, False)), (8, 2, (4, 2, False)), (5, 4, (1, 1, False))],
)
def test_they_divide_them_where_the_recipe_says_so(gpus, engine, sizes):
    parallel = f"policy.generation.vllm_cfg.tensor_parallel_size={engine}"
    assert ours(gpus, *APART, parallel) == (sizes, f"{sizes[0]} to train and {gpus - sizes[0]} for engines")


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_number_of_gpus_beside_a_layout_is_refused(gpus):
    with pytest.raises(UserError, match=f"gpus_per_node={gpus}, but the recipe says cluster.backend=ray: leave one"):
        choose_for_train(TINY, (*SMALL_BATCHES, "cluster.backend=ray"), gpus, is_setting=True)


def test_none_leaves_a_layout_and_hides_the_gpus(capsys, monkeypatch):
    layout = ("cluster.backend=ray", "cluster.train_ranks=2")
    assert choose_for_train(TINY, (*SMALL_BATCHES, *layout), 0, is_setting=True) == ((), "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    words = ["launch", "local", "--config", str(TINY), "--dry-run", *SMALL_BATCHES, *layout]
    hidden = "export CUDA_VISIBLE_DEVICES=''\n"
    for changes, hides in (
        ((), False),
        (("--set", "gpus_per_node=0", "--set", "env.CUDA_VISIBLE_DEVICES='0,1'"), True),
    ):
        assert main([*words, *changes]) == 0
        script = capsys.readouterr().out
        assert (hidden in script) == hides
        assert ("CUDA_VISIBLE_DEVICES" in script) == hides


def test_generation_ahead_has_gpus_of_its_own():
    assert ours(8, "grpo.async_grpo.enabled=true")[0] == (4, 4, False)


def test_what_a_recipe_of_ours_says_itself_is_kept():
    assert ours(8, "cluster.backend=ray", "cluster.train_ranks=2", "cluster.generation_engines=3")[0] == (2, 3, False)
    chosen, _ = choose_for_train(TINY, (*SMALL_BATCHES, *COLOCATED), 2)
    assert not any("sleep_level" in override for override in chosen)


@pytest.mark.parametrize(
    ("gpus", "overrides", "message"),
    [
        (8, ("cluster.train_ranks=2", "cluster.backend=ray"), "gpus_per_node=8, but the recipe says .*train_ranks=2"),
        (
            8,
            ("policy.train_micro_batch_size=512",),
            "on 8 GPUs policy.train_micro_batch_size=512 .*set gpus_per_node=N",
        ),
        (3, ("policy.generation.vllm_cfg.tensor_parallel_size=2",), "=2 does not divide the 3 GPUs"),
        (2, (*APART, "policy.generation.vllm_cfg.tensor_parallel_size=2"), "colocated.enabled=false: of 2 GPUs"),
    ],
)
def test_a_recipe_of_ours_that_does_not_fit_is_refused(gpus, overrides, message):
    with pytest.raises(UserError, match=message):
        choose_for_train(TINY, (*SMALL_BATCHES, *overrides), gpus, is_setting=True)


def test_gpus_are_those_that_are_shown(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,5")
    assert visible_gpus() == 3
    for none in ("", "-1", "-1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert visible_gpus() == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,-1,0")
    assert visible_gpus() == 1


def test_parts_of_a_gpu_are_none(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-a)\n  MIG 3g.40gb Device 0: (UUID: MIG-b)'\n")
    fake.chmod(0o700)
    assert visible_gpus() == 1


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
    command = [sys.executable, "-m", "nemo_fp8rl.cli", "launch", "local", "--config", str(TINY)]
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


def test_the_script_says_who_has_the_gpus_and_the_users_overrides_come_last(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    for changes in ([], ["--set", "gpus_per_node=4"]):
        assert main(["launch", "local", "--config", str(TINY), "--dry-run", *SMALL_BATCHES, *changes]) == 0
        script = capsys.readouterr().out
        assert "on this machine, trainer and engines share 4\n" in script
        words = shlex.split(script.splitlines()[-1])
        after = words[words.index(str(TINY)) + 1 :]
        assert after[1] == "cluster.train_ranks=4" and after[-1] == SMALL_BATCHES[0]


def test_shellcheck_finds_nothing(job, tmp_path):
    environment = {f"V{i}": value for i, value in enumerate(HOSTILE)}
    config = replace(settings(tmp_path, "gpus_per_node=0"), env=environment)
    assert shellcheck(render(replace(job, command=(*job.command, *HOSTILE)), config)) == ""
