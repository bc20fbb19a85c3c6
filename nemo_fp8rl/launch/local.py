"""One machine: the driver in this terminal, on the GPUs that are here."""

import math
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from nemo_fp8rl.errors import UserError
from nemo_fp8rl.launch.job import Job
from nemo_fp8rl.launch.settings import LaunchConfig
from nemo_fp8rl.launch.template import fill
from nemo_fp8rl.nemo_rl.keys import at

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
    if not at(values, "grpo.async_grpo.enabled", False):
        return (*one, f"cluster.gpus_per_node={ranks}", f"{colocated}true"), f"trainer and engines share {ranks}"
    ranks = gpus or 2
    axes = (f"policy.megatron_cfg.{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context"))
    model = math.prod(at(values, key, None) or 1 for key in axes)
    engine = at(values, "policy.generation.vllm_cfg.tensor_parallel_size", 1)
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
