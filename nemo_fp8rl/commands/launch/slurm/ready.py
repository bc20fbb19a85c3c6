"""Waits until all nodes joined, then becomes the driver's command.

    python -m nemo_fp8rl.commands.launch.slurm.ready SECONDS COMMAND...

A node counts when Ray reports it alive, with the GPUs that it should have.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_fp8rl.commands.launch.slurm.attempt import Attempt, read, secrets
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.workers import ROLE

POLL_SECONDS = 1.0
PROGRESS_SECONDS = 10.0


def main(seconds: float, command: Sequence[str]) -> None:
    attempt = Attempt.of_environment()
    environment = {**os.environ, **secrets(attempt.secrets_file), "RAY_ADDRESS": wait(attempt, seconds)}
    print(f"all {len(attempt.hosts)} nodes are there: {' '.join(command)}", flush=True)
    os.execvpe(command[0], list(command), environment)


def wait(attempt: Attempt, seconds: float) -> str:
    """Return the cluster's address. Raises UserError, which names the nodes, if a node is missing after `seconds`."""
    begin = time.monotonic()
    last_printed = begin
    absent: Sequence[str] = attempt.hosts
    connected = False
    while time.monotonic() < begin + seconds:
        if not connected and (cluster := read(attempt.cluster)) is not None:
            import ray

            ray.init(cluster["address"], log_to_driver=False, logging_level="ERROR")
            connected = True
        if connected and not (absent := missing(attempt, ray.nodes())):
            ray.shutdown()
            return str(cluster["address"])
        if time.monotonic() > last_printed + PROGRESS_SECONDS:
            last_printed = time.monotonic()
            print(f"after {last_printed - begin:.0f} s without {', '.join(absent)}", flush=True)
        time.sleep(POLL_SECONDS)
    logs = ", ".join(f"{attempt.folder}/node-{host.split()[0]}.log" for host in absent[:3])
    raise UserError(
        f"after {seconds:g} s these of the {len(attempt.hosts)} nodes have not joined the Ray cluster: "
        f"{', '.join(absent)}; see {logs}, or raise slurm.ready_seconds"
    )


def missing(attempt: Attempt, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the hosts that Ray does not have or that have too few GPUs. nodes: the answer of ray.nodes()."""
    alive = {node["NodeManagerHostname"].split(".")[0]: node for node in nodes if node["Alive"]}
    absent = []
    for index, host in enumerate(attempt.hosts):
        node = alive.get(host.split(".")[0])
        gpus = node["Resources"].get("GPU", 0) if node else 0
        if node is None or node.get("Labels", {}).get(ROLE) != attempt.role(index):
            absent.append(host)
        elif gpus < attempt.gpus(index):
            absent.append(f"{host} (with {gpus:g} of {attempt.gpus(index)} GPUs)")
    return absent


if __name__ == "__main__":
    try:
        main(float(sys.argv[1]), sys.argv[2:])
    except UserError as error:
        sys.exit(f"nemo-fp8rl: {error}")
