"""A node of a SLURM job's Ray cluster, until the job's script says that the job ended.

    python -m nemo_fp8rl.commands.launch.slurm.node INDEX

The program ends every process that it started, and no process of another job of the same user on the same node. It
finds its processes by three signs: descendants, sessions that it began, and a mark in the environment. No sign is
enough alone: a process that outlives its parent is nobody's descendant, and a process to which Ray gives a title
(ray::...) loses its environment.
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

from nemo_fp8rl.commands.launch.slurm.attempt import Attempt, free_ports, node_address, read, secrets, write
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.workers import ROLE

HEAD_TRIES = 5
"""Tries to start the head, because another program may take a free port a moment later."""
START_SECONDS = 60
OPEN_FILES = 65536
"""Limit of open files of Ray's processes, if the system allows it: the head has a socket to every worker."""
MARK = "NEMO_FP8RL_ATTEMPT"
TERM_SECONDS = 12
"""Seconds to wait after SLURM's SIGTERM, which Ray gets as well. SLURM sends SIGKILL after 30."""
END_SECONDS = 5


def main(index: int) -> int:
    attempt = Attempt.of_environment()
    term_times: list[float] = []

    def on_term(*_: Any) -> None:
        term_times.append(time.monotonic())  # the driver got SIGTERM as well and may save
        attempt.term_file.touch()

    signal.signal(signal.SIGTERM, on_term)
    for older in attempt.node_tmp.parent.glob(
        f"{attempt.node_tmp.name.rpartition('-')[0]}-*"
    ):  # of an attempt that was killed
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
        while ray is not None and ray.poll() is None and not attempt.end_file.exists():
            if term_times and time.monotonic() > term_times[0] + TERM_SECONDS:
                break
            time.sleep(0.5)
        if attempt.end_file.exists():
            return 0
        print(
            "told to end" if term_times else f"Ray ended by itself, with exit code {ray and ray.returncode}", flush=True
        )
        return 1
    finally:
        end_processes(attempt.folder, sessions)
        shutil.rmtree(attempt.node_tmp, ignore_errors=True)


def _raise_open_files() -> None:
    """Raise the limit of open files of this process and its children. SLURM passes on the soft limit of the submitting
    shell, often 1024, and `ray start`, unlike ray.init, does not raise it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _head(
    attempt: Attempt, index: int, environment: dict[str, str], sessions: set[int]
) -> "subprocess.Popen[bytes] | None":
    address = node_address(attempt.hosts, index)
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
        end_processes(attempt.folder, sessions)
    return None


def _worker(
    attempt: Attempt, index: int, environment: dict[str, str], sessions: set[int]
) -> "subprocess.Popen[bytes] | None":
    while (cluster := read(attempt.cluster)) is None:
        if attempt.end_file.exists():
            return None
        time.sleep(0.5)
    ray = _start(
        *(f"--address={cluster['address']}", f"--node-ip-address={node_address(attempt.hosts, index)}"),
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
    """Return whether the Ray of the head answers."""
    health = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    end = time.monotonic() + START_SECONDS
    while ray.poll() is None and time.monotonic() < end:
        if subprocess.run(health, env=environment, capture_output=True, check=False).returncode == 0:
            return True
        time.sleep(0.5)
    return False


def end_processes(folder: Path, sessions: Set[int]) -> None:
    """End all processes that this node started for an attempt. sessions: the first process of each session."""
    descendants = set(psutil.Process().children(recursive=True))
    for number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + END_SECONDS
        while (processes := _remaining_processes(folder, sessions, descendants)) and time.monotonic() < end:
            for process in processes:
                with suppress(psutil.Error):
                    process.send_signal(number)
            time.sleep(0.2)


def _remaining_processes(folder: Path, sessions: Set[int], descendants: Set[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):  # the process ended, or belongs to another user
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
