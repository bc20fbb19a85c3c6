"""The rendered script on a real SLURM of three nodes: `make test-slurm`, as root, with Debian's SLURM installed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.train import train
from tests.conftest import COLOCATED, RECIPES
from tests.slurm.lab import NODE_TMP, NODES, Lab, has_spank, missing_tools
from tests.test_train import read, results

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces are made by root"),
    pytest.mark.skipif(bool(missing_tools()), reason=f"not installed: {', '.join(missing_tools())}"),
]
ROOT = Path(__file__).parents[2]
STEPS = 30
LONG = (f"grpo.max_num_steps={STEPS}", "checkpointing.save_period=5", "grpo.val_at_start=false", "grpo.val_period=0")
SECONDS = 300
"""That a job may take, with its waiting."""
GONE_SECONDS = 60
"""Within which nothing is left on any node."""


@dataclass(frozen=True)
class Run:
    job: str
    folder: Path

    def log(self, attempt: int, name: str = "job") -> str:
        path = self.folder / f"attempt-{attempt}" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def everything(self) -> str:
        return "\n".join(f"== {path}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.rglob("*.log")))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab") / "lab") as lab:
        yield lab


@pytest.fixture(autouse=True)
def nothing_is_left(lab: Lab) -> Iterator[None]:
    """No process and no file on any node that lives, after every test; a job that is cancelled has SLURM's 30 s."""
    yield
    for job in lab.jobs():
        lab.run("scancel", job, check=False)
    end = time.monotonic() + GONE_SECONDS
    while any(lab.processes(name) or lab.files(name) for name in lab.nodes):
        left = {name: (lab.processes(name), lab.files(name)) for name in lab.nodes}
        assert time.monotonic() < end, left
        time.sleep(1)


@pytest.fixture(scope="module")
def uninterrupted(warm_overrides: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of all steps in one go, in one process, without SLURM."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    assert train(load(RECIPES / "tiny_cpu.yaml", [*warm_overrides, *LONG, f"logger.log_dir={run}"]))
    return run


@pytest.fixture
def launch(lab: Lab, warm_overrides: tuple[str, ...], tmp_path: Path) -> Callable[..., Run]:
    """launch(*arguments, settings=(...), log_dir=...) -> the run that `nemo-fp8rl launch slurm` submitted."""

    def submit(*arguments: str, settings: tuple[str, ...] = (), log_dir: str = "log") -> Run:
        limits = ("slurm.min_free_gib=0.1", "slurm.stop_seconds=100", "slurm.ready_seconds=120")
        places = (f"runs_dir={tmp_path}/runs", f"slurm.node_tmp={NODE_TMP}")
        changes = [word for change in (*limits, *places, *settings) for word in ("--set", change)]
        command = [sys.executable, "-m", "nemo_fp8rl.cli", "launch", "slurm", "--config", f"{RECIPES}/tiny_cpu.yaml"]
        overrides = (*warm_overrides, *LONG, f"logger.log_dir={tmp_path}/{log_dir}")
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        said = lab.run(*command, *overrides, *changes, *arguments, **variables)
        return Run(said.split()[1].rstrip(","), Path(said.split("logs: ")[1].split()[0]))

    return submit


TWO = ("nodes=2", "generation_nodes=1")


def until(seen: Callable[[], object], what: str, run: Run, seconds: float = 150) -> None:
    end = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < end, f"{what}: not after {seconds:g} s\n{run.everything()}"
        time.sleep(0.3)


def steps_of(log_dir: Path) -> int:
    try:
        return int(read(log_dir)[-1]["step"])
    except (FileNotFoundError, IndexError, ValueError):
        return 0


def test_trainer_and_engine_on_nodes_of_their_own_give_the_numbers_of_one_process(lab, launch, uninterrupted, tmp_path):
    run = launch(settings=TWO)
    until(lambda: steps_of(tmp_path / "log") >= 2, "step 2", run)
    where = {name: " ".join(lab.processes(name)) for name in NODES}
    assert ["MegatronWorker" in where[name] for name in NODES] == [True, False, False], where
    assert ["VllmEngine" in where[name] for name in NODES] == [False, True, False], where
    assert lab.wait(run.job, SECONDS) == "COMPLETED", run.everything()
    assert results(tmp_path / "log") == results(uninterrupted)
    assert "refit auto through mapped memory within a machine, direct, gloo between the 2" in run.log(0, "driver")
    assert {row["refit/between_machines"] for row in read(tmp_path / "log") if "refit/version" in row} == {1.0}
    assert not list(run.folder.glob("attempt-*/ray_token"))


def test_an_engine_beside_a_rank_takes_its_weights_from_there(lab, launch, tmp_path):
    """Colocated: nothing of a refit leaves a node."""
    two = ("cluster.backend=ray", "cluster.train_ranks=2", "cluster.generation_engines=2", *COLOCATED)
    sizes = ("policy.train_micro_batch_size=32", "grpo.max_num_steps=4")
    run = launch(*two, *sizes, settings=("nodes=2", "slurm.exclusive=false", "slurm.cpus_per_node=1"))
    until(lambda: steps_of(tmp_path / "log") >= 1, "step 1", run)
    where = {name: " ".join(lab.processes(name)) for name in NODES}
    for kind in ("MegatronWorker", "VllmEngine"):
        assert [where[name].count(kind) for name in NODES] == [1, 1, 0], where
    assert lab.wait(run.job, SECONDS) == "COMPLETED", run.everything()
    rows = [row for row in read(tmp_path / "log") if "refit/version" in row]
    assert {row["refit/between_machines"] for row in rows} == {0.0}
    assert all(row["train/token_mult_prob_error"] < 1.001 for row in rows if "train/loss" in row)


def test_the_drivers_exit_code_is_the_jobs(lab, launch, tmp_path):
    run = launch(f"policy.model_name={tmp_path}/nowhere")
    assert lab.wait(run.job, SECONDS) == "FAILED", run.everything()
    assert lab.exit_code(run.job) == 2
    assert "nowhere" in run.log(0, "driver")
    assert not (run.folder / "attempt-1").exists()


def test_a_preempted_run_saves_and_resumes_to_the_same_numbers(lab, launch, uninterrupted, tmp_path):
    run = launch(settings=(*TWO, "slurm.partition=low"))
    until(lambda: steps_of(tmp_path / "log") >= 7, "step 7", run)
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/bash\nsleep 5\n")
    other = lab.run(
        *("sbatch", "--parsable", "--partition=high", "--nodes=3", "--exclusive", f"--output={tmp_path}/urgent.out"),
        str(urgent),
    ).strip()
    until(lambda: lab.state(run.job) == "PENDING", "a requeue", run)
    stopped = steps_of(tmp_path / "log")
    assert 7 <= stopped < STEPS
    assert lab.wait(other, SECONDS) == "COMPLETED"
    assert lab.wait(run.job, SECONDS) == "COMPLETED", run.everything()
    assert f"stopped after step {stopped}, checkpoint of step {stopped}" in run.log(0, "driver")
    assert "back into the queue" in run.log(0)
    assert results(tmp_path / "log") == results(uninterrupted)


def test_a_run_whose_steps_alone_are_told_to_end_resumes_to_the_same_numbers(lab, launch, uninterrupted, tmp_path):
    """As SLURM preempts with a GraceTime, and without preempt_send_user_signal."""
    run = launch(settings=TWO)
    until(lambda: steps_of(tmp_path / "log") >= 7, "step 7", run)
    lab.run("scancel", "--signal=TERM", run.job)
    until(lambda: lab.state(run.job) == "PENDING", "a requeue", run)
    assert lab.wait(run.job, SECONDS) == "COMPLETED", run.everything()
    assert "back into the queue" in run.log(0) and "told to end" not in run.log(0)
    assert results(tmp_path / "log") == results(uninterrupted)


def test_two_jobs_on_one_node_do_not_disturb_each_other(lab, launch, uninterrupted, tmp_path):
    shared = ("slurm.exclusive=false", "slurm.cpus_per_node=2", "slurm.options=[--nodelist=lab3]")
    runs = [launch(settings=shared, log_dir=f"log{i}") for i in range(2)]
    for i in range(2):
        until(lambda i=i: steps_of(tmp_path / f"log{i}") >= 1, "step 1", runs[i])  # type: ignore[misc]
    assert [lab.state(run.job) for run in runs] == ["RUNNING", "RUNNING"]  # both at work at once
    for i, run in enumerate(runs):
        assert lab.wait(run.job, SECONDS) == "COMPLETED", run.everything()
        assert results(tmp_path / f"log{i}") == results(uninterrupted)


def test_a_node_that_never_comes_up_ends_the_job_in_a_clear_error_in_time(lab, launch):
    run = launch(settings=(*TWO, "slurm.ready_seconds=40"))

    def node_of_lab2() -> list[psutil.Process]:
        below = psutil.Process(lab.nodes["lab2"].pid).children(recursive=True)
        lines = {process: process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"])}
        return [process for process in below if "nemo_fp8rl.commands.launch.slurm.node" in lines.get(process, ())]

    until(node_of_lab2, "the program of lab2", run)
    begin = time.monotonic()
    for process in node_of_lab2():
        process.send_signal(signal.SIGSTOP)
    assert lab.wait(run.job, SECONDS) == "FAILED", run.everything()
    assert time.monotonic() - begin < 40 + 90  # to be ready, to look at the nodes once more, and to end all
    error = run.log(0, "driver").splitlines()[-1]
    assert "after 40 s these of the 2 nodes have not joined the Ray cluster: lab2; see" in error
    assert f"{run.folder}/attempt-0/node-lab2.log" in error
    assert lab.exit_code(run.job) == 1
    for left in lab.files("lab2"):  # stopped and then killed it could not remove its own; the next attempt there does
        shutil.rmtree(lab.folder / "tmp.lab2" / left)


def test_a_node_with_a_bad_gpu_is_left_out_before_the_run_starts(lab, launch, uninterrupted, tmp_path):
    fake = tmp_path / "fake_nvidia_smi" / "nvidia-smi"
    fake.parent.mkdir()
    fake.write_text('#!/bin/bash\necho "0, GPU-a, 0"\n[[ $(hostname) == lab1 ]]; echo "1, GPU-b, $((3 - 3 * $?))"\n')
    fake.chmod(0o755)
    path = f"env.PATH={fake.parent}:{os.environ['PATH']}"
    run = launch(settings=(*TWO, "gpus_per_node=2", path))
    assert lab.wait(run.job, SECONDS) == "FAILED", run.everything()
    assert "lab1: GPU 1 has 3 uncorrected ECC errors" in run.log(0)
    again = run.log(0).split("as job ")[1].split()[0]
    assert lab.wait(again, SECONDS) == "COMPLETED", run.everything()
    assert lab.run("scontrol", "show", "job", again).split("ExcNodeList=")[1].split()[0] == "lab1"
    assert results(tmp_path / "log") == results(uninterrupted)


def test_engines_on_nodes_of_another_partition_are_a_heterogeneous_job(lab, launch, uninterrupted, tmp_path):
    run = launch(settings=(*TWO, "slurm.generation.partition=high"))
    assert lab.wait(run.job, SECONDS) == "COMPLETED", run.everything()
    assert results(tmp_path / "log") == results(uninterrupted)


def test_restarts_are_bounded(lab, launch, tmp_path):
    """As above, with none allowed."""
    fake = tmp_path / "fake_nvidia_smi" / "nvidia-smi"
    fake.parent.mkdir()
    fake.write_text("#!/bin/bash\necho broken >&2; exit 9\n")
    fake.chmod(0o755)
    path = f"env.PATH={fake.parent}:{os.environ['PATH']}"
    run = launch(settings=("gpus_per_node=1", path, "slurm.max_restarts=0"))
    before = lab.jobs()
    assert lab.wait(run.job, SECONDS) == "FAILED", run.everything()
    assert "nvidia-smi failed (broken)" in run.log(0)
    assert "not again: this was attempt 0, and MAX_RESTARTS is 0" in run.log(0)
    assert lab.jobs() == before


def test_a_job_cancelled_in_its_preflight_stays_cancelled(lab, launch, tmp_path):
    fake = tmp_path / "fake_nvidia_smi" / "nvidia-smi"
    fake.parent.mkdir()
    fake.write_text("#!/bin/bash\nsleep 60\n")
    fake.chmod(0o755)
    run = launch(settings=(*TWO, "gpus_per_node=1", f"env.PATH={fake.parent}:{os.environ['PATH']}"))
    before = lab.jobs()
    until(lambda: all("nvidia-smi" in " ".join(lab.processes(name)) for name in NODES[:2]), "the preflight", run)
    lab.run("scancel", run.job)
    until(lambda: not lab.processes("lab1"), "the end", run)
    assert lab.wait(run.job, SECONDS) == "CANCELLED" and lab.jobs() == before
    assert "told to end" in run.log(0) and "again" not in run.log(0)


@pytest.mark.skipif(not has_spank(), reason="gcc and libslurm-dev build the fake Pyxis")
def test_every_step_is_in_the_container_with_its_mounts(lab, launch, uninterrupted, tmp_path):
    """Options as Pyxis has them, taken by a fake that starts none."""
    path = f"env.PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
    own = f"{tmp_path}:{tmp_path}"
    container = ("slurm.container.image=registry#image:1", f"slurm.container.mounts=['/usr/share:/data:ro', '{own}']")
    run = launch(settings=(*TWO, path, *container))
    assert lab.wait(run.job, SECONDS) == "COMPLETED", run.everything()
    assert results(tmp_path / "log") == results(uninterrupted)
    steps = (lab.folder / "pyxis.log").read_text().splitlines()
    assert sorted(step.split()[0] for step in steps) == ["lab1"] * 3 + ["lab2"] * 2  # preflight, Ray; and the driver
    mounts = f"/usr/share:/data:ro,{own},{ROOT}:{ROOT},{run.folder}:{run.folder},{NODE_TMP}:{NODE_TMP}"
    for step in steps:
        assert f" --container-image=registry#image:1 --container-mounts={mounts} --container-workdir={ROOT}" in step
        assert " --container-env=PATH,HOSTS," in step


def test_an_idle_cluster_waits_and_a_shell_attaches_to_it(lab, launch):
    run = launch("--idle", settings=("nodes=2",))
    attach = run.folder / "attach.sh"
    until(lambda: "all 2 nodes are there" in run.log(0, "driver") and attach.exists(), "the cluster", run)
    code = "import ray; ray.init(log_to_driver=False); print('nodes', [n['Alive'] for n in ray.nodes()])"
    shell = f'{sys.executable} -c "{code}"; exit\n'
    done = subprocess.run(
        ["script", "--quiet", "--command", f"bash {attach}", "/dev/null"],
        input=shell, env=lab.environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "nodes [True, True]" in done.stdout, done.stdout + done.stderr
    assert lab.state(run.job) == "RUNNING"
    lab.run("scancel", run.job)
    assert lab.wait(run.job, SECONDS) == "CANCELLED"


def test_a_killed_node_is_left_out_and_the_run_ends_on_the_others(lab, launch, uninterrupted, tmp_path):
    """The last test: the node does not come back."""
    run = launch(settings=(*TWO, "slurm.preflight_seconds=90"))
    until(lambda: steps_of(tmp_path / "log") >= 7, "step 7", run)
    lab.kill_node("lab2")
    until(lambda: lab.hurry(run.job) or (run.folder / "attempt-1").exists(), "another attempt", run, SECONDS)
    last = lab.jobs()[-1]
    assert lab.wait(last, SECONDS) == "COMPLETED", run.everything()
    assert "lab2" not in (run.folder / f"slurm-{last}.out").read_text().split("on ")[-1].split(":")[0]
    rows = [json.dumps(row) for row in results(tmp_path / "log")]
    assert rows == [json.dumps(row) for row in results(uninterrupted)]
