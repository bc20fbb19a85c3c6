"""A site file: what a cluster asks for, whatever the recipe. Read with `--site FILE`, changed by `--set key=value`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_fp8rl.commands.launch.kubernetes_settings import KubernetesConfig
from nemo_fp8rl.commands.launch.limits import (
    OF_KUBERNETES,
    OF_KUBERNETES_GENERATION,
    OF_SECURITY_CONTEXT,
    OF_SLURM,
    OF_SLURM_GENERATION,
    SIZES,
    check_limits,
)
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.secret_variables import looks_secret
from nemo_fp8rl.config.typed_tree import check_keys, typed
from nemo_fp8rl.config.yaml_tree import expand_homes, read_with_parents, refusing, register_resolvers, with_override

PORTS = re.compile(r"(\d{1,5})-(\d{1,5})", re.ASCII)
LEAST_PORTS = 10
LONGEST_NODE_TMP = 23
"""107 - len("/nfr-01234567-99/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")."""
PATHS = ("runs_dir", "slurm.venv", "slurm.secrets_file")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NODE = re.compile(r"[\w.,\[\]-]+", re.ASCII)
"""A node's name, or a list of them as SLURM writes it. The script puts such names into an expression of sed."""


@dataclass(frozen=True)
class NodeGroup:
    """A heterogeneous SLURM job's second part: the nodes of the engines. What is null is as for the trainer's."""

    partition: str | None = None
    constraint: str | None = None
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
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
    """Nodes that are never asked for."""
    exclusive: bool = True
    """Ask for whole nodes. Without it a job shares nodes with others and needs cpus_per_node."""
    cpus_per_node: int | None = None
    memory: str | None = None
    """Memory of a node, in SLURM's form, such as 512G; null leaves it to the cluster."""
    gres: bool = True
    """Whether SLURM is asked for GPUs (--gpus-per-node). false where it knows of none (GRES) and would refuse: the job
    has those of its nodes, which it shares with no other."""
    time: str = "04:00:00"
    """Time limit of one attempt, HH:MM:SS or D-HH:MM:SS."""
    stop_seconds: int = 300
    """Seconds before the end of `time` to tell the driver to save and stop; the job then goes into the queue again."""
    max_restarts: int = 20
    """Attempts after the first, whatever ended the one before."""
    ready_seconds: int = 600
    """Seconds within which all nodes must have joined the Ray cluster."""
    preflight_seconds: int = 300
    """Seconds within which the nodes must have passed their checks, the import of a container's image included."""
    min_free_gib: float = 10.0
    """GiB of free disk that a node must have in node_tmp."""
    node_tmp: str = "/tmp"
    """A folder that each node has for itself, with a short path; Ray's sessions are in a folder of the run's in it."""
    ports: str = "20000-29999"
    """The range of ports of which the Ray cluster's head takes three that are free."""
    venv: str | None = None
    """A virtual environment that all nodes see; null: the one that runs this command."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    secrets_file: str | None = None
    """A file of NAME=value lines on the shared filesystem that only its owner may read; for tokens and keys."""
    setup: str = ""
    """Shell commands that the job's script runs first, outside of any container, such as module loads; the job ends
    when the last of them fails."""
    generation: NodeGroup | None = None
    """The engines' nodes, where they are of another kind than the trainer's: makes the job heterogeneous."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, such as --reservation=rl."""


@dataclass(frozen=True)
class LaunchConfig:
    name: str | None = None
    """Name of the job; null: the recipe's file name."""
    runs_dir: str = "runs/launch"
    """Where each run has its folder: script, logs of every attempt, addresses. On SLURM all nodes must see it."""
    nodes: int | None = None
    """All nodes; null: 1. A recipe for NeMo RL says this and the next two itself."""
    generation_nodes: int | None = None
    """Nodes, of all `nodes`, for engines alone; null: 0."""
    gpus_per_node: int | None = None
    """GPUs of a node; null: 0; by `launch local`, as many as there are, whatever a recipe for NeMo RL says."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables of every process. Not for secrets: they would be in the script and in the scheduler's records."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)


def read_settings(site: Path | None, changes: Sequence[str] = ()) -> LaunchConfig:
    """The site file with `key=value` changes. Raises UserError, naming the key, for what cannot be."""
    from omegaconf import OmegaConf

    register_resolvers()
    tree: Any = OmegaConf.create() if site is None else read_with_parents(site)
    for change in changes:
        tree = with_override(tree, change)
    with refusing(str(site or "--set")):
        values: Any = OmegaConf.to_container(tree, resolve=True)
    expand_homes(values, PATHS)
    check_keys(values, LaunchConfig)
    if isinstance(number := (values.get("slurm") or {}).get("time"), int):
        raise UserError(
            f"slurm.time={number} is what YAML reads: to it HH:MM:SS is a number to the base of 60; quote it, in the "
            "site file as '12:00:00', behind --set as slurm.time=\"'12:00:00'\""
        )
    settings = typed(values, LaunchConfig)
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
    check_limits(settings, SIZES)
    _check_slurm(settings.slurm)
    check_limits(settings.kubernetes, OF_KUBERNETES, "kubernetes.")
    check_limits(settings.kubernetes.security_context, OF_SECURITY_CONTEXT, "kubernetes.security_context.")
    if settings.kubernetes.generation is not None:
        check_limits(settings.kubernetes.generation, OF_KUBERNETES_GENERATION, "kubernetes.generation.")


def _check_slurm(slurm: SlurmConfig) -> None:
    check_limits(slurm, OF_SLURM, "slurm.")
    if slurm.generation is not None:
        check_limits(slurm.generation, OF_SLURM_GENERATION, "slurm.generation.")
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
