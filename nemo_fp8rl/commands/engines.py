"""`nemo-fp8rl engines`: tell a run how many engines it is to have, from its next step on."""

from pathlib import Path

from nemo_fp8rl.common.atomic_files import is_locked
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.generation.elastic_engines import write_wanted


def request_engines(run: Path, count: int) -> None:
    """Write the number where the run in the folder reads it between two steps, and say so.

    run:     a run directory (logger.log_dir)
    Raises:  UserError where the folder has no run, or the run cannot have so many
    """
    recipe = run / "config.yaml"
    if not recipe.is_file():
        raise UserError(f"{run} has no config.yaml, so it is no run: give the logger.log_dir of one")
    write_wanted(run, load(recipe).cluster, count)
    when = "from its next step on" if is_locked(run) else "when it is continued: no process works in it now"
    print(f"{run} is to have {count} engines {when}")
