"""What do hints and trajectory sampling gain where GRPO alone has little signal, at equal numbers of generated tokens?

    python benchmarks/rollout_choices.py [--steps 40] [--seeds 5] [--jobs 1] [--dry-run] [--folder F] [--json FILE]

The task is the demo's, additions of two numbers of two digits. A tiny model is warmed up so briefly that few of its
answers are right: many groups have no right answer at all, and GRPO alone learns from the others. All runs start from
the same warm model:

    GRPO            all answers train
    hints           grpo.hints: a prompt without a right answer is asked again with the beginning of its solution. The
                    solution of this task is the sum itself, of two or three digits, and the hint, a share of a half,
                    is its first digit or its first two. The model has no chat template, so it continues the hint: this
                    is the easiest kind of hint
    pairs           grpo.trajectory_sampling: of each group the half of the pairs with the largest contrast
    pairs, shuffle  the same, drawn in ROUNDS rounds by their advantages

The accuracy on held-out prompts, greedy and without hints, is compared by generated tokens, of which a step with hints
has more. Between two validations the accuracy is on the line through them, and the comparison ends at the fewest tokens
of any run. Differences are of runs of the same seed, that of the prompts' order and of sampling. With pairs an
optimizer step has half of the rows.

Runs are stored in --folder: an interrupted benchmark continues. A dry run is as short as can be, for the sake of the
tests: its figures say nothing.
"""

import argparse
import json
import os
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np
from rich.console import Console
from rich.table import Table
from stored_runs import run_all

from nemo_fp8rl.commands.compare.statistics import Interval, interval, paired_interval
from nemo_fp8rl.commands.sft import sft
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.common.machine import machine
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.run.step_log import read
from nemo_fp8rl.train import train

ROOT = Path(__file__).resolve().parent.parent
ANSWERS, GROUPS, ROUNDS = 16, 32, 8
PERIOD = 10
POINTS = 8
"""Numbers of tokens at which choices are compared."""
KEPT = "grpo.trajectory_sampling.keep_pairs=0.5"
REFERENCE = "GRPO"
CHOICES: dict[str, tuple[str, ...]] = {
    REFERENCE: (),
    "hints": ("grpo.hints.enabled=true", "grpo.hints.shares=[0.5]", "grpo.hints.template='{prompt}{hint}'"),
    "pairs": (KEPT,),
    "pairs, shuffle": (KEPT, f"grpo.trajectory_sampling.shuffle_rounds={ROUNDS}"),
}


def whole_sum(completion: str, rendered_prompt: str, prompt: str, answer: str) -> float:
    """Return 1 where the answer, behind the hint that the model saw, is the whole sum."""
    return float(rendered_prompt + completion == prompt + answer)


def keys_of(folder: Path) -> tuple[str, ...]:
    return (
        f"data.train.data_path={folder}/solved.jsonl",
        "logger.tensorboard_enabled=false",
    )


def make_warm(folder: Path, steps: int) -> Path:
    """Return a folder with solved.jsonl and the warm model, which are made where they are missing."""
    place = folder / f"warm_{steps}"
    if (place / "warm").exists():
        return place
    if not place.exists():
        make_tiny(place, "add")
    rows = [json.loads(line) for line in (place / "data.jsonl").read_text().splitlines()]
    lines = (json.dumps(row | {"solution": row["answer"]}) + "\n" for row in rows)
    (place / "solved.jsonl").write_text("".join(lines))
    keys = f"policy.model_name={place}/model", f"sft.max_num_steps={steps}", f"logger.log_dir={place}/sft"
    quiet = "sft.val_at_start=false", "sft.val_period=0", "checkpointing.enabled=false"
    sft(load(ROOT / "conf/tiny_sft.yaml", (*keys_of(place), *keys, *quiet)), place / "warm", restartable=True)
    return place


def learn(folder: Path, choice: str, seed: int, steps: int, place: Path) -> dict[str, Any]:
    """Return generated tokens and accuracies at each validation, and what each step says of its groups.

    place: see `make_warm`
    """
    run = folder / f"{choice}_{seed}_{steps}".replace(", ", "_")
    rows = ANSWERS * GROUPS // (2 if KEPT in CHOICES[choice] else 1)
    keys = (
        f"policy.model_name={place}/warm",
        f"logger.log_dir={run}",
        f"grpo.seed={seed}",
        f"grpo.max_num_steps={steps}",
        f"grpo.val_period={PERIOD}",
        f"grpo.num_prompts_per_step={GROUPS}",
        f"grpo.num_generations_per_prompt={ANSWERS}",
        f"policy.train_global_batch_size={rows}",
        f"policy.train_micro_batch_size={rows}",
        "policy.generation.val_temperature=0",
        "data.default.env_name=rollout_choices:whole_sum",
        f"checkpointing.save_period={steps}",
    )
    if not train(load(ROOT / "conf/tiny_cpu.yaml", (*keys_of(place), *keys, *CHOICES[choice])), restartable=True):
        raise KeyboardInterrupt
    tokens, total = [0], 0.0
    accuracies = list[float]()
    steps_of_run = list[dict[str, float]]()
    for row in read(run / "metrics.jsonl"):
        if row["step"]:
            total += row["train/generated_tokens"]
            steps_of_run.append(row)
        if "validation/accuracy" in row:
            tokens = [*tokens[: len(accuracies)], int(total)]
            accuracies.append(row["validation/accuracy"])

    def mean(name: str) -> float | None:
        found = [row[f"train/{name}"] for row in steps_of_run if f"train/{name}" in row]
        return round(fmean(found), 4) if found else None

    names = "frac_reward_zero_std", "hinted_ratio", "unhinted_reward", "reward", "generated_tokens"
    return {"tokens": tokens, "accuracy": accuracies, **{name: mean(name) for name in names}}


def summarize(runs: dict[tuple[str, int], dict[str, Any]]) -> tuple[list[int], list[dict[str, Any]]]:
    """Return numbers of tokens, and for each choice its accuracies there with intervals, and less those of GRPO."""
    points = [int(point) for point in np.linspace(0, min(run["tokens"][-1] for run in runs.values()), POINTS + 1)]

    def at(choice: str, point: int) -> dict[int, float]:
        chosen = {seed: run for (name, seed), run in runs.items() if name == choice}
        return {seed: float(np.interp(point, run["tokens"], run["accuracy"])) for seed, run in chosen.items()}

    rows = []
    for choice in dict.fromkeys(name for name, _ in runs):
        row: dict[str, Any] = {"choice": choice}
        row["accuracy"] = [numbers(interval(list(at(choice, point).values()))) for point in points]
        row["less_grpo"] = [numbers(paired_interval(at(choice, point), at(REFERENCE, point))) for point in points]
        names = "frac_reward_zero_std", "hinted_ratio", "unhinted_reward", "reward", "generated_tokens"
        for name in names:
            values = [run[name] for (other, _), run in runs.items() if other == choice and run[name] is not None]
            row[name] = fmean(values) if values else None
        rows.append(row)
    return points, rows


def numbers(found: Interval | None) -> list[float | None]:
    """Return mean and half of the width."""
    assert found is not None
    return [round(found.mean, 4), None if found.half is None else round(found.half, 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm-up", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("runs/rollout_choices"))
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/rollout_choices_cpu.json")
    arguments = parser.parse_args()
    steps, warm_up, seeds = arguments.steps, arguments.warm_up, arguments.seeds
    if arguments.dry_run:
        steps, warm_up, seeds = 1, 5, 1

    folder = arguments.folder.resolve()
    place = make_warm(folder, warm_up)
    cases = {(choice, seed): (folder, choice, seed, steps, place) for seed, choice in product(range(seeds), CHOICES)}
    results = run_all(folder / "results", learn, cases, arguments.jobs)
    points, rows = summarize({key: results[key] for key in sorted(cases, key=lambda key: list(CHOICES).index(key[0]))})
    record = {
        "settings": {
            **{"steps": steps, "warm_up_steps": warm_up, "seeds": seeds},
            **{"prompts_a_step": GROUPS, "answers_a_prompt": ANSWERS, "shuffle_rounds": ROUNDS},
        },
        "machine": machine(),
        "generated_tokens": points,
        "rows": rows,
    }
    arguments.json.write_text(json.dumps(record) + "\n")

    def show(pair: list[float | None], form: str) -> str:
        return format(pair[0], form) + ("" if pair[1] is None else f" ± {pair[1]:.3f}")

    table = Table("choice", *(f"{point:,}" for point in points[::2]), "less GRPO at the end", "no signal", "hinted")
    for row in rows:
        curve = (show(pair, ".3f") for pair in row["accuracy"][::2])
        hinted = "-" if row["hinted_ratio"] is None else f"{row['hinted_ratio']:.0%}"
        less = "-" if row["choice"] == REFERENCE else show(row["less_grpo"][-1], "+.3f")
        table.add_row(row["choice"], *curve, less, f"{row['frac_reward_zero_std']:.0%}", hinted)
    console = Console(width=150)
    console.print(table)
    console.print("columns: generated tokens; accuracy on held-out prompts, mean of the seeds ± 95 % interval")


if __name__ == "__main__":
    main()
