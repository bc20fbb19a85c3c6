"""`nemo-fp8rl launch`: plan, render, and print or submit."""

from collections.abc import Sequence
from pathlib import Path

from nemo_fp8rl.launch import kubernetes, local, slurm
from nemo_fp8rl.launch.job import plan
from nemo_fp8rl.launch.settings import read_settings

PLACES = {"local": local.launch, "slurm": slurm.launch, "k8s": kubernetes.launch}


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
