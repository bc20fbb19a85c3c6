"""One machine: the driver in this terminal, on the GPUs that are here."""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from nemo_fp8rl.errors import UserError
from nemo_fp8rl.launch.job import Job, block
from nemo_fp8rl.launch.limits import MOST, whole
from nemo_fp8rl.launch.settings import LaunchConfig
from nemo_fp8rl.launch.template import fill

SAY_HOW_MANY = "mend the driver, or say how many GPUs to use: --set gpus_per_node=N, 0 for a run on the CPU"


def launch(job: Job, settings: LaunchConfig, dry_run: bool = False) -> bool:
    """Become the driver, so that its exit code is this command's; with dry_run print the script that would."""
    script = render(job, settings)
    if not dry_run:
        os.execvp("bash", ["bash", "-c", script])
    print(script, end="")
    return True


def render(job: Job, settings: LaunchConfig) -> str:
    """The script."""
    if not job.command:
        raise UserError("--idle is for clusters: here `ray start --head` starts one")
    gpus = visible_gpus() if settings.gpus_per_node is None else settings.gpus_per_node
    overrides, layout = choose(job.values, gpus) if job.values else ((), "")
    driver = (sys.executable, "-m", "nemo_fp8rl.cli", *job.command_with(*overrides))
    return fill("local/run.sh.jinja", job=job, layout=layout, env=settings.env, driver=driver)


def visible_gpus() -> int:
    """How many this machine has, as far as CUDA_VISIBLE_DEVICES shows them; none without nvidia-smi.

    Raises UserError where nvidia-smi fails: GPUs that it cannot see are not none.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([number for number in visible.split(",") if number.strip()])
    try:
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return 0
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"nvidia-smi --list-gpus failed ({error}); {SAY_HOW_MANY}") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:200]
        raise UserError(f"nvidia-smi --list-gpus failed ({said}); {SAY_HOW_MANY}")
    return len(done.stdout.splitlines())


def choose(values: Mapping[str, Any], gpus: int) -> tuple[tuple[str, ...], str]:
    """Overrides for a recipe of NeMo RL's on one machine, and what they mean.

    Trainer and engines share the GPUs and take turns, as each would be idle for half of a step otherwise; but an
    asynchronous loop has them work at once, each on GPUs of its own: half of them, as far as both can use that.
    Without GPUs they are processes. Raises UserError where the recipe fits in no way.
    """
    ranks = max(gpus, 1)
    one = ("cluster.num_nodes=1",)
    colocated = "++policy.generation.colocated.enabled="
    if not block(values, "grpo.async_grpo").get("enabled"):
        return (*one, f"cluster.gpus_per_node={ranks}", f"{colocated}true"), f"trainer and engines share {ranks}"
    ranks = gpus or 2
    trainer = "policy.megatron_cfg"
    model = _parallel(values, trainer, "tensor_model_parallel_size")
    model *= _parallel(values, trainer, "pipeline_model_parallel_size")
    if block(values, trainer).get("context_parallel_size") is not None:
        model *= _parallel(values, trainer, "context_parallel_size")
    engine = _parallel(values, "policy.generation.vllm_cfg", "tensor_parallel_size")
    fits = [n for n in range(engine, ranks, engine) if (ranks - n) % model == 0]
    if not fits:
        raise UserError(
            f"grpo.async_grpo.enabled=true: of {ranks} GPUs there is no part for engines of {engine} "
            f"(policy.generation.vllm_cfg.tensor_parallel_size) that leaves a multiple of {model} to the trainer"
        )
    alone = min(fits, key=lambda n: (abs(2 * n - ranks), -n))
    resources = "++policy.generation.colocated.resources"
    split = (f"{colocated}false", f"{resources}.gpus_per_node={alone}", f"{resources}.num_nodes=null")
    return (*one, f"cluster.gpus_per_node={ranks}", *split), f"{ranks - alone} to train and {alone} for engines"


def _parallel(values: Mapping[str, Any], where: str, key: str) -> int:
    return whole(block(values, where).get(key), f"{where}.{key}", 1, MOST)
