"""The summaries that a run prints: the figures of a step for the display, and the table at its end."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from statistics import fmean

from rich.table import Table
from rich.text import Text

from nemo_fp8rl.common.display import Screen
from nemo_fp8rl.common.format_numbers import format_exactly, format_share
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.run.directory import checkpoint_steps
from nemo_fp8rl.run.learning_signal import count_without_signal
from nemo_fp8rl.run.resume import COMMANDS, Loop
from nemo_fp8rl.run.step_log import read

PHASES = ("generate", "reward", "logprob", "train", "kv_calibration", "refit")
Row = Mapping[str, float]


def format_figures(metrics: Row) -> dict[str, str]:
    """Return the figures for the display, from the latest value of every metric."""
    figures = {"reward": f"{metrics['train/reward']:.3f}"}
    if "validation/accuracy" in metrics:
        figures["accuracy"] = f"{metrics['validation/accuracy']:.3f}"
    if "train/token_mult_prob_error" in metrics:
        figures["mismatch"] = format_exactly(metrics["train/token_mult_prob_error"], 6)
    if "train/version_lag_mean" in metrics:
        figures["lag"] = f"{metrics['train/version_lag_mean']:.2f}"
    if "generation/idle_share" in metrics:
        figures["engines idle"] = f"{metrics['generation/idle_share']:.0%}"
    return figures | {
        "tokens/s": f"{metrics['performance/generation_tokens_per_sec']:,.0f}",
        "refit": f"{metrics['timing/refit']:.3g} s {metrics['refit/bytes'] / 1e6:.3g} MB",
        "step": f"{metrics['timing/total_step_time']:.2f} s",
    }


def make_summary(rows: Sequence[Row], title: str) -> Table:
    """Return the table at the end of a run; rows: those of metrics.jsonl, of which it leaves out what is absent."""
    steps = [row for row in rows if row["step"] > 0]
    table = Table("metric", "value", title=f"{title}, {len(steps)} steps", title_justify="left")
    ends = {"train/reward": "first and last step", "validation/accuracy": "first and last"}
    ends |= {} if steps and "train/reward" in steps[0] else {"train/loss": "first and last step"}
    ends["validation/loss"] = "first and last"
    for name, about in ends.items():
        values = [row[name] for row in rows if name in row]
        if values:
            table.add_row(f"{name}, {about}", f"{values[0]:.3f}, {values[-1]:.3f}")
    if (mean := _mean(steps, "train/token_mult_prob_error")) is not None:
        table.add_row("train/token_mult_prob_error, mean (1: agreement)", format_exactly(mean))
    if (mean := _mean(steps, "train/exact_logprob_fraction")) is not None:
        table.add_row("train/exact_logprob_fraction, mean", format_share(mean))
    if (mean := _mean(steps, "refit/bytes")) is not None:
        table.add_row("refit/bytes, mean", f"{mean / 1e6:.3g} MB")
    if (mean := _mean(steps, "train/version_lag_mean")) is not None:
        table.add_row("train/version_lag_mean, mean (refits)", f"{mean:.2f}")
    if (mean := _mean(steps, "generation/idle_share")) is not None:
        table.add_row("generation/idle_share, mean", f"{mean:.0%}")
    total = _mean(steps, "timing/total_step_time")
    for name in ("total_step_time", *PHASES):
        if (mean := _mean(steps, f"timing/{name}")) is not None:
            share = f" ({mean / total:.0%})" if total and name in PHASES else ""
            table.add_row(f"timing/{name}, mean", f"{mean:.3f} s{share}")
    if count := count_without_signal(steps):
        table.add_row("steps whose groups all had equal rewards", f"{count} of {len(steps)}")
    return table


def show_end(cfg: Config, loop: Loop = "grpo") -> None:
    """Print the table of a finished run, and what one may do next."""
    screen = Screen(highlight=False)
    rows = read(Path(cfg.logger.log_dir) / "metrics.jsonl")
    screen.print(make_summary(rows, cfg.nemo_fp8rl.flow))
    screen.print(next_commands(cfg, max((int(row["step"]) for row in rows), default=0), loop), soft_wrap=True)


def next_commands(cfg: Config, steps: int, loop: Loop = "grpo") -> Text:
    """Return the folder of a run of so many steps, and commands for what one may do next."""
    folder = Path(cfg.logger.log_dir)
    lines = [f"run directory {folder}", f"  nemo-fp8rl report {quote(str(folder))}"]
    checkpoints = Path(cfg.checkpointing.checkpoint_dir)
    if saved_steps := checkpoint_steps(checkpoints):
        recipe = quote(str(folder / "config.yaml"))
        block = getattr(cfg, loop)
        more = f"{loop}.max_num_steps={2 * steps}"
        if steps < block.max_num_steps:
            more = f"{loop}.max_num_epochs={2 * (block.max_num_epochs or 1)} {loop}.max_num_steps={block.max_num_steps}"
        lines.append(f"  nemo-fp8rl {COMMANDS[loop]} --config {recipe} --resume {more}")
        if cfg.nemo_fp8rl.quantizes_rollout:
            kind = "adapter" if cfg.policy.megatron_cfg.peft.enabled else "weights"
            path = quote(f"{checkpoints}/step_{max(saved_steps)}/policy/{kind}")
            lines.append(f"  nemo-fp8rl export --checkpoint {path} --output {quote(str(folder / 'fp8'))}")
    return Text("\n".join(lines))


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return fmean(values) if values else None
