"""`nemo-fp8rl demo --loop nemo`: NeMo RL's own GRPO loop on the tiny model, in FP8 end to end, and its results.

The loop is that of the checkout in NEMO_RL_SRC; trainer, engine, refit and loss are this package's.
"""

import time
from pathlib import Path
from shlex import quote

from rich.table import Table

from nemo_fp8rl.commands.compare.comparison import as_words
from nemo_fp8rl.common.display import Screen
from nemo_fp8rl.config.recipe_names import find_recipe
from nemo_fp8rl.nemo_rl.compat import prepare
from nemo_fp8rl.nemo_rl.recipe.checkout import find_checkout, make_absolute
from nemo_fp8rl.workers import require_token

REWARD, MISMATCH = "train/reward", "train/token_mult_prob_error"


def demo_nemo_rl(runs: Path, steps: int | None = None, warm_up_steps: int | None = None) -> bool:
    """Run the demo in a new folder under `runs`. Returns False if it was interrupted.

    Raises: UserError if there is no checkout of NeMo RL, or if what it imports is not installed
    """
    make_absolute()
    version = find_checkout().version
    require_token()
    prepare()  # what is missing is said before the warm-up
    from nemo_fp8rl.commands.demo import make_warm_model, say
    from nemo_fp8rl.nemo_rl.run.run_loop import run

    if (folder := make_warm_model(runs, warm_up_steps, parts=2)) is None:
        return False
    logs = folder / "nemo_rl"
    changes = {
        "policy.model_name": f"{folder}/warm",
        "data.train.data_path": f"{folder}/data.jsonl",
        "logger.log_dir": f"{logs}",
        "checkpointing.checkpoint_dir": f"{folder}/checkpoints",
    } | ({} if steps is None else {"grpo.max_num_steps": steps})
    say(f"2/2 grpo_train of NeMo RL {version}, in FP8 end to end")
    begin = time.monotonic()
    if not run(find_recipe("nemo_rl/tiny_cpu"), as_words(changes)):
        return False
    log = max(logs.glob("exp_*"))
    Screen().print(make_summary(log, time.monotonic() - begin))
    say(f"log folder: {log}; next:\n  nemo-fp8rl report {quote(str(log))}   # as a page")
    return True


def make_summary(folder: Path, seconds: float) -> Table:
    """Return a table of a finished run: reward of the first and last step, mismatch, time.

    folder: NeMo RL's log folder of the run, with its TensorBoard events
    """
    values = read_scalars(folder, (REWARD, MISMATCH))
    rewards, mismatch = values[REWARD], values[MISMATCH]
    table = Table(title=f"NeMo RL's grpo_train, fp8_e2e, {len(rewards)} steps", show_header=False)
    table.add_row("reward, first step", f"{rewards[0]:.3f}")
    table.add_row("reward, last step", f"{rewards[-1]:.3f}")
    table.add_row("token_mult_prob_error, largest", f"{max(mismatch):.6f}")
    table.add_row("seconds, start and end included", f"{seconds:.0f}")
    return table


def read_scalars(folder: Path, names: tuple[str, ...]) -> dict[str, list[float]]:
    """Return metrics by step, read from the TensorBoard events anywhere in the folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    by_step: dict[str, dict[int, float]] = {name: {} for name in names}
    for file in sorted(folder.rglob("events*")):
        events = EventAccumulator(str(file))
        events.Reload()
        for name in set(names) & set(events.Tags()["scalars"]):
            by_step[name] |= {event.step: event.value for event in events.Scalars(name)}
    return {name: [values[step] for step in sorted(values)] for name, values in by_step.items()}
