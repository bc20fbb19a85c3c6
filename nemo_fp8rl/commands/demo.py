"""`nemo-fp8rl demo`: make a tiny model, warm it up, run GRPO in FP8 end to end, and for contrast in FP8 rollouts."""

from itertools import count
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import Any

from rich.table import Table

from nemo_fp8rl.commands.compare.comparison import as_words
from nemo_fp8rl.commands.sft import sft
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.common.display import Screen
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.run.step_log import read
from nemo_fp8rl.train import train

PHASES = ("generate", "logprob", "train", "refit")
CONTRAST_STEPS = 5
"""Steps of the run with an FP8 engine and a bfloat16 trainer: enough to see how far the two are apart."""
CONTRAST = {
    "nemo_fp8rl.flow": "fp8_rollout",
    "grpo.val_at_start": False,
    "grpo.val_at_end": False,
    "grpo.val_period": 0,
    "checkpointing.enabled": False,
}


def demo(runs: Path, steps: int | None = None, warm_up_steps: int | None = None) -> bool:
    """Run the demo in a new folder under `runs`. Returns False if it was interrupted."""
    screen = Screen(highlight=False)
    if (folder := make_warm_model(runs, warm_up_steps, parts=3)) is None:
        return False
    paths: dict[str, Any] = {"data.train.data_path": f"{folder}/data.jsonl", "policy.model_name": f"{folder}/warm"}
    length = {} if steps is None else {"grpo.max_num_steps": steps}
    cfg = load("tiny_cpu", as_words(paths | length | {"logger.log_dir": f"{folder}/grpo"}))
    say(f"2/3 GRPO in FP8 end to end, {cfg.grpo.max_num_steps} steps")
    if not train(cfg, resume_hint=f"nemo-fp8rl train {quote(f'{folder}/grpo/config.yaml')} --resume"):
        return False
    length = {"grpo.max_num_steps": min(CONTRAST_STEPS, cfg.grpo.max_num_steps)}
    contrast = load("tiny_cpu", as_words(paths | length | CONTRAST | {"logger.log_dir": f"{folder}/fp8_rollout"}))
    say(f"3/3 for contrast {contrast.grpo.max_num_steps} steps with FP8 in the engine alone, from the same model")
    if not train(contrast, resume_hint="this command, which begins a new demo,"):
        return False
    screen.print(make_summary([cfg, contrast]))
    say("\n".join(next_steps(folder, cfg.grpo.max_num_steps)))
    return True


def make_warm_model(runs: Path, warm_up_steps: int | None, parts: int) -> Path | None:
    """Make a new folder under `runs` with data.jsonl and a model in warm/. Returns None if it was interrupted.

    parts: number of parts of the demo, of which this is the first
    """
    folder = next(path for i in count(1) if not (path := runs / f"demo-{i}").exists())
    say(f"1/{parts} a tiny model (Qwen3, 2 layers) and 8,100 additions, in {folder}; its warm-up on right answers")
    make_tiny(folder, "add")
    paths: dict[str, Any] = {"data.train.data_path": f"{folder}/data.jsonl", "policy.model_name": f"{folder}/model"}
    paths["logger.log_dir"] = f"{folder}/sft"
    length = {} if warm_up_steps is None else {"sft.max_num_steps": warm_up_steps}
    hint = f"nemo-fp8rl sft {quote(f'{folder}/sft/config.yaml')} --resume --output {quote(f'{folder}/warm')}"
    return folder if sft(load("tiny_sft", as_words(paths | length)), folder / "warm", resume_hint=hint) else None


def say(text: str) -> None:
    Screen(highlight=False).print(text, markup=False, soft_wrap=True)


def make_summary(runs: list[Config]) -> Table:
    """Return a table of finished runs, a column each: accuracy before and after, mismatch, refit, seconds by phase."""
    table = Table("", *(cfg.nemo_fp8rl.flow for cfg in runs))
    columns = [_figures(read(Path(cfg.logger.log_dir) / "metrics.jsonl")) for cfg in runs]
    for name in columns[0]:
        table.add_row(name, *(column.get(name, "") for column in columns))
    return table


def _figures(rows: list[dict[str, float]]) -> dict[str, str]:
    accuracies = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
    steps = [row for row in rows if row["step"] > 0]

    def mean(name: str) -> float:
        return fmean(row[name] for row in steps)

    figures = {"GRPO steps": str(len(steps))}
    if accuracies:
        figures |= {"validation accuracy": f"{accuracies[0]:.3f} -> {accuracies[-1]:.3f}"}
    return figures | {
        "token_mult_prob_error, mean": f"{mean('train/token_mult_prob_error'):.6f}",
        "tokens bit-equal in trainer and engine": f"{mean('train/exact_logprob_fraction'):.1%}",
        "refit, mean of a step": f"{mean('refit/bytes') / 1e6:.2f} MB in {mean('timing/refit') * 1e3:.0f} ms",
        "seconds per step": f"{mean('timing/total_step_time'):.2f}",
        **{f"  of which {phase}": f"{mean(f'timing/{phase}'):.3f}" for phase in PHASES},
    }


def next_steps(folder: Path, steps: int) -> list[str]:
    """Return the lines that end the demo: its folder, and commands to go on with."""

    def at(name: str) -> str:
        return quote(f"{folder}/{name}")

    weights = f"grpo/checkpoints/step_{steps}/policy/weights"
    commands = {
        f"report {at('grpo')} {at('fp8_rollout')} --output {at('report.html')}": "both runs as one page",
        f"train {at('grpo/config.yaml')} --resume grpo.max_num_steps={steps + 50}": "50 steps more",
        f"export --checkpoint {at(weights)} --output {at('fp8')}": "the FP8 checkpoint, which vLLM serves",
    }
    lines = [f"  nemo-fp8rl {command}   # {purpose}" for command, purpose in commands.items()]
    return [f"everything is in {folder}; next:", *lines]
