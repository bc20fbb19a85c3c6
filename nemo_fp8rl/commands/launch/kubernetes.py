"""A job as a RayJob of KubeRay, or a RayCluster that waits for people; submitted by kubectl.

The recipe travels in a ConfigMap, merged with its parents and overrides (`merged_recipe`): a pod cannot see a file on
the submitter's disk, and overrides on the entry point would pass through two shells and Kubernetes' `$(...)`. Before a
pod ends, the run saves (`run/pod_stop.py`), because KubeRay does not tell the driver. The API server checks a manifest
before anything is created.
"""

import posixpath
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from nemo_fp8rl.commands.launch.job import CHECKPOINTS, Job
from nemo_fp8rl.commands.launch.kubernetes_settings import KubernetesConfig
from nemo_fp8rl.commands.launch.merged_recipe import merge
from nemo_fp8rl.commands.launch.mounts import mount_of
from nemo_fp8rl.commands.launch.settings import LaunchConfig
from nemo_fp8rl.commands.launch.template import fill, quote
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.run import pod_stop

RECIPE_FOLDER = "/etc/nemo-fp8rl"
RECIPE = f"{RECIPE_FOLDER}/recipe.yaml"
RUN_ID_LABEL = "nemo-fp8rl/run-id"
MAX_CONFIG_MAP = 1 << 20
MAX_NAME = 47
"""Characters of a RayJob's name at most, because KubeRay adds to it (validation.go)."""
QUANTITY = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[kMGTPE])?")
"""A quantity of memory, as the API server reads it."""
KUBECTL_SECONDS = 120
SAVE_SECONDS = 600
"""Default of the seconds in which a run finishes its step and saves before a pod ends."""
LINGER_SECONDS = 30
"""Seconds that the head's pod stays after the driver ended, so that KubeRay sees the result."""


def launch(job: Job, settings: LaunchConfig, dry_run: bool = False) -> bool:
    """Submit a job and print how to follow it; with dry_run print exactly what would be submitted."""
    text = render(job, settings)
    if dry_run:
        print(text, end="")
        return True
    submit(text, settings)
    print("\n  ".join([f"run {job.run_id}", *next_steps(job, settings)]))
    return True


def object_name(job: Job) -> str:
    """Return the RayJob's name: the run id, with its beginning cut so that KubeRay accepts the length."""
    suffix = job.run_id.removeprefix(job.name)
    return job.name[: MAX_NAME - len(suffix)].rstrip("-") + suffix


def render(job: Job, settings: LaunchConfig) -> str:
    """Return the YAML that `submit` gives to kubectl. Raises UserError for settings that cannot work."""
    k = settings.kubernetes
    workdir = k.workdir or next((volume.path for volume in k.volumes if not volume.read_only), None)
    _check(k)
    recipe, entrypoint, saves_on = _recipe(job, k, workdir) if job.command else (None, (), None)
    grace = k.termination_grace_seconds
    if grace is None and saves_on is not None:
        grace = SAVE_SECONDS
    values = {
        "k": k,
        "grace": grace,
        "linger": LINGER_SECONDS,
        "name": object_name(job),
        "labels": _labels(job, k),
        "env": {name: value.replace("$", "$$") for name, value in _variables(job, settings, saves_on, grace).items()},
        "unprivileged": bool(k.security_context.run_as_user),
        "saves": saves_on is not None,
        "workdir": workdir,
        "entrypoint": shlex.join(entrypoint),
        "has_recipe": recipe is not None,
        "recipe_folder": RECIPE_FOLDER,
        "groups": _groups(job, k),
    }
    text = _without_empty_lines(fill(f"kubernetes/{'rayjob' if job.command else 'raycluster'}.yaml.jinja", **values))
    if recipe is not None:
        text = fill("kubernetes/recipe.yaml.jinja", **values, recipe=_block(recipe, 4)) + "---\n" + text
    return text


def submit(text: str, settings: LaunchConfig) -> None:
    """Have the API server check the manifest, then create it. Raises UserError with the first line of kubectl."""
    namespace = _namespace(settings.kubernetes)
    for arguments in (("--dry-run=server",), ()):
        command = ["kubectl", "create", *namespace, *arguments, "-f", "-"]
        try:
            done = subprocess.run(
                command, input=text, capture_output=True, text=True, timeout=KUBECTL_SECONDS, check=False
            )
        except FileNotFoundError:
            raise UserError(
                "kubectl is not on PATH: install it, or save what --dry-run prints and create it elsewhere"
            ) from None
        except subprocess.TimeoutExpired:
            raise UserError(f"kubectl has not answered in {KUBECTL_SECONDS} seconds; try `kubectl get pods`") from None
        if done.returncode:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
            raise UserError(f"kubectl create: {lines[0] if lines else f'exit code {done.returncode}'}")


def next_steps(job: Job, settings: LaunchConfig) -> list[str]:
    """Return the commands that follow the job, one per line with its purpose."""
    name, k = object_name(job), settings.kubernetes
    kubectl = shlex.join(["kubectl", *_namespace(k)])
    kind = "rayjob" if job.command else "raycluster"
    head = f"{RUN_ID_LABEL}={job.run_id},ray.io/node-type=head"
    if not job.command:
        logs = f"{kubectl} exec -it $({kubectl} get pod -l {head} -o name) -- bash  # on the head"
    elif k.kai:
        logs = f"{kubectl} logs -f -l {head} -c ray-job-submitter --tail=-1  # the driver's output"
    else:
        logs = f"{kubectl} logs -f job/{name}  # the driver's output, once all pods are ready"
    kinds = "rayjob,configmap" if job.command else kind
    return [
        f"{kubectl} get {kind} {name} -w",
        f"{kubectl} get pods -l {RUN_ID_LABEL}={job.run_id}",
        logs,
        f"{kubectl} port-forward $({kubectl} get pod -l {head} -o name) 8265  # the dashboard on localhost:8265",
        f"{kubectl} delete {kinds} -l {RUN_ID_LABEL}={job.run_id}  # the end of it",
    ]


def _namespace(k: KubernetesConfig) -> list[str]:
    return ["-n", k.namespace] if k.namespace else []


def _check(k: KubernetesConfig) -> None:
    if not k.image:
        raise UserError(
            "kubernetes.image is required: an image with nemo-fp8rl and Ray, --set kubernetes.image=registry/name:tag"
        )
    if k.kueue and k.kai:
        raise UserError("kubernetes.kueue and kubernetes.kai both place pods; remove one of the blocks")
    if k.kueue and k.kueue.required_topology and k.kueue.preferred_topology:
        raise UserError("kubernetes.kueue takes required_topology or preferred_topology, not both; remove one")
    for volume in k.volumes:
        if not volume.path.startswith("/"):
            raise UserError(f"kubernetes.volumes: the path {volume.path!r} is not absolute; begin it with a slash")
    paths = Counter(posixpath.normpath(volume.path) for volume in k.volumes)
    if twice := next((path for path, count in paths.items() if count > 1), None):
        raise UserError(f"kubernetes.volumes: {twice} is the path of two volumes; give each volume another path")
    sizes = {"memory": k.memory, "shared_memory": k.shared_memory, "head.memory": k.head.memory}
    if k.generation:
        sizes["generation.memory"] = k.generation.memory
    bytes_of = {key: _bytes(f"kubernetes.{key}", size) for key, size in sizes.items() if size is not None}
    for key in ("memory", "generation.memory"):
        if bytes_of.get(key, bytes_of["shared_memory"]) < bytes_of["shared_memory"]:
            raise UserError(
                f"kubernetes.shared_memory={k.shared_memory} counts as memory of the pod and is above "
                f"kubernetes.{key}={sizes[key]}; lower it, or raise {key}"
            )
    version = re.match(r"(\d{1,9})\.(\d{1,9})", k.ray_version)
    if k.token and (not version or (int(version[1]), int(version[2])) < (2, 52)):
        raise UserError(
            f"kubernetes.ray_version={k.ray_version} has no tokens; use Ray 2.52 or newer, or set "
            "kubernetes.token=false"
        )


def _bytes(key: str, size: str) -> Decimal:
    quantity = QUANTITY.fullmatch(size)
    if not quantity:
        raise UserError(f"{key}={size} is not a quantity; write a number of bytes, 512Gi or 512G")
    unit = quantity[2] or ""
    power = "KMGTPE".index(unit[0].upper()) + 1 if unit else 0
    return Decimal(quantity[1]) * (1024 if unit.endswith("i") else 1000) ** power


def _recipe(job: Job, k: KubernetesConfig, workdir: str | None) -> tuple[str, Sequence[str], str | None]:
    """Return (merged recipe, driver's command, path of the volume on which the run saves before a pod ends or None)."""
    for_nemo_rl = job.values is not None  # such a recipe always is for Ray
    command = job.command if for_nemo_rl else job.command_with("cluster.backend=ray")
    at = command.index("--config")
    loop, path, overrides = command[:at], Path(command[at + 1]), command[at + 2 :]
    text, folder = merge(path, overrides, for_nemo_rl), job.writes.get(CHECKPOINTS)
    if len(text.encode()) > MAX_CONFIG_MAP:
        raise UserError(f"{path} with its parents is larger than the 1 MiB that a ConfigMap holds")
    if k.backoff_limit and not job.saves:
        raise UserError(
            f"kubernetes.backoff_limit={k.backoff_limit}, but the run saves no checkpoints to continue from: set "
            "checkpointing.enabled=true, or backoff_limit to 0"
        )
    volume = _volume(folder, k, workdir) if folder is not None else None
    if k.backoff_limit and volume is None:
        raise UserError(
            f"{CHECKPOINTS}={folder} is on no volume that can be written, so none of the "
            f"backoff_limit={k.backoff_limit} further attempts could continue from it: name a claim in "
            "kubernetes.volumes and a folder below its path, or set kubernetes.backoff_limit=0"
        )
    goes_on = k.backoff_limit or k.kueue
    return text, ("nemo-fp8rl", *loop, "--config", RECIPE), volume if goes_on else None


def _volume(folder: str, k: KubernetesConfig, workdir: str | None) -> str | None:
    """Return the path of the writable volume that holds the checkpoints for the next attempt; None if there is none."""
    volumes = {posixpath.normpath(volume.path): volume for volume in k.volumes}
    mount = mount_of(posixpath.normpath(posixpath.join(workdir or "", folder)), volumes)
    return volumes[mount].path if mount is not None and not volumes[mount].read_only else None


def _labels(job: Job, k: KubernetesConfig) -> dict[str, str]:
    queue = {"kai.scheduler/queue": k.kai.queue} if k.kai else {}
    return {**k.labels, RUN_ID_LABEL: job.run_id, "nemo-fp8rl/job": job.name, **queue}


def _variables(job: Job, settings: LaunchConfig, saves_on: str | None, grace: int | None) -> dict[str, str]:
    run = {"NEMO_FP8RL_RUN_ID": job.run_id, "WANDB_RUN_ID": job.run_id, "WANDB_RESUME": "allow"}
    if saves_on is not None:
        run[pod_stop.FOLDER] = posixpath.join(saves_on, ".nemo-fp8rl")
        if grace is not None and grace > LINGER_SECONDS:  # from SIGTERM to SIGKILL, where KubeRay has Ray stop the job
            run["RAY_JOB_STOP_WAIT_TIME_S"] = str(grace - LINGER_SECONDS)
    secret = {variable.name for variable in settings.kubernetes.secret_env}
    return {name: value for name, value in {**run, **settings.env}.items() if name not in secret}


def _groups(job: Job, k: KubernetesConfig) -> list[dict[str, Any]]:
    generation = k.generation
    groups = [_group("train", job.train_nodes, job.gpus_per_node, k.cpus, k.memory, k.node_selector, k)]
    if job.generation_nodes:
        gpus = job.gpus_per_node if generation is None or generation.gpus_per_node is None else generation.gpus_per_node
        cpus, memory = (generation.cpus, generation.memory) if generation else (None, None)
        selector = k.node_selector
        if generation is not None and generation.node_selector is not None:
            selector = generation.node_selector
        groups.append(_group("generation", job.generation_nodes, gpus, cpus or k.cpus, memory or k.memory, selector, k))
    return groups


def _group(
    name: str,
    nodes: int,
    gpus: int,
    cpus: int | None,
    memory: str | None,
    node_selector: dict[str, str],
    k: KubernetesConfig,
) -> dict[str, Any]:
    resources = {
        **({"cpu": str(cpus)} if cpus else {}),
        **({"memory": memory} if memory else {}),
        **({k.gpu_resource: str(gpus)} if gpus else {}),
        **{device: str(count) for device, count in k.rdma.items()},
    }
    topology = {}
    if k.kueue and k.kueue.required_topology:
        topology["kueue.x-k8s.io/podset-required-topology"] = k.kueue.required_topology
    if k.kueue and k.kueue.preferred_topology:
        topology["kueue.x-k8s.io/podset-preferred-topology"] = k.kueue.preferred_topology
    return {
        "name": name,
        "nodes": nodes,
        "gpus": gpus,
        "resources": resources,
        "node_selector": node_selector,
        "tolerations": k.tolerations if gpus else (),
        "annotations": {**k.annotations, **topology},
    }


def _without_empty_lines(text: str) -> str:
    """Remove the empty lines that unused parts of a template leave. No value contains a line break."""
    return "".join(line for line in text.splitlines(keepends=True) if line.strip())


def _block(text: str, indent: int) -> str:
    """Return the text as a readable YAML block, or quoted if a block would change a character."""
    plain = all(character == "\n" or character.isprintable() for character in text)
    if not plain or text[:1].isspace() or not text.endswith("\n") or text.endswith("\n\n"):
        return quote(text)
    return "|\n" + "".join(" " * indent + line if line.strip() else line for line in text.splitlines(keepends=True))
