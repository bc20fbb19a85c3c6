"""How many steps a second does our loop take in turn with generation, and with generation ahead of it?

    python benchmarks/async_loop.py [--steps 20] [--rounds 3] [--age 1] [--dry-run] [--json FILE]

The tiny recipe, with the engine's core in a process of its own in all ways. Three ways in turns, in one run:

    in turn    engines answer, then the trainer takes its step
    fenced     engines answer `--age` steps ahead; a refit waits for the answers in progress
    in flight  the same, and a refit comes between two tokens

The first two steps of a run are left out. Trainer and engine need cores of their own, or the figures say nothing. A dry
run is as short as can be, for the sake of the tests: its figures say nothing either.
"""

import argparse
import json
import os
import tempfile
import warnings
from pathlib import Path
from statistics import fmean, median

os.environ.setdefault("OMP_NUM_THREADS", "1")
from rich.console import Console
from rich.table import Table

from nemo_fp8rl.commands.sft import sft
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.run.step_log import read
from nemo_fp8rl.train import train

RECIPES = Path(__file__).parent.parent / "conf"
AHEAD = ("grpo.async_grpo.enabled=true",)
WAYS = {"in turn": (), "fenced": AHEAD, "in flight": (*AHEAD, "grpo.async_grpo.in_flight_weight_updates=true")}
NAMES = ("train/reward", "train/version_lag_mean", "generation/idle_share", "timing/generate", "timing/refit")
LEFT_OUT = 2


def measure(folder: Path, way: str, number: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Return steps a second, of the median step, and means of NAMES that the run has."""
    log_dir = folder / f"{way.replace(' ', '_')}_{number}"
    keys = [
        f"policy.model_name={folder}/warm",
        f"data.train.data_path={folder}/data.jsonl",
        "policy.generation.vllm_cfg.async_engine=true",
        f"grpo.async_grpo.max_trajectory_age_steps={arguments.age}",
        f"grpo.max_num_steps={arguments.steps + LEFT_OUT}",
        f"grpo.seed={number}",
        *("grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0"),
        *("checkpointing.enabled=false", "logger.tensorboard_enabled=false", f"logger.log_dir={log_dir}"),
        *(f"policy.train_{size}_batch_size={arguments.prompts * 8}" for size in ("global", "micro")),
        *(f"grpo.num_prompts_per_step={arguments.prompts}", "grpo.num_generations_per_prompt=8"),
    ]
    assert train(load(RECIPES / "tiny_cpu.yaml", [*keys, *WAYS[way]])), "a signal ended the run"
    rows = [row for row in read(log_dir / "metrics.jsonl") if row["step"] > LEFT_OUT]
    means = {name: fmean(row[name] for row in rows) for name in NAMES if name in rows[0]}
    return {"steps_per_second": 1 / median(row["timing/total_step_time"] for row in rows), **means}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--age", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=64, help="prompts a step, of 8 answers each")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.dry_run:
        arguments.steps, arguments.rounds, arguments.prompts = 2, 1, 8
    warnings.filterwarnings("ignore")

    measured: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        make_tiny(folder, "add")
        choices = (f"policy.model_name={folder}/model", f"data.train.data_path={folder}/data.jsonl")
        warm_up = (f"sft.max_num_steps={10 if arguments.dry_run else 150}", f"logger.log_dir={folder}/sft")
        sft(load(RECIPES / "tiny_sft.yaml", [*choices, *warm_up]), folder / "warm")
        for number in range(arguments.rounds):
            for way, found in measured.items():
                found.append(measure(folder, way, number, arguments))

    middle = {way: {name: median(each[name] for each in found) for name in found[0]} for way, found in measured.items()}
    in_turn = middle["in turn"]["steps_per_second"]
    table = Table("way", "steps/s", "/ in turn", *NAMES)
    for way, figures in middle.items():
        speed = figures["steps_per_second"]
        others = (f"{figures[name]:.3g}" if name in figures else "" for name in NAMES)
        table.add_row(way, f"{speed:.3g}", f"{speed / in_turn:.2f}", *others)
    Console().print(table)
    if arguments.json:
        settings = {name: getattr(arguments, name) for name in ("steps", "rounds", "age", "prompts")}
        arguments.json.write_text(json.dumps({"settings": settings, "ways": middle}, indent=1) + "\n")


if __name__ == "__main__":
    main()
