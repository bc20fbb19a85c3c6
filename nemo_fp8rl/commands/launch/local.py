"""Launch on one machine: the driver runs in this terminal, on the GPUs of this machine."""

import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_fp8rl.commands.launch.job import Job
from nemo_fp8rl.commands.launch.settings import LaunchConfig
from nemo_fp8rl.commands.launch.template import fill
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.common.visible_gpus import visible_gpu_names
from nemo_fp8rl.config.recipe import load, read
from nemo_fp8rl.nemo_rl.recipe.keys import at

LAYOUT = ("cluster.backend", "cluster.train_ranks", "cluster.generation_engines")
"""Keys by which a recipe states which side has which GPUs."""
COLOCATED = "policy.generation.colocated.enabled"
IN_TURNS = {"policy.generation.vllm_cfg.sleep_level": 1, "policy.megatron_cfg.offload_between_phases": "true"}
"""Settings that two sides which share GPUs need; a recipe for NeMo RL gets the same ones."""
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
GPU_COUNT_HINT = "mend the driver, or say how many GPUs to use: --set gpus_per_node=N, 0 for a run on the CPU"


def launch(job: Job, settings: LaunchConfig, dry_run: bool = False) -> bool:
    """Become the driver, whose exit code is then the command's; with dry_run print the script instead."""
    script = render(job, settings)
    if not dry_run:
        os.execvp("bash", ["bash", "-c", script])
    print(script, end="")
    return True


def render(job: Job, settings: LaunchConfig) -> str:
    """Return the script that starts the driver."""
    if not job.command:
        raise UserError("--idle is for clusters: here `ray start --head` starts one")
    gpus = visible_gpus() if settings.gpus_per_node is None else settings.gpus_per_node
    if job.values:
        overrides, layout = choose(job.values, gpus)
        if job.command[0] == "train":
            _check_for_train(job.recipe, (*overrides, *job.overrides))
    else:
        is_setting = settings.gpus_per_node is not None
        overrides, layout = choose_for_train(job.recipe, job.overrides, gpus, is_setting)
    driver = (sys.executable, "-m", "nemo_fp8rl.cli", *job.command_with(*overrides))
    env = settings.env | (NO_GPU if settings.gpus_per_node == 0 else {})
    return fill("local/run.sh.jinja", job=job, layout=layout, env=env, driver=driver)


def _check_for_train(recipe: Path, overrides: Sequence[str]) -> None:
    """Raise UserError if `nemo-fp8rl train` refuses a key of this recipe for NeMo RL."""
    from nemo_fp8rl.nemo_rl.recipe.read_recipe import load_recipe as load_nemo_rl
    from nemo_fp8rl.nemo_rl.recipe.recipe_for_train import convert_keys_for_train  # loads torch

    convert_keys_for_train(recipe, load_nemo_rl(recipe, overrides).values)


def visible_gpus() -> int:
    """Return the number of GPUs that CUDA_VISIBLE_DEVICES leaves visible, 0 on a machine without nvidia-smi.

    Raises: UserError if nvidia-smi fails, because its failure does not mean that there are no GPUs
    """
    if (names := visible_gpu_names()) is not None:
        return len(names)
    try:
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return 0
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"nvidia-smi --list-gpus failed ({error}); {GPU_COUNT_HINT}") from None
    if done.returncode:
        message = " ".join((done.stderr or done.stdout).split())[:200]
        raise UserError(f"nvidia-smi --list-gpus failed ({message}); {GPU_COUNT_HINT}")
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())  # and, indented, parts of them


def choose(values: Mapping[str, Any], gpus: int) -> tuple[tuple[str, ...], str]:
    """Return (overrides, the layout in words) for a recipe for NeMo RL on one machine.

    Trainer and engines share the GPUs and take turns, because each would otherwise be idle for half of a step. An
    asynchronous loop runs both at once: each side has about half of the GPUs. Without GPUs both are processes.

    Raises: UserError if no layout fits the recipe
    """
    ranks = max(gpus, 1)
    single_node = ("cluster.num_nodes=1",)
    colocated = "++policy.generation.colocated.enabled="
    if not at(values, "grpo.async_grpo.enabled", False):
        return (*single_node, f"cluster.gpus_per_node={ranks}", f"{colocated}true"), _layout(ranks, 0)
    ranks = gpus or 2
    axes = (f"policy.megatron_cfg.{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context"))
    model = math.prod(at(values, key, None) or 1 for key in axes)
    engine = at(values, "policy.generation.vllm_cfg.tensor_parallel_size", 1)
    alone = _for_engines(ranks, engine, model, "grpo.async_grpo.enabled=true")
    resources = "++policy.generation.colocated.resources"
    split = (f"{colocated}false", f"{resources}.gpus_per_node={alone}", f"{resources}.num_nodes=null")
    return (*single_node, f"cluster.gpus_per_node={ranks}", *split), _layout(ranks, alone)


def choose_for_train(
    recipe: Path, overrides: Sequence[str], gpus: int, is_setting: bool = False
) -> tuple[tuple[str, ...], str]:
    """Return (overrides, the layout in words) for a recipe of `nemo-fp8rl train` on one machine.

    On several GPUs the run uses Ray, and both sides share all GPUs unless the recipe sets
    policy.generation.colocated.enabled=false or grpo.async_grpo.enabled=true. On one GPU or none nothing is added. A
    recipe that states its layout keeps it.

    is_setting: the user gave the number of GPUs, instead of the number that is visible
    Raises:     UserError if the recipe does not fit, or states a layout while the user gave a number other than 0
    """
    values = read(recipe, overrides)[1] if gpus > 1 or (gpus and is_setting) else {}
    named = [f"{key}={value}" for key in LAYOUT if (value := at(values, key, None)) is not None]
    if named and is_setting:
        raise UserError(f"gpus_per_node={gpus}, but the recipe says {', '.join(named)}: leave one of the two out")
    if named or gpus < 2:
        return (), ""
    cfg = load(recipe, overrides)
    generation, is_asynchronous = cfg.policy.generation, cfg.grpo.async_grpo.enabled
    engine, alone, turns = generation.vllm_cfg.tensor_parallel_size, 0, []
    if is_asynchronous or (at(values, COLOCATED, None) is not None and not generation.colocated.enabled):
        why = "grpo.async_grpo.enabled=true" if is_asynchronous else f"{COLOCATED}=false"
        alone = _for_engines(gpus, engine, 1, why)  # a model on several ranks says train_ranks
    elif gpus % engine:
        raise UserError(
            f"policy.generation.vllm_cfg.tensor_parallel_size={engine} does not divide the {gpus} GPUs that engines "
            f"share with the trainer: use others, --set gpus_per_node=N, or set {COLOCATED}=false"
        )
    else:
        turns = [f"{key}={value}" for key, value in IN_TURNS.items() if at(values, key, None) is None]
    sizes = (f"cluster.train_ranks={gpus - alone}", f"cluster.generation_engines={(alone or gpus) // engine}")
    chosen = ("cluster.backend=ray", *sizes, f"{COLOCATED}={'false' if alone else 'true'}", *turns)
    try:
        load(recipe, (*chosen, *overrides))
    except UserError as error:
        raise UserError(f"on {gpus} GPUs {error}; mend that, or use others: --set gpus_per_node=N") from None
    return chosen, _layout(gpus, alone)


def _layout(gpus: int, alone: int) -> str:
    return f"{gpus - alone} to train and {alone} for engines" if alone else f"trainer and engines share {gpus}"


def _for_engines(gpus: int, engine: int, model: int, why: str) -> int:
    """Return how many GPUs engines get for themselves: about half. why: the key that forbids sharing."""
    fits = [n for n in range(engine, gpus, engine) if (gpus - n) % model == 0]
    if not fits:
        raise UserError(
            f"{why}: of {gpus} GPUs there is no part for engines of {engine} "
            f"(policy.generation.vllm_cfg.tensor_parallel_size) that leaves a multiple of {model} to the trainer"
        )
    return min(fits, key=lambda n: (abs(2 * n - gpus), -n))
