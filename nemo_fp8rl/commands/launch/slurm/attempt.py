"""One attempt of a SLURM job, as the programs on its nodes see it: variables of the script, and shared files.

The script exports the variables that this module reads. The programs exchange files in the attempt's folder on the
shared filesystem. A file appears whole, because it is renamed into place.
"""

import json
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_fp8rl.commands.launch.settings import VARIABLE
from nemo_fp8rl.common.atomic_files import write_atomically
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.workers import Role
from nemo_fp8rl.workers.network import address_towards


@dataclass(frozen=True)
class Attempt:
    """The variables that the script exported.

    folder:            the attempt's folder on the shared filesystem
    hosts:             SLURM's names of the nodes: the head first, nodes with engines alone last
    generation_nodes:  number of nodes with engines alone
    gpus_per_node:     GPUs of a trainer's node, GPUs of a node with engines alone
    node_tmp:          the attempt's folder on each node's own disk
    """

    folder: Path
    hosts: tuple[str, ...]
    generation_nodes: int
    gpus_per_node: tuple[int, int]
    node_tmp: Path
    ports: range
    secrets_file: Path | None

    @classmethod
    def of_environment(cls) -> "Attempt":
        env = os.environ
        first, _, last = env["PORTS"].partition("-")
        secrets = env.get("SECRETS_FILE")
        return cls(
            folder=Path(env["ATTEMPT_DIR"]),
            hosts=tuple(env["HOSTS"].split()),
            generation_nodes=int(env["GENERATION_NODES"]),
            gpus_per_node=(int(env["GPUS_PER_NODE"]), int(env["GENERATION_GPUS_PER_NODE"])),
            node_tmp=Path(env["RAY_TMPDIR"]),
            ports=range(int(first), int(last) + 1),
            secrets_file=Path(secrets) if secrets else None,
        )

    def role(self, index: int) -> Role:
        return "generation" if index >= len(self.hosts) - self.generation_nodes else "train"

    def gpus(self, index: int) -> int:
        return self.gpus_per_node[self.role(index) == "generation"]

    @property
    def end_file(self) -> Path:
        """The file that the script writes after the driver ended. The nodes then end as well."""
        return self.folder / "ended"

    @property
    def term_file(self) -> Path:
        """The file that a node writes when its step gets SIGTERM. If the script got no SIGTERM, SLURM preempts the job:
        it then signals the steps alone (job_mgr.c, KILL_STEPS_ONLY).
        """
        return self.folder / "terminated"

    @property
    def cluster(self) -> Path:
        """The file {"address": "IP:PORT", "dashboard": "IP:PORT"} of the Ray cluster."""
        return self.folder / "cluster.json"


def write(path: Path, value: Any) -> None:
    """Write a value as JSON. The file appears whole."""
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def read(path: Path) -> Any:
    """Return the value in a file that `write` wrote, None before the file exists."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def node_address(hosts: Sequence[str], index: int) -> str:
    """Return the address by which node `index` reaches another node of the job. Raises UserError if there is none."""
    if len(hosts) == 1:
        return socket.gethostbyname(socket.gethostname())
    other = hosts[0] if index else hosts[1]
    try:
        address = address_towards(other)
    except OSError as error:
        raise UserError(f"{hosts[index]} finds no way to {other} ({error}): look at DNS or /etc/hosts") from None
    if address.startswith("127."):
        raise UserError(f"{hosts[index]} takes {other} for itself ({address}): give its address in DNS or /etc/hosts")
    return address


def free_ports(count: int, ports: range, start: int) -> list[int]:
    """Return ports without a listener on this node, searched once through the range from offset `start`."""
    found: list[int] = []
    for offset in range(len(ports)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port := ports[(start + offset) % len(ports)]))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise UserError(f"slurm.ports={ports.start}-{ports.stop - 1}: all are taken on {socket.gethostname()}; give others")


def secrets(path: Path | None) -> dict[str, str]:
    """Return NAME -> value of each line. Raises UserError if users other than the owner may read the file."""
    return {} if path is None else dict(_secrets(path))


def _secrets(path: Path) -> Iterator[tuple[str, str]]:
    try:
        status, lines = path.stat(), path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"slurm.secrets_file={path} cannot be read ({error.strerror})") from None
    except ValueError:
        raise UserError(f"slurm.secrets_file={path} is not text: write NAME=value lines, in UTF-8") from None
    if status.st_mode & 0o077:
        raise UserError(f"slurm.secrets_file={path} can be read by others: chmod 600 it")
    for number, line in enumerate(lines, 1):
        name, equals, value = line.partition("=")
        if not line.strip() or line.startswith("#"):
            continue
        if not equals or not VARIABLE.fullmatch(name) or "\0" in value:
            raise UserError(f"slurm.secrets_file={path}, line {number}: it is not of the form NAME=value")
        yield name, value
