"""`nemo-fp8rl launch`: plan, render, and print or submit."""

from collections.abc import Sequence
from pathlib import Path

from nemo_fp8rl.launch import kubernetes, local, slurm
from nemo_fp8rl.launch.job import plan
from nemo_fp8rl.launch.settings import read_settings


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
    """Submit, or with dry_run print exactly what would be. Raises UserError before anything is submitted.

    Returns whether what ran here ended well; a job that was submitted did.
    """
    settings = read_settings(site, changes)
    job = plan(recipe, overrides, settings, loop, idle)
    if place == "slurm":
        slurm.check_secrets(settings.slurm)
        text = slurm.render(job, settings)
        if dry_run:
            print(text, end="")
            return True
        number = slurm.submit(text, job, settings)
        folder = slurm.run_dir(job, settings)
        print(
            f"job {number}, run {job.run_id}\n  script and logs: {folder}\n  follow: tail -F {folder}/attempt-0/job.log"
        )
        return True
    if place == "k8s":
        return kubernetes.launch(job, settings, dry_run)
    text = local.render(job, settings)
    if dry_run:
        print(text, end="")
        return True
    return local.run(text)
