"""`nemo-fp8rl launch`: plan, render, and print or submit."""

from collections.abc import Sequence
from pathlib import Path

from nemo_fp8rl.commands.launch import kubernetes, local
from nemo_fp8rl.commands.launch.job import plan
from nemo_fp8rl.commands.launch.settings import read_settings
from nemo_fp8rl.commands.launch.slurm import job_script

PLACES = {"local": local.launch, "slurm": job_script.launch, "k8s": kubernetes.launch}


def launch(
    place: str,
    recipe: Path,
    overrides: Sequence[str],
    *,
    loop: str | None = None,
    site: Path | None = None,
    changes: Sequence[str] = (),
    idle: bool = False,
    dry_run: bool = False,
) -> bool:
    """Submit, or with dry_run print exactly what would be. Raises UserError before anything is submitted."""
    settings = read_settings(site, changes)
    job = plan(recipe, overrides, settings, loop, idle, on_any_gpus=place == "local")
    return PLACES[place](job, settings, dry_run)
