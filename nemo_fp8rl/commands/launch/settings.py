"""The site file: settings of a cluster for every recipe. `--site FILE` names it, `--set key=value` changes it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from nemo_fp8rl.commands.launch.kubernetes_settings import KubernetesConfig
from nemo_fp8rl.commands.launch.limits import COUNT, COUNT_OR_0, GPUS, SECONDS, YEAR
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.field_rules import Range, check_fields
from nemo_fp8rl.common.secret_variables import looks_secret
from nemo_fp8rl.config.typed_tree import check_keys, to_block
from nemo_fp8rl.config.yaml_tree import (
    expand_homes,
    merge_override,
    read_with_parents,
    register_resolvers,
    yaml_errors_as_user_error,
)

PORTS = re.compile(r"(\d{1,5})-(\d{1,5})", re.ASCII)
LEAST_PORTS = 10
LONGEST_NODE_TMP = 23
"""107 - len("/nfr-01234567-99/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")."""
LEAST_PREFLIGHT_SECONDS = 90
"""The all-reduce takes up to 60 of these seconds."""
PATHS = ("runs_dir", "slurm.venv", "slurm.secrets_file")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NODE = re.compile(r"[\w.,\[\]-]+", re.ASCII)
"""A node's name, or a list of them as SLURM writes it. The script puts such names into an expression of sed."""


@dataclass(frozen=True)
class NodeGroup:
    """The engines' nodes, the second part of a heterogeneous SLURM job. null: as for the trainer's nodes."""

    partition: str | None = None
    constraint: str | None = None
    gpus_per_node: Annotated[int | None, GPUS] = None
    cpus_per_node: Annotated[int | None, COUNT] = None
    memory: str | None = None


@dataclass(frozen=True)
class ContainerConfig:
    """A container of Pyxis and enroot."""

    image: str | None = None
    """The container's image; null: the jobs run in the virtual environment of `slurm.venv`."""
    mounts: tuple[str, ...] = ()
    """HOST:CONTAINER[:FLAGS], besides the run's folder, the folder of the submission and `slurm.node_tmp`."""
    workdir: str | None = None
    """The working directory in the container; null: the folder of the submission."""


@dataclass(frozen=True)
class SlurmConfig:
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: tuple[str, ...] = ()
    """Nodes that no job may use."""
    exclusive: bool = True
    """Ask for whole nodes. Without it a job shares nodes with others and needs cpus_per_node."""
    cpus_per_node: Annotated[int | None, COUNT] = None
    memory: str | None = None
    """Memory of a node, in SLURM's form, such as 512G; null leaves it to the cluster."""
    gres: bool = True
    """Ask SLURM for GPUs (--gpus-per-node). false for a SLURM without GRES, which would refuse: the job then has
    all GPUs of its nodes and shares no node."""
    time: str = "04:00:00"
    """Time limit of one attempt, HH:MM:SS or D-HH:MM:SS."""
    stop_seconds: Annotated[int, SECONDS] = 300
    """Seconds before the end of `time` to tell the driver to save and stop; the job then goes into the queue again."""
    max_restarts: Annotated[int, COUNT_OR_0] = 20
    """Attempts after the first, whatever ended the attempt before."""
    ready_seconds: Annotated[int, SECONDS] = 600
    """Seconds within which all nodes must have joined the Ray cluster."""
    preflight_seconds: Annotated[int, Range(at_least=LEAST_PREFLIGHT_SECONDS, at_most=YEAR)] = 300
    """Seconds within which the nodes must have passed their checks, the import of a container's image included."""
    min_free_gib: Annotated[float, Range(at_least=0, at_most=2**30)] = 10.0
    """GiB of disk that must be free in node_tmp of every node."""
    node_tmp: str = "/tmp"
    """A folder on each node's own disk, with a short path. Ray's sessions are in a folder of the run in it."""
    ports: str = "20000-29999"
    """The range of ports from which the head of the Ray cluster takes three free ports."""
    venv: str | None = None
    """A virtual environment that all nodes see; null: the environment that runs this command."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    secrets_file: str | None = None
    """A file of NAME=value lines for tokens and keys, on the shared filesystem, readable by its owner alone."""
    setup: str = ""
    """Shell commands that the job's script runs first, outside of any container, such as module loads; the job ends
    when the last of them fails."""
    generation: NodeGroup | None = None
    """The engines' nodes if they are of another kind than the trainer's; the job is then heterogeneous."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, such as --reservation=rl."""


@dataclass(frozen=True)
class LaunchConfig:
    name: str | None = None
    """Name of the job; null: the recipe's file name."""
    runs_dir: str = "runs/launch"
    """The parent of each run's folder: script, logs of every attempt, addresses. On SLURM all nodes must see it."""
    nodes: Annotated[int | None, COUNT] = None
    """Number of all nodes; null: 1. A recipe for NeMo RL states this key and the next two."""
    generation_nodes: Annotated[int | None, COUNT_OR_0] = None
    """The part of `nodes` that has engines alone; null: 0."""
    gpus_per_node: Annotated[int | None, GPUS] = None
    """GPUs of a node; null: 0. `launch local` takes all GPUs of the machine, whatever a recipe for NeMo RL says."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables of every process. Not for secrets, because the script and the scheduler's records show them."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)


def read_settings(site: Path | None, changes: Sequence[str] = ()) -> LaunchConfig:
    """Return the settings of a site file with `key=value` changes. Raises UserError, which names the key."""
    from omegaconf import OmegaConf

    register_resolvers()
    tree: Any = OmegaConf.create() if site is None else read_with_parents(site)
    for change in changes:
        tree = merge_override(tree, change)
    with yaml_errors_as_user_error(str(site or "--set")):
        values: Any = OmegaConf.to_container(tree, resolve=True)
    expand_homes(values, PATHS)
    check_keys(values, LaunchConfig)
    if isinstance(number := (values.get("slurm") or {}).get("time"), int):
        raise UserError(
            f"slurm.time={number} is what YAML reads: to it HH:MM:SS is a number to the base of 60; quote it, in the "
            "site file as '12:00:00', behind --set as slurm.time=\"'12:00:00'\""
        )
    settings = to_block(values, LaunchConfig)
    _check(settings)
    return settings


def _check(settings: LaunchConfig) -> None:
    for name, value in settings.env.items():
        if not VARIABLE.fullmatch(name):
            raise UserError(f"env.{name} is not the name of an environment variable")
        if looks_secret(name, value):
            raise UserError(
                f"env.{name} looks like a secret, and the script would show it: give it in slurm.secrets_file, or in a "
                "Kubernetes secret named in kubernetes.secrets"
            )
        if "\0" in value:
            raise UserError(f"env.{name} holds a null character")
    check_fields(settings, "")
    _check_slurm(settings.slurm)


def _check_slurm(slurm: SlurmConfig) -> None:
    for name in slurm.exclude:
        if not NODE.fullmatch(name):
            raise UserError(f"slurm.exclude: {name!r} is not the name of a node, such as n1 or n[1-4]")
    if not slurm.node_tmp.startswith("/") or len(slurm.node_tmp) > LONGEST_NODE_TMP:
        raise UserError(
            f"slurm.node_tmp={slurm.node_tmp} must be an absolute path of at most {LONGEST_NODE_TMP} characters: Ray's "
            "sockets are below it, and the path of a socket has at most 107"
        )
    ports = PORTS.fullmatch(slurm.ports)
    if not ports or not 1024 <= int(ports[1]) <= int(ports[2]) - LEAST_PORTS <= 65535 - LEAST_PORTS:
        raise UserError(
            f"slurm.ports={slurm.ports} must be a range FIRST-LAST of at least {LEAST_PORTS} ports within 1024-65535"
        )
