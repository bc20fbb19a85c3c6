"""The script of a SLURM job, run by bash: srun, scontrol, sbatch and Python are fakes. The lab has the real ones."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from nemo_fp8rl.commands.launch.job import Job
from nemo_fp8rl.commands.launch.slurm import job_script
from nemo_fp8rl.commands.launch.slurm.attempt import write
from tests.commands.launch.conftest import settings, shellcheck
from tests.commands.launch.slurm.test_job_script import KEPT, OF_A_JOB

FAKES = {
    "srun": """\
echo "$*" >>"$FAKES/steps"
while [[ $1 == --* ]]; do
    [[ $1 != --output=* ]] || exec >>"${1#*=}" 2>&1
    shift
done
@step@
"$@" &
for name in USR1 TERM; do trap "kill -$name $!" "$name"; done
while kill -0 $! 2>/dev/null; do wait $!; done
wait $!
""",
    "scontrol": """\
[[ $1 == show ]] || { echo "scontrol $*" >>"$FAKES/calls"; exit 1; }
printf '%s\\n' @hosts@
""",
    "sbatch": 'echo "sbatch $*" >>"$FAKES/calls"; env >"$FAKES/environment"; echo 8\n',
    "python3": """\
good() { [[ $3 != 0 ]] || : >"$PREFLIGHT_DIR/bad_nodes"; }
bad() { [[ $3 != 0 ]] || echo two >"$PREFLIGHT_DIR/bad_nodes"; }
answer() { cp "$FAKES/well.json" "$PREFLIGHT_DIR/$3.json"; }
till() { while [[ ! -e $1 ]]; do sleep 0.1; done; }
case $2 in
*.preflight) @preflight@ ;;
*.node) @node@ ;;
*.ready)
    printf '{\\n "address": "a:1",\\n "dashboard": "a:2"\\n}\\n' >"$ATTEMPT_DIR/cluster.json"
    @driver@
    ;;
esac
""",
}
NODE = 'till "$ATTEMPT_DIR/ended"'
USUAL = {"preflight": 'good "$@"', "node": NODE, "step": ":", "hosts": "one two"}
WAITS = "echo begun; while :; do sleep 0.1; done"


class Script:
    """A job that runs."""

    def __init__(self, folder: Path, job: Job, changes: tuple[str, ...], **does: str) -> None:
        """does: commands of preflight, node and driver, of which there are fakes; what srun does first; the hosts."""
        fakes = folder / "fakes"
        fakes.mkdir()
        for name, text in FAKES.items():
            for part, command in {**USUAL, **does}.items():
                text = text.replace(f"@{part}@", command)
            (fakes / name).write_text(f"#!/bin/bash\n{text}")
            (fakes / name).chmod(0o755)
        write(fakes / "well.json", {"host": "any", "versions": {}, "faults": []})
        config = settings(folder, "slurm.container.image=i", f"env.FAKES={fakes}", *changes)
        self.folder = job_script.run_dir(job, config)
        self.folder.mkdir(parents=True)
        (self.folder / "job.sbatch").write_text(job_script.render(job, config))
        self.calls, self.steps, self.environment = fakes / "calls", fakes / "steps", fakes / "environment"
        self.variables = {"PATH": f"{fakes}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "x"}
        self.run()

    def run(self) -> None:
        self.process = subprocess.Popen(
            ["bash", str(self.folder / "job.sbatch")],
            env={**os.environ, **self.variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def log(self, name: str = "job", attempt: int = 0) -> str:
        path = self.folder / f"attempt-{attempt}" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def until(self, seen: Callable[[], object]) -> None:
        end = time.monotonic() + 30
        while not seen():
            assert time.monotonic() < end and self.process.poll() is None, self.log()
            time.sleep(0.05)

    def begun(self) -> None:
        self.until(lambda: "begun" in self.log("driver"))

    def end(self) -> str:
        """What it asked of SLURM; the driver and all others are gone."""
        self.process.communicate(timeout=60)
        end = time.monotonic() + 5  # by then a `sleep 1` is over, too
        while self.left() and time.monotonic() < end:
            time.sleep(0.05)
        assert not self.left(), self.log()
        return self.calls.read_text() if self.calls.exists() else ""

    def left(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


@pytest.fixture
def start(job, tmp_path) -> Iterator[Callable[..., Script]]:
    scripts = []

    def started(*changes: str, loop: str = "train", gpus: int = 0, **does: str) -> Script:
        own = replace(job, command=(loop, *job.command[1:]), gpus_per_node=gpus)
        scripts.append(Script(tmp_path, own, changes, **does))
        return scripts[-1]

    yield started
    for script in scripts:
        for process in script.left():
            process.kill()
        script.process.wait()


def test_a_job_cancelled_in_its_preflight_stays_cancelled(start):
    script = start(preflight="sleep 60", driver="exit 1")
    script.until(lambda: len(script.left()) > 6)  # the script, and a step with a sleep on each node
    os.killpg(script.process.pid, signal.SIGTERM)
    assert script.end() == ""
    assert "told to end" in script.log() and "came to no end" not in script.log()


def test_a_job_cancelled_while_it_ends_stays_cancelled(start):
    script = start(
        preflight='[[ $PREFLIGHT_DIR == *0 ]] && good "$@" || bad "$@"', node=f"{NODE}; sleep 3", driver="exit 1"
    )
    script.until((script.folder / "attempt-0" / "ended").exists)
    script.process.send_signal(signal.SIGTERM)
    assert script.end() == "scontrol update JobId=7 Requeue=0\n"


def test_a_job_that_may_not_restart_goes_on_as_its_log_says(start):
    script = start("slurm.max_restarts=0", preflight='bad "$@"', driver="exit 1")
    script.end()
    assert f"to go on, raise it in {script.folder}/job.sbatch and sbatch that" in script.log()
    script.run()
    script.end()
    assert f"MAX_RESTARTS is 0; to go on, raise it in {script.folder}/job.sbatch\n" in script.log(attempt=1)
    job = script.folder / "job.sbatch"
    job.write_text(job.read_text().replace("MAX_RESTARTS=0\n", "MAX_RESTARTS=2\n"))
    script.run()
    script.end()
    begun = [(script.folder / f"attempt-{attempt}/preflight-0").is_dir() for attempt in range(3)]
    assert begun == [True, False, True]


def test_a_bad_node_is_left_out(start):
    script = start(preflight='bad "$@"', driver="exit 1")
    assert script.end() == f"scontrol update JobId=7 Requeue=0\nsbatch --parsable {script.folder}/job-1.sbatch\n"
    assert "#SBATCH --exclude=two\n" in (script.folder / "job-1.sbatch").read_text()


def test_the_job_without_it_has_no_variables_of_the_one_before(start, monkeypatch):
    for name, value in (OF_A_JOB | KEPT).items():
        if name != "SLURM_HET_SIZE":  # of which the script makes two lists of nodes
            monkeypatch.setenv(name, value)
    script = start(preflight='bad "$@"', driver="exit 1")
    script.end()
    seen = script.environment.read_text().splitlines()
    assert {f"{name}={value}" for name, value in KEPT.items()} <= set(seen)
    assert not [line for line in seen if line.partition("=")[0] in {*OF_A_JOB, "SLURM_JOB_NODELIST"}]


NO_NODES_FAULT: dict[str, tuple[dict[str, str], str]] = {
    "a reduction that fails": (
        {"preflight": '[[ $3 != 0 ]] || : >"$PREFLIGHT_DIR/0.joined"'},
        "preflight: the nodes could not reduce a number together; see",
    ),
    "a wrong image": (  # as srun ends with it
        {"step": "echo 'pyxis: failed to import docker image'; exit 1"},
        "preflight: no node started its checks, so none is left out: ",
    ),
    "one of three answers": (
        {"preflight": '[[ $3 != 1 ]] || answer "$@"; exit 1', "hosts": "one two three"},
        "preflight: most nodes did not come through their checks, so none is left out: ",
    ),
    "two of three are bad": (
        {
            "preflight": '[[ $3 == 0 ]] || { answer "$@"; sed -i "s/\\[\\]/[1]/" "$PREFLIGHT_DIR/$3.json"; }; exit 1',
            "hosts": "one two three",
        },
        "preflight: most nodes did not come through their checks, so none is left out: ",
    ),
    "the head answered": (
        {"preflight": 'answer "$@"; exit 1'},
        "preflight: no node is known to be worse than the others, so none is left out",
    ),
}


@pytest.mark.parametrize("what", NO_NODES_FAULT)
def test_what_is_no_nodes_fault_leaves_none_out(start, what):
    given, message = NO_NODES_FAULT[what]
    script = start(**given, driver="exit 1")
    assert script.end() == "" and script.process.returncode == 1
    assert message in script.log()
    assert f"see {script.folder}/attempt-0/preflight-0" in script.log()
    assert not (script.folder / "excluded_nodes").exists()


def test_a_head_that_does_not_answer_is_left_out_when_the_others_are_well(start):
    after = '[[ $3 != 0 ]] || exit 1; till "$PREFLIGHT_DIR/store.json"; answer "$@"'  # they may take longer to start
    script = start(preflight=after, driver="exit 1")
    assert f"sbatch --parsable {script.folder}/job-1.sbatch\n" in script.end()
    assert "#SBATCH --exclude=one\n" in (script.folder / "job-1.sbatch").read_text()


def test_of_jobs_of_one_node_the_second_bad_one_in_a_row_is_not_left_out(start):
    """There is no other to compare it with; when the next is bad, too, the fault may be the job's."""
    script = start(preflight='bad "$@"', hosts="two", driver="exit 1")
    first = script.end()
    assert f"sbatch --parsable {script.folder}/job-1.sbatch\n" in first
    script.run()
    assert script.end() == first and script.process.returncode == 1
    assert "the attempt before ended in its preflight, too, on another node" in script.log(attempt=1)


@pytest.mark.parametrize("loop", ["train", "nemo"])
def test_a_driver_is_told_to_stop(start, loop):
    stops = f"trap 'exit 130' USR1; trap 'exit 3' TERM; {WAITS}"
    script = start("slurm.stop_seconds=62", loop=loop, driver=stops)
    script.begun()
    script.process.send_signal(signal.SIGUSR1)
    assert script.end() == "scontrol requeue 7\n"
    assert "exit code 130" in script.log()


def test_a_driver_is_told_when_it_must_have_saved(start, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "2000000000")
    script = start("slurm.stop_seconds=100", driver="echo $NEMO_FP8RL_STOP_AT")
    script.end()
    assert script.log("driver") == "1999999900\n"


def test_an_older_slurm_does_not_say_when_the_job_ends(start, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    script = start("slurm.stop_seconds=100", "slurm.time=01:00:00", driver="echo $NEMO_FP8RL_STOP_AT")
    begun = time.time()
    script.end()
    assert int(script.log("driver")) == pytest.approx(begun + 3500, abs=3)


def test_what_does_not_stop_is_killed_on_its_node(start):
    script = start("slurm.stop_seconds=61", driver=f"trap '' USR1; {WAITS}")
    script.begun()
    script.process.send_signal(signal.SIGUSR1)
    assert script.end() == "scontrol requeue 7\n"
    assert "the driver has not stopped: killed" in script.log()


def test_a_job_whose_steps_alone_are_told_to_end_is_preempted(start):
    script = start(node=': >"$ATTEMPT_DIR/terminated"; exit 1', driver='till "$ATTEMPT_DIR/terminated"; exit 1')
    assert script.end() == "scontrol requeue 7\n"


def test_a_setup_that_fails_ends_the_job(start):
    script = start("slurm.setup='module load nothing'", driver="exit 0")
    said, _ = script.process.communicate(timeout=20)
    assert script.process.returncode == 2
    assert said.splitlines()[-1] == "slurm.setup failed: its last command has another exit code than 0"


def test_a_setup_may_use_variables_that_are_not_set(start):
    script = start("slurm.setup='[[ -z $LMOD ]] && export FOUND=1'", driver="echo $FOUND")
    assert script.end() == ""
    assert script.log("driver") == "1\n"


@pytest.mark.parametrize("gres", [True, False])
def test_steps_ask_for_gpus_where_slurm_knows_them_and_ray_has_them_anyway(start, gres):
    script = start(f"slurm.gres={gres}", gpus=8, driver="echo $GPUS_PER_NODE")
    assert script.end() == ""
    steps = script.steps.read_text().splitlines()
    assert len(steps) == 5  # two of the preflight, Ray's two, the driver
    assert all(("--gpus-per-node=8" in step) == gres for step in steps)
    assert all("--export=ALL" in step for step in steps)  # whatever sbatch was told to export
    assert script.log("driver") == "8\n"


SHOWS = 'till "$ATTEMPT_DIR/../attach.sh"; sleep 0.5; cat "$ATTEMPT_DIR/../attach.sh"'


def test_the_log_says_how_to_look_inside(start):
    script = start(driver=SHOWS)
    script.end()
    attach = script.log("driver")
    assert "--pty env" in attach and " PATH=" not in attach  # a shell in a container has the image's
    assert "--container-image=i" in attach and "--container-env" not in attach  # a login node's would win
    assert shellcheck(attach) == ""
    assert "a shell there: bash " in script.log()
    assert "its dashboard: ssh -L 8265:a:2 LOGIN_NODE, then http://localhost:8265 with the token of /" in script.log()


def test_a_shell_without_a_container_has_the_virtual_environment_first(start, tmp_path):
    own = tmp_path / "venv" / "bin"
    own.mkdir(parents=True)
    (own / "python").symlink_to(tmp_path / "fakes" / "python3")
    script = start("slurm.container.image=null", f"slurm.venv={own.parent}", driver=SHOWS)
    script.end()
    assert f" PATH={own}:{tmp_path}/fakes:" in script.log("driver")
