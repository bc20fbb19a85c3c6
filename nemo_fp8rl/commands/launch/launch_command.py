"""`nemo-fp8rl launch`: plan a job, render it, and print or submit it."""

from collections.abc import Sequence
from pathlib import Path

from nemo_fp8rl.commands.launch import kubernetes, local
from nemo_fp8rl.commands.launch.job import plan
from nemo_fp8rl.commands.launch.settings import read_settings
from nemo_fp8rl.commands.launch.slurm import job_script

LAUNCHERS = {"local": local.launch, "slurm": job_script.launch, "k8s": kubernetes.launch}


def launch(
    target: str,
    recipe: Path,
    overrides: Sequence[str],
    *,
    loop: str | None = None,
    site: Path | None = None,
    changes: Sequence[str] = (),
    idle: bool = False,
    dry_run: bool = False,
) -> bool:
    """Submit a recipe; with dry_run print exactly what would be submitted. Raises UserError before it submits."""
    settings = read_settings(site, changes)
    job = plan(recipe, overrides, settings, loop, idle, ignore_gpu_count=target == "local")
    return LAUNCHERS[target](job, settings, dry_run)
