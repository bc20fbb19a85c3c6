"""A node of a SLURM job's Ray cluster, until the job's script says that the job ended.

    python -m nemo_fp8rl.commands.launch.slurm.node INDEX

What it starts is ended with it, and no process of another job, though it may be of the same user on the same node: what
descends from it, is of a session that it began, or carries its mark in the environment. No sign is enough alone: what
outlives its parent is nobody's descendant, and a process that Ray gives a title (ray::...) loses its environment.
"""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Set
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from nemo_fp8rl.commands.launch.slurm.attempt import Attempt, free_ports, own_address, read, secrets, write
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.workers import ROLE

HEAD_TRIES = 5
"""Tries to start the head: a port that was free may be taken a moment later."""
STARTED_SECONDS = 60
OPEN_FILES = 65536
"""Open files of a process of Ray's, as far as it is let: the head has sockets to every worker of the cluster."""
MARK = "NEMO_FP8RL_ATTEMPT"
TERM_SECONDS = 12
"""Seconds after SLURM's SIGTERM, which Ray gets, too, so that little is left to wait for; SIGKILL comes after 30."""
END_SECONDS = 5


def main(index: int) -> int:
    attempt = Attempt.of_environment()
    told: list[float] = []

    def on_term(*_: Any) -> None:
        told.append(time.monotonic())  # the driver got it, too, and may save
        attempt.terminated.touch()

    signal.signal(signal.SIGTERM, on_term)
    for older in attempt.node_tmp.parent.glob(f"{attempt.node_tmp.name.rpartition('-')[0]}-*"):  # it was killed
        shutil.rmtree(older, ignore_errors=True)
    try:
        attempt.node_tmp.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise UserError(
            f"{attempt.node_tmp} is there, and another user's: remove it, or give another slurm.node_tmp"
        ) from None
    environment = {**os.environ, **secrets(attempt.secrets_file), MARK: str(attempt.folder)}
    sessions: set[int] = set()
    _raise_open_files()
    try:
        ray = (_worker if index else _head)(attempt, index, environment, sessions)
        while ray is not None and ray.poll() is None and not attempt.ended.exists():
            if told and time.monotonic() > told[0] + TERM_SECONDS:
                break
            time.sleep(0.5)
        if attempt.ended.exists():
            return 0
        print("told to end" if told else f"Ray ended on its own, with exit code {ray and ray.returncode}", flush=True)
        return 1
    finally:
        end_all(attempt.folder, sessions)
        shutil.rmtree(attempt.node_tmp, ignore_errors=True)


def _raise_open_files() -> None:
    """Raise the limit of open files of this process and what it starts. SLURM hands on the soft limit of the shell that
    submitted, often 1024, and `ray start`, unlike ray.init, leaves it so.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _head(
    attempt: Attempt, index: int, environment: dict[str, str], sessions: set[int]
) -> "subprocess.Popen[bytes] | None":
    address = own_address(attempt.hosts, index)
    for _ in range(HEAD_TRIES):
        port, dashboard, client = free_ports(3, attempt.ports, random.randrange(len(attempt.ports)))
        ray = _start(
            *("--head", f"--node-ip-address={address}", f"--port={port}", f"--ray-client-server-port={client}"),
            *(f"--dashboard-host={address}", f"--dashboard-port={dashboard}"),
            *_resources(attempt, index),
            environment=environment,
        )
        sessions.add(ray.pid)
        if _answers(ray, f"{address}:{port}", environment):
            write(attempt.cluster, {"address": f"{address}:{port}", "dashboard": f"{address}:{dashboard}"})
            return ray
        end_all(attempt.folder, sessions)
    return None


def _worker(
    attempt: Attempt, index: int, environment: dict[str, str], sessions: set[int]
) -> "subprocess.Popen[bytes] | None":
    while (cluster := read(attempt.cluster)) is None:
        if attempt.ended.exists():
            return None
        time.sleep(0.5)
    ray = _start(
        *(f"--address={cluster['address']}", f"--node-ip-address={own_address(attempt.hosts, index)}"),
        *_resources(attempt, index),
        environment=environment,
    )
    sessions.add(ray.pid)
    return ray


def _resources(attempt: Attempt, index: int) -> tuple[str, ...]:
    cpus = os.environ.get("SLURM_CPUS_ON_NODE", str(os.cpu_count()))
    return (
        *(f"--num-cpus={cpus}", f"--num-gpus={attempt.gpus(index)}", f"--labels={ROLE}={attempt.role(index)}"),
        *("--min-worker-port=0", "--max-worker-port=0"),  # any that is free: other jobs on this node have theirs
    )


def _start(*options: str, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *options]
    return subprocess.Popen(command, env=environment, start_new_session=True)


def _answers(ray: "subprocess.Popen[bytes]", address: str, environment: dict[str, str]) -> bool:
    """Whether the head's Ray came up."""
    health = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    end = time.monotonic() + STARTED_SECONDS
    while ray.poll() is None and time.monotonic() < end:
        if subprocess.run(health, env=environment, capture_output=True, check=False).returncode == 0:
            return True
        time.sleep(0.5)
    return False


def end_all(folder: Path, sessions: Set[int]) -> None:
    """End what was started on this node for the attempt of this folder. sessions: the first process of each."""
    descendants = set(psutil.Process().children(recursive=True))
    for number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + END_SECONDS
        while (left := _left(folder, sessions, descendants)) and time.monotonic() < end:
            for process in left:
                with suppress(psutil.Error):
                    process.send_signal(number)
            time.sleep(0.2)


def _left(folder: Path, sessions: Set[int], descendants: Set[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):  # it has ended, or is of another user
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if (
                process in descendants
                or os.getsid(process.pid) in sessions
                or process.environ().get(MARK) == str(folder)
            ):
                found.append(process)
    return found


if __name__ == "__main__":
    try:
        sys.exit(main(int(sys.argv[1])))
    except UserError as error:
        sys.exit(f"nemo-fp8rl: {error}")
