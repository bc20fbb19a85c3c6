"""What does training lose when the optimizer's state, and the gradients, have fewer bytes?

    python benchmarks/optimizer_states.py [--steps 500] [--seeds 5] [--jobs 1] [--dry-run] [--folder F] [--json FILE]

A tiny language model (`training.py`, nemo_fp8rl.flow=fp8_e2e) learns with each choice of policy.megatron_cfg.optimizer
and distributed_data_parallel_config; the choices of a seed have the same first weights and batches. A step sums the
gradients of several microbatches: of one, gradients are bfloat16 anyway. The gap is the loss less that with float32
states, over the last LAST steps and on held-out rows, paired by seed, with its 95 % interval. The same follows for a
small mixture of experts, with a part of the choices, seeds and steps. Bytes of a parameter between steps are counted
from the trainer's tensors.

Then the reason why float16 masters are refused at the learning rates of reinforcement learning: the share of the
movement of float32 masters that they make in 200 steps of one direction, by the same optimizer (`ScaledAdamW`).

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
import torch
from measure import trained_bytes
from rich.console import Console
from rich.table import Table
from stored_runs import run_all
from training import ROOT, Course, held_out_loss, losses, make_model, trainer

from nemo_fp8rl.commands.compare.statistics import Interval, paired_interval
from nemo_fp8rl.common.machine import machine
from nemo_fp8rl.policy.optimizer.scaled_adam import MASTER, MOMENTS, ScaledAdamW

OPTIMIZER = "policy.megatron_cfg.optimizer"
BF16_GRADIENTS = "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32=false"


def states(mean: str, square: str) -> tuple[str, ...]:
    """Return keys of moments in these dtypes, with masters as remainders."""
    dtypes = f"{OPTIMIZER}.exp_avg_dtype={mean}", f"{OPTIMIZER}.exp_avg_sq_dtype={square}"
    return (f"{OPTIMIZER}.use_precision_aware_optimizer=true", *dtypes)


REFERENCE = "fp32"
CHOICES = {
    REFERENCE: (),
    "bf16 gradients": (BF16_GRADIENTS,),
    "bf16, bf16": states("bf16", "bf16"),
    "fp8, fp16": states("fp8", "fp16"),
    "fp8, fp16, bf16 gradients": (*states("fp8", "fp16"), BF16_GRADIENTS),
}
"""Dtypes of the first and of the second moment, and of gradients where these are not float32."""
OF_MIXTURE = (REFERENCE, "bf16, bf16", "fp8, fp16, bf16 gradients")
ROWS, LENGTH = 8, 64
MICROBATCH = 4
LAST, PERIOD = 50, 10
LARGEST_GAP = 0.003
RATES = (1e-6, 3e-6, 1e-5, 2e-5)
DIRECTION_STEPS = 200


def learn(folder: Path, course: Course, choice: str, seed: int) -> dict[str, Any]:
    """Return mean losses of PERIOD steps, the loss of the last steps and of held-out rows, and bytes of a parameter."""
    keys = "nemo_fp8rl.flow=fp8_e2e", f"policy.train_micro_batch_size={MICROBATCH}"
    with trainer(folder, course, seed, *keys, *CHOICES[choice]) as worker:
        found = list(losses(worker, course, seed))
        return {
            "losses": [round(fmean(found[i : i + PERIOD]), 4) for i in range(0, len(found), PERIOD)],
            "last": fmean(found[-LAST:]),
            "held_out": held_out_loss(worker, course),
            "bytes": trained_bytes(worker),
        }


def movement_share(rate: float, steps: int, count: int) -> float:
    """Return the part of the movement of float32 masters that float16 masters make, in steps of one direction.

    It is the part along that movement. Beside it they move with their scale, away from 0 or towards it.
    """
    full, half = (_movement(rate, dtype, steps, count) for dtype in (torch.float32, torch.float16))
    return float((half @ full) / (full @ full))


def _movement(rate: float, dtype: torch.dtype, steps: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(count, generator=generator).mul(0.02).bfloat16()
    gradient = torch.randn(count, generator=generator)
    piece = weights.clone()
    group = {"params": [piece], "lr": rate, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    adam = ScaledAdamW([group], {**dict.fromkeys(MOMENTS, torch.float32), MASTER: dtype}, remainders=False)
    for _ in range(steps):
        piece.decoupled_grad = gradient
        adam.step()
    return adam.read(piece, MASTER) - weights.float()


def summarize(family: str, runs: dict[tuple[str, int], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each choice."""

    def values(choice: str, kind: str) -> dict[int, float]:
        return {seed: run[kind] for (name, seed), run in runs.items() if name == choice}

    rows = []
    for choice in dict.fromkeys(name for name, _ in runs):
        row: dict[str, Any] = {"family": family, "choice": choice, "bytes": fmean(values(choice, "bytes").values())}
        for kind in ("last", "held_out"):
            row[kind] = fmean(values(choice, kind).values())
            gap = paired_interval(values(choice, kind), values(REFERENCE, kind))
            if choice != REFERENCE and gap and gap.half is not None:
                row[f"{kind}_gap"] = [gap.mean, gap.low, gap.high]
                row[f"{kind}_is_small"] = is_small(gap)
        row["losses"] = [run["losses"] for (name, _), run in runs.items() if name == choice]
        rows.append(row)
    return rows


def is_small(gap: Interval) -> bool:
    """Return whether the interval contains 0 or stays below LARGEST_GAP."""
    return bool(gap.contains_zero) or (gap.high is not None and gap.high < LARGEST_GAP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("runs/optimizer_states"))
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/optimizer_states_cpu.json")
    arguments = parser.parse_args()
    steps, seeds, count = arguments.steps, arguments.seeds, 200_000
    if arguments.dry_run:
        steps, seeds, count = 20, 2, 1000
    warmup = steps // 10
    dense = Course("qwen3", steps, warmup=warmup, rows=ROWS, length=LENGTH)
    mixture = Course("qwen3_moe", max(20, 2 * steps // 5), warmup=warmup, rows=ROWS, length=LENGTH)

    cases = {}
    for course, choices, number in ((dense, CHOICES, seeds), (mixture, OF_MIXTURE, min(3, seeds))):
        for seed, choice in product(range(number), choices):
            make_model(arguments.folder, course, seed)
            cases[course.family, choice, seed] = (arguments.folder, course, choice, seed)
    results = run_all(arguments.folder / "runs", learn, cases, arguments.jobs)
    rows = [
        row
        for family in (dense.family, mixture.family)
        for row in summarize(family, {key[1:]: result for key, result in results.items() if key[0] == family})
    ]
    moves = {rate: movement_share(rate, DIRECTION_STEPS, count) for rate in RATES}
    record = {
        "settings": {
            **{
                "seeds": seeds,
                "tokens_a_step": dense.tokens,
                "microbatches": ROWS // MICROBATCH,
                "largest_gap": LARGEST_GAP,
            },
            "steps": {course.family: course.steps for course in (dense, mixture)},
        },
        "machine": machine(),
        "rows": rows,
        "movement_of_float16_masters": moves,
    }
    arguments.json.write_text(json.dumps(record) + "\n")

    table = Table("model", "states", "bytes", "last steps", "gap", "held out", "gap", "small")
    for row in rows:
        cells = []
        for kind in ("last", "held_out"):
            gap = row.get(f"{kind}_gap")
            cells += [f"{row[kind]:.4f}", "-" if gap is None else "{:+.4f} ({:+.4f} to {:+.4f})".format(*gap)]
        small = all(row.get(f"{kind}_is_small", True) for kind in ("last", "held_out"))
        table.add_row(row["family"], row["choice"], f"{row['bytes']:.2f}", *cells, "yes" if small else "no")
    console = Console(width=140)
    console.print(table)
    words = ", ".join(f"{share:.0%} at lr {rate:g}" for rate, share in moves.items())
    console.print(f"movement of float16 masters, of that of float32 masters: {words}")


if __name__ == "__main__":
    main()
