"""A job: the driver's command and the nodes that it needs, from a recipe and the settings of a site."""

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_fp8rl.commands.launch.settings import LaunchConfig
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.nemo_rl.recipe import read_recipe as nemo_rl
from nemo_fp8rl.nemo_rl.recipe.gpu_division import is_colocated
from nemo_fp8rl.nemo_rl.recipe.keys import at

LONGEST_NAME = 38
"""A label of Kubernetes has at most 63 characters, and the run id, which is one, adds 25."""
NAME = re.compile(rf"[a-z]([-a-z0-9]{{0,{LONGEST_NAME - 2}}}[a-z0-9])?")
"""A job's name that both SLURM and Kubernetes accept."""

CHECKPOINTS, LOGS = "checkpointing.checkpoint_dir", "logger.log_dir"
RECIPE_KEYS = {
    "nodes": "cluster.num_nodes",
    "generation_nodes": "policy.generation.colocated.resources.num_nodes",
    "gpus_per_node": "cluster.gpus_per_node",
}
"""Setting -> the key of a recipe for NeMo RL that has the same meaning."""


@dataclass(frozen=True)
class Job:
    """A job to launch.

    name:              part of the run id
    run_id:            the same in every attempt
    command:           the driver's arguments without the interpreter: loop, --config, recipe, overrides; empty for a
                       cluster that waits for people
    nodes:             all nodes
    generation_nodes:  the part of `nodes` that has engines alone
    values:            the resolved recipe if it is a recipe for NeMo RL, else None
    writes:            recipe key -> folder that the run writes; a run without checkpoints has no entry for them, and
                       no attempt could continue from an earlier attempt
    """

    name: str
    run_id: str
    command: tuple[str, ...]
    nodes: int
    generation_nodes: int
    gpus_per_node: int
    values: Mapping[str, Any] | None = None
    writes: Mapping[str, str] = field(default_factory=dict)

    @property
    def saves(self) -> bool:
        return CHECKPOINTS in self.writes

    def command_with(self, *defaults: str) -> tuple[str, ...]:
        """Return the command with these overrides before the user's overrides, so that the user's win."""
        first = len(self.command) - len(self.overrides)
        return (*self.command[:first], *defaults, *self.overrides)

    @property
    def recipe(self) -> Path:
        return Path(self.command[self.command.index("--config") + 1])

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides that the user gave."""
        return self.command[self.command.index("--config") + 2 :]

    @property
    def train_nodes(self) -> int:
        return self.nodes - self.generation_nodes


def plan(
    recipe: Path,
    overrides: Sequence[str],
    settings: LaunchConfig,
    loop: str | None = None,
    idle: bool = False,
    ignore_gpu_count: bool = False,
) -> Job:
    """Return the job of a recipe.

    loop:              "train" (the package's loop) or "nemo" (NeMo RL's). None: nemo for a recipe in NeMo RL's dialect,
                       else train; train also runs NeMo RL's dialect if the data are JSONL
    idle:              the job is a cluster that waits for people
    ignore_gpu_count:  do not take the number of GPUs from the recipe
    Raises: UserError if recipe and settings contradict each other, and with loop="train" for what that loop refuses
            whatever model and data are. The rest of the recipe is checked where it runs, or by `nemo-fp8rl doctor`.
    """
    values, colocated, writes = _read(recipe, overrides)
    of_recipe = None if values is None or ignore_gpu_count else _sizes(values)
    sizes = of_recipe or {"nodes": 1, "generation_nodes": 0, "gpus_per_node": 0}
    for key, size in sizes.items():
        setting = getattr(settings, key)
        if of_recipe and setting not in (None, size):
            raise UserError(f"{key}={setting}, but {RECIPE_KEYS[key]} says {size}: change that instead, as an override")
        sizes[key] = size if setting is None else setting
    nodes, alone = sizes["nodes"], sizes["generation_nodes"]
    if alone >= nodes:
        raise UserError(f"generation_nodes={alone} of nodes={nodes} leaves none to train on: raise nodes")
    if alone and colocated:
        raise UserError(
            f"generation_nodes={alone}, but policy.generation.colocated.enabled=true puts engines beside ranks: "
            "set one of them otherwise"
        )
    name = settings.name or re.sub(r"[^a-z0-9]+", "-", recipe.stem.lower()).strip("-")[:LONGEST_NAME].rstrip("-")
    if not NAME.fullmatch(name):
        raise UserError(
            f"name={name!r}: a job's name is of lower-case letters, digits and dashes, begins with a letter, ends with "
            f"none of the dashes and has at most {LONGEST_NAME}; give another with --set name=..."
        )
    loop = loop or ("train" if values is None else "nemo")
    if loop == "nemo" and values is None:
        raise UserError(f"--loop nemo: {recipe} is no recipe for NeMo RL; `nemo-fp8rl recipes` lists some")
    if loop == "train" and values is not None and not (idle or ignore_gpu_count):
        from nemo_fp8rl.nemo_rl.recipe.recipe_for_train import convert_keys_for_train  # loads torch

        convert_keys_for_train(recipe, values)
    restartable = ("--restartable",) if loop == "train" else ()  # NeMo RL's loop always continues
    command = (loop, *restartable, "--config", str(recipe), *overrides)
    for word in command:
        if "\0" in word or word.encode(errors="ignore").decode() != word:  # a null character, or bytes that are no text
            raise UserError(f"{word!r} is not text that a script can hold")
    run_id = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
    return Job(name, run_id, () if idle else command, **sizes, values=values, writes=writes)


def _read(recipe: Path, overrides: Sequence[str]) -> tuple[dict[str, Any] | None, bool, dict[str, str]]:
    """Return (values of a recipe for NeMo RL or None, whether engines share the trainer's GPUs, `Job.writes`)."""
    if nemo_rl.is_for_nemo_rl(recipe):
        values = nemo_rl.load_recipe(recipe, overrides).values
        colocated, saves = is_colocated(values["policy"]["generation"]), at(values, "checkpointing.enabled", True)
        writes = {key: at(values, key, None) for key in (CHECKPOINTS, LOGS)}
    else:
        cfg = load(recipe, overrides)
        values, colocated, saves = None, cfg.policy.generation.colocated.enabled, cfg.checkpointing.enabled
        writes = {CHECKPOINTS: cfg.checkpointing.checkpoint_dir, LOGS: cfg.logger.log_dir}
    return values, colocated, {key: str(path) for key, path in writes.items() if path and (saves or key == LOGS)}


def _sizes(values: Mapping[str, Any]) -> dict[str, int]:
    sizes = {"generation_nodes": 0} | {key: at(values, RECIPE_KEYS[key], None) for key in ("nodes", "gpus_per_node")}
    if not is_colocated(values["policy"]["generation"]) and sizes["nodes"] > 1:  # one node has both
        sizes["generation_nodes"] = at(values, RECIPE_KEYS["generation_nodes"], None) or 1
    return sizes
