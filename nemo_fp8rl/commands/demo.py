"""`nemo-fp8rl demo`: make a tiny model, warm it up, run GRPO in FP8 end to end, and print the results."""

from itertools import count
from pathlib import Path
from shlex import quote
from statistics import fmean

from rich.table import Table
from rich.text import Text

from nemo_fp8rl.commands.compare.comparison import as_words
from nemo_fp8rl.commands.sft import sft
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.common.display import Screen
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.config.schema import Config
from nemo_fp8rl.run.directory import RunDirectory
from nemo_fp8rl.train import train

RECIPES = Path(__file__).resolve().parents[2] / "conf"
PHASES = ("generate", "logprob", "train", "refit")


def demo(runs: Path) -> bool:
    """Run the demo in a new folder under `runs`. Returns False if it was interrupted."""
    if not RECIPES.is_dir():
        raise UserError("the demo's recipes are in conf/ of a clone of the repository; run it from there")
    folder = next(path for i in count(1) if not (path := runs / f"demo-{i}").exists())
    make_tiny(folder, "add")
    paths = {"data.train.data_path": f"{folder}/data.jsonl", "policy.model_name": f"{folder}/model"}
    warm_up = load(RECIPES / "tiny_sft.yaml", as_words(paths))
    if not sft(warm_up, folder / "warm"):
        return False
    paths |= {"policy.model_name": f"{folder}/warm", "logger.log_dir": f"{folder}/grpo"}
    cfg = load(RECIPES / "tiny_cpu.yaml", as_words(paths))
    if not train(cfg, resume_hint=f"nemo-fp8rl train --config {quote(f'{folder}/grpo/config.yaml')} --resume"):
        return False
    Screen().print(make_summary(cfg))
    return True


def make_summary(cfg: Config) -> Table:
    """Return a table of a finished run: accuracy before and after, mismatch, refit, seconds by phase."""
    rows = RunDirectory(cfg, resume=True).read_metrics()
    accuracies = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
    steps = [row for row in rows if row["step"] > 0]

    def mean(name: str) -> float:
        return fmean(row[name] for row in steps)

    table = Table(title=f"{cfg.nemo_fp8rl.flow}, {len(steps)} GRPO steps", show_header=False)
    table.add_row("validation accuracy, start", f"{accuracies[0]:.3f}")
    table.add_row("validation accuracy, end", f"{accuracies[-1]:.3f}")
    table.add_row("token_mult_prob_error, mean", f"{mean('train/token_mult_prob_error'):.6f}")
    table.add_row("tokens bit-equal in trainer and engine", f"{mean('train/exact_logprob_fraction'):.1%}")
    table.add_row("refit", f"{mean('refit/bytes') / 1e6:.2f} MB in {mean('timing/refit') * 1e3:.0f} ms")
    for phase in PHASES:
        table.add_row(f"seconds a step, {phase}", f"{mean(f'timing/{phase}'):.3f}")
    table.add_row("run directory", Text(cfg.logger.log_dir))
    return table
