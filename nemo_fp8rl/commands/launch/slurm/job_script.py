"""A SLURM job: one script, which is a header of the job and a body that all jobs share, and sbatch."""

import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nemo_fp8rl.commands.launch.job import Job
from nemo_fp8rl.commands.launch.limits import YEAR
from nemo_fp8rl.commands.launch.mounts import mount_of
from nemo_fp8rl.commands.launch.settings import LaunchConfig, NodeGroup, SlurmConfig
from nemo_fp8rl.commands.launch.slurm.attempt import secrets
from nemo_fp8rl.commands.launch.template import TEMPLATES, fill
from nemo_fp8rl.common.errors import INTERRUPTED, UserError

DIRECTIVE = re.compile(r"[\w./:,=+@%\[\]*-]+", re.ASCII)
"""Characters of an option in a #SBATCH line, where sbatch reads quotes by rules of its own."""
CONSTRAINT = re.compile(r"--constraint=[\w./:,=+@%\[\]*&|()-]+", re.ASCII)
"""A constraint joins features of nodes by & and |."""
ARRAY = re.compile(r"-a.*|--ar(r(ay?)?)?(=.*)?")
"""sbatch accepts a prefix of an option's name."""
EXCLUDE = re.compile(r"-x.*|--exclude?(=.*)?")
SLURM_CLIENT_VARIABLES = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS"}
"""SLURM's variables that belong to no job; body.sh keeps the same ones."""
EXPORTED = (
    *("HOSTS", "GENERATION_NODES", "GPUS_PER_NODE", "GENERATION_GPUS_PER_NODE", "PORTS", "MIN_FREE_GIB"),
    *("ATTEMPT_DIR", "PREFLIGHT_DIR", "SECRETS_FILE", "NEMO_FP8RL_RUN_ID", "WANDB_RUN_ID", "WANDB_RESUME"),
    *("PYTHONUNBUFFERED", "NEMO_FP8RL_STOP_AT", "RAY_TMPDIR", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"),
    "RAY_USAGE_STATS_ENABLED",
)
"""Variables that body.sh exports to every step."""
TIME = re.compile(r"(?:(\d{1,3})-)?(\d{1,4}):(\d\d):(\d\d)", re.ASCII)


def launch(job: Job, settings: LaunchConfig, dry_run: bool = False) -> bool:
    """Submit a job and print how to follow it; with dry_run print exactly what would be submitted."""
    secrets(
        Path(settings.slurm.secrets_file) if settings.slurm.secrets_file else None
    )  # raises UserError for a bad file
    script = render(job, settings)
    if dry_run:
        print(script, end="")
        return True
    number, folder = submit(script, job, settings), run_dir(job, settings)
    print(f"job {number}, run {job.run_id}\n  script and logs: {folder}\n  follow: tail -F {folder}/attempt-0/job.log")
    return True


def render(job: Job, settings: LaunchConfig) -> str:
    """Return the script. Raises UserError for a setting that SLURM would misread."""
    slurm = settings.slurm
    if slurm.max_restarts and job.command and not job.saves:
        raise UserError(
            f"slurm.max_restarts={slurm.max_restarts}, but the run saves no checkpoints to continue from: set "
            "checkpointing.enabled=true, or slurm.max_restarts=0"
        )
    folder = run_dir(job, settings)
    _check_written_folders(job, settings)
    alone = slurm.generation or NodeGroup()
    generation_gpus = job.gpus_per_node if alone.gpus_per_node is None else alone.gpus_per_node
    header = fill(
        "slurm/header.sh.jinja",
        job=job,
        run_dir=folder,
        groups=_groups(job, settings, folder, generation_gpus),
        python=_python(slurm),
        driver=_driver(job, slurm),
        generation_gpus=generation_gpus,
        slurm=slurm,
        time_seconds=_seconds(slurm.time),
        step_options=_container(slurm, folder, (*settings.env, *EXPORTED)),
        secrets_file=slurm.secrets_file and Path(slurm.secrets_file).absolute(),
        max_restarts=slurm.max_restarts if job.command else 0,
        unfinished=INTERRUPTED,
        env=settings.env,
    )
    return header + (TEMPLATES / "slurm" / "body.sh").read_text()


def submit(script: str, job: Job, settings: LaunchConfig) -> str:
    """Write the run's folder, give its script to sbatch and return the job's number. Raises UserError."""
    if shutil.which("sbatch") is None:
        raise UserError(
            "there is no sbatch here: run this on a login node of the cluster; or mkdir -p there the RUN_DIR of what "
            "--dry-run prints, save that as RUN_DIR/job.sbatch, and give it to sbatch"
        )
    folder = run_dir(job, settings)
    try:
        folder.mkdir(parents=True)
        (folder / "job.sbatch").write_text(script)
        (folder / "excluded_nodes").write_text("".join(f"{node}\n" for node in settings.slurm.exclude))
    except OSError as error:
        raise UserError(f"runs_dir={settings.runs_dir} cannot be written ({error}); give another folder") from None
    # sbatch, and srun in the job, would take the variables of an allocation around this process for the job's.
    of_allocation = {name for name in os.environ if name.startswith("SLURM_")} - SLURM_CLIENT_VARIABLES
    done = subprocess.run(
        ["sbatch", "--parsable", str(folder / "job.sbatch")],
        env={name: value for name, value in os.environ.items() if name not in of_allocation},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        shutil.rmtree(folder)
        raise UserError(f"sbatch refused the job: {' '.join(done.stderr.split())}")
    return done.stdout.strip().split(";")[0]


def run_dir(job: Job, settings: LaunchConfig) -> Path:
    path = Path(settings.runs_dir).absolute() / job.run_id
    if not DIRECTIVE.fullmatch(str(path)) or "%" in str(path):
        raise UserError(f"runs_dir={settings.runs_dir}: {str(path)!r} has characters that SLURM reads; give another")
    return path


def _groups(job: Job, settings: LaunchConfig, folder: Path, generation_gpus: int) -> list[list[str]]:
    """Return sbatch's options of the job, or of both parts of a heterogeneous job."""
    slurm, alone = settings.slurm, settings.slurm.generation
    if _seconds(slurm.time) <= slurm.stop_seconds:
        raise UserError(
            f"slurm.stop_seconds={slurm.stop_seconds} must be less than slurm.time={slurm.time}: change one"
        )
    if alone is not None and not job.generation_nodes:
        raise UserError(
            "slurm.generation is given, but the recipe has no nodes for engines alone: set generation_nodes"
        )
    both = [
        f"--time={slurm.time}",
        *_options(account=slurm.account, qos=slurm.qos, exclude=",".join(slurm.exclude)),
        *(["--exclusive"] if slurm.exclusive else []),
        *slurm.options,
    ]
    _check_options(slurm.options)
    first = [
        f"--job-name={job.name}",
        f"--output={folder}/slurm-%j.out",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{slurm.stop_seconds}",
        *both,
    ]
    if alone is None:
        return _check_directives([[*first, *_nodes(job.nodes, job.gpus_per_node, slurm, NodeGroup())]])
    train = _nodes(job.train_nodes, job.gpus_per_node, slurm, NodeGroup())
    return _check_directives([[*first, *train], [*both, *_nodes(job.generation_nodes, generation_gpus, slurm, alone)]])


def _nodes(count: int, gpus: int, slurm: SlurmConfig, group: NodeGroup) -> list[str]:
    cpus = group.cpus_per_node or slurm.cpus_per_node
    if not slurm.exclusive and cpus is None:
        raise UserError("slurm.exclusive=false needs slurm.cpus_per_node: how many CPUs of each node are the job's")
    if gpus and not slurm.gres and not slurm.exclusive:
        raise UserError("slurm.gres=false needs slurm.exclusive=true: SLURM would give other jobs the same GPUs")
    return [
        f"--nodes={count}",
        "--ntasks-per-node=1",
        *_options(
            partition=group.partition or slurm.partition,
            constraint=group.constraint or slurm.constraint,
            cpus_per_task=cpus,
            mem=group.memory or slurm.memory,
            gpus_per_node=(slurm.gres and gpus) or None,
        ),
    ]


def _options(**options: Any) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value not in (None, "")]


def _check_directives(groups: list[list[str]]) -> list[list[str]]:
    for option in (option for group in groups for option in group):
        if not option.startswith("-") or not (DIRECTIVE.fullmatch(option) or CONSTRAINT.fullmatch(option)):
            raise UserError(f"slurm: {option!r} cannot stand in a #SBATCH line: it has characters that SLURM reads")
    return groups


def _check_options(options: Iterable[str]) -> None:
    for option in options:
        if ARRAY.fullmatch(option):
            raise UserError(
                f"slurm.options: {option!r} makes several jobs of one run, which would share its folder: remove it, "
                "and launch each run by itself"
            )
        if EXCLUDE.fullmatch(option):
            raise UserError(
                f"slurm.options: {option!r} would be forgotten when a bad node is left out: give slurm.exclude"
            )


def _check_written_folders(job: Job, settings: LaunchConfig) -> None:
    """Raise UserError if the run writes to a node's disk or to a container's filesystem, which ends with a step."""
    container, workdir = settings.slurm.container, str(Path.cwd())
    if container.image is None or not job.command:
        return
    is_kept = {workdir: True, str(run_dir(job, settings)): True, posixpath.normpath(settings.slurm.node_tmp): False}
    for mount in container.mounts:
        source, target, flags, *_ = [*mount.split(":"), "", ""]
        is_kept[posixpath.normpath(target or source)] = "ro" not in flags.split("+")
    for key, folder in job.writes.items():
        where = posixpath.normpath(posixpath.join(workdir, container.workdir or "", folder))
        if not is_kept.get(mount_of(where, is_kept) or "", False):
            raise UserError(
                f"{key}={folder} is {where} in the container, where nothing outlives it: give a folder below one of "
                f"slurm.container.mounts that can be written, or below {workdir}"
            )


def _seconds(limit: str) -> int:
    if not (match := TIME.fullmatch(limit)):
        raise UserError(f"slurm.time={limit!r} must be of the form HH:MM:SS or D-HH:MM:SS")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total > YEAR:
        raise UserError(f"slurm.time={limit} must be at most a year")
    return total


def _python(slurm: SlurmConfig) -> str:
    if slurm.container.image is not None:
        return "python3"
    return str(Path(slurm.venv).absolute() / "bin" / "python") if slurm.venv else sys.executable


def _driver(job: Job, slurm: SlurmConfig) -> tuple[str, ...]:
    if not job.command:
        return ("sleep", "infinity")
    driver = (_python(slurm), "-m", "nemo_fp8rl.cli")
    backend = ("cluster.backend=ray",) if job.values is None else ()  # a recipe for NeMo RL always uses Ray
    words = job.command_with(*backend)
    position = words.index("--config") + 1
    return (*driver, *words[:position], str(job.recipe.absolute()), *words[position + 1 :])


def _container(slurm: SlurmConfig, folder: Path, variables: Iterable[str]) -> list[str]:
    """Return srun's options for Pyxis: every step has its own container, and all containers share node_tmp.

    variables: names of variables that win over the image's; Pyxis lets the image win otherwise
    """
    container = slurm.container
    if container.image is None:
        return []
    workdir = Path.cwd()
    folders = dict.fromkeys([str(workdir), str(folder), slurm.node_tmp])
    mounts = [*container.mounts, *(f"{path}:{path}" for path in folders)]
    if slurm.secrets_file:
        secret = Path(slurm.secrets_file).absolute()
        mounts.append(f"{secret}:{secret}:ro")
    for mount in mounts:
        if "," in mount:
            raise UserError(f"slurm.container.mounts: {mount!r} holds a comma, which separates mounts")
    return [
        f"--container-image={container.image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={container.workdir or workdir}",
        "--no-container-mount-home",
        f"--container-env={','.join(dict.fromkeys(variables))}",
    ]
