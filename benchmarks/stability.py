"""How few mantissa bits does training bear, and does sharpness warn before a run diverges?

    python benchmarks/stability.py [--steps 80] [--seeds 3] [--jobs 1] [--dry-run] [--folder F] [--json FILE]

A tiny language model (`training.py`) learns with the operands of the linear layers' GEMMs, forward and backward, in
fewer bits: 8 of the exponent and 7 (bfloat16) to 1 of the mantissa, cut off as arXiv 2405.18710 does, or rounded to the
nearest. Beside them: our FP8, with 3 bits and block scales. Embedding, head, attention and norms stay in bfloat16. Each
arithmetic runs with several seeds and learning rates; a seed has the same weights and batches in all of them. The rate
rises for half of the steps, so that a run comes to its limit slowly, and falls in the other half.

Diverged: a loss is not finite, or the mean of WINDOW losses is RISE nats above the first loss or above the least such
mean before it. The sharpness is that of `policy/sharpness.py` on the same held-out rows, every PERIOD steps. Before a
divergence it is compared with the healthy runs, those of bfloat16 that do not diverge, at the same step: a warning is a
measurement of FACTORS times the largest of theirs. A warning in a run that does not diverge is a false one.

Runs are stored in --folder: an interrupted benchmark continues. A dry run is as short as can be, for the sake of the
tests: its figures say nothing. The picture is drawn where matplotlib is installed (`training.py`).
"""

import argparse
import json
import os
from functools import partial
from itertools import product
from math import isfinite
from pathlib import Path
from statistics import fmean, median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from stored_runs import run_all
from torch import Tensor
from training import ROOT, Course, batch, corpus, losses, make_model, open_figure, trainer

from nemo_fp8rl.common.machine import machine
from nemo_fp8rl.policy.interface import DivergenceError
from nemo_fp8rl.policy.layers.linears import CustomMatmul
from nemo_fp8rl.policy.rank.worker import MegatronWorker

BITS = 7
"""Of bfloat16's mantissa."""
ROUNDINGS = {"cut": False, "nearest": True}
ARITHMETICS = ("bf16", "fp8_e2e", *(f"{name} {bits}" for bits in range(BITS - 1, 0, -1) for name in ROUNDINGS))
FAMILY = "llama"
"""Without norms of queries and keys, which make the tiny Qwen3 bear any of these arithmetics."""
RATES = (0.1, 0.4, 0.8)
"""The tiny model bears the first in every arithmetic, and bfloat16 hardly bears the last: at 1.2 it diverges."""
ROWS, LENGTH = 8, 64
WINDOW, RISE = 10, 0.5
PERIOD = 2
SHARPNESS_ROWS = 8
KINDS = "sharpness", "sharpness_last_token"
FACTORS = (1.0, 1.25, 1.5, 2.0)


def reduce_mantissa(x: Tensor, bits: int, nearest: bool) -> Tensor:
    """Return bfloat16 values with so many bits of their mantissa: cut off, or rounded to nearest, ties to even."""
    if bits == BITS:
        return x
    shift = BITS - bits
    pattern = x.view(torch.int16)
    if nearest:
        pattern = pattern + ((1 << (shift - 1)) - 1) + ((pattern >> shift) & 1)
    reduced = (pattern & -(1 << shift)).view(torch.bfloat16)
    return torch.where(x.isfinite(), reduced, x)


class ReducedLinear(torch.autograd.Function):
    """The three GEMMs of a linear layer, with operands of so many mantissa bits, summed in float32.

    apply(x [..., K], weight [N, K], bits, nearest) -> [..., N], all bfloat16
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bits: int, nearest: bool) -> Tensor:
        ctx.reduce = partial(reduce_mantissa, bits=bits, nearest=nearest)
        x, weight = ctx.reduce(x), ctx.reduce(weight)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = ctx.reduce(grads[0])
        return dy @ weight, dy.flatten(0, -2).t() @ x.flatten(0, -2), None, None


def reduce_operands(worker: MegatronWorker, bits: int, nearest: bool) -> int:
    """Give the linear layers GEMMs with so many mantissa bits, and return the number of layers."""

    def matmul(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        y = ReducedLinear.apply(x, weight, bits, nearest)
        return (y if bias is None else y + bias).to(out_dtype)

    layers = [module for module in worker.model.modules() if isinstance(module, CustomMatmul)]
    for layer in layers:
        layer.matmul = matmul  # type: ignore[method-assign]
    return len(layers)


def train(folder: Path, arithmetic: str, course: Course, seed: int) -> dict[str, Any]:
    """Return losses by step and sharpness every PERIOD steps; a run ends where it is not finite."""
    rounding, _, bits = arithmetic.partition(" ")
    flow = "bf16" if bits else rounding
    found, mean, last = list[float](), list[float](), list[float]()
    held_out = batch(corpus(course.length)[1][:SHARPNESS_ROWS])
    is_finite = True
    with trainer(folder, course, seed, f"nemo_fp8rl.flow={flow}") as worker:
        if bits:
            reduce_operands(worker, int(bits), ROUNDINGS[rounding])
        try:
            for step, loss in enumerate(losses(worker, course, seed)):
                found.append(round(loss, 4))
                if step % PERIOD == 0:
                    sharpness = worker.logprobs_and_sharpness(held_out)[1]
                    mean.append(float(f"{sharpness[:, 1:].mean():.4g}"))
                    last.append(float(f"{sharpness[:, -1].mean():.4g}"))
        except DivergenceError:
            is_finite = False
    return {"losses": found, "sharpness": mean, "sharpness_last_token": last, "is_finite": is_finite}


def divergence(run: dict[str, Any]) -> int | None:
    """Return the step at which a run diverges, None if it does not."""
    found, least = run["losses"], run["losses"][0]
    for step in range(WINDOW, len(found) + 1):
        mean = fmean(found[step - WINDOW : step])
        if mean > least + RISE:
            return step - 1
        least = min(least, mean)
    return None if run["is_finite"] else len(found)


def rises(run: dict[str, Any], end: int | None, limit: list[float], kind: str) -> list[float]:
    """Return the sharpness over the limit at each measurement before `end`; a value that is not finite is 0."""
    values = run[kind][: len(limit) if end is None else -(-end // PERIOD)]
    ratios = (value / most for value, most in zip(values, limit, strict=False))
    return [round(ratio, 3) if isfinite(ratio) else 0.0 for ratio in ratios]


def summarize(runs: dict[tuple[str, float, int], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each arithmetic and learning rate."""
    ends = {key: divergence(run) for key, run in runs.items()}
    healthy = [run for key, run in runs.items() if key[0] == "bf16" and ends[key] is None]
    limits = {kind: [max(values) for values in zip(*(run[kind] for run in healthy), strict=True)] for kind in KINDS}
    rows = []
    for arithmetic, rate in dict.fromkeys(key[:2] for key in runs):
        keys = [key for key in runs if key[:2] == (arithmetic, rate)]
        last = [fmean(runs[key]["losses"][-20:]) for key in keys if ends[key] is None]
        row = {
            "arithmetic": arithmetic,
            "lr": rate,
            "diverged_at": [ends[key] for key in keys],
            "final_loss": fmean(last) if last else None,
            "losses": [runs[key]["losses"][::PERIOD] for key in keys],
        }
        for kind in KINDS:
            row[kind] = [runs[key][kind] for key in keys]
            row[f"{kind}_rises"] = [rises(runs[key], ends[key], limits[kind], kind) for key in keys]
        rows.append(row)
    return rows


def judge(rows: list[dict[str, Any]], kind: str, factor: float) -> dict[str, Any]:
    """Return how well a sharpness warns, over all runs but those of bfloat16, which set the limit.

    factor:  a warning is a sharpness of so many times the limit
    """
    runs = [
        (end, [i * PERIOD for i, ratio in enumerate(ratios) if ratio > factor], ratios)
        for row in rows
        if row["arithmetic"] != "bf16"
        for end, ratios in zip(row["diverged_at"], row[f"{kind}_rises"], strict=True)
    ]
    warned = [end - steps[0] for end, steps, _ in runs if end is not None and steps]
    before = [ratios[-1] for end, _, ratios in runs if end is not None and ratios]
    stable = [steps for end, steps, _ in runs if end is None]
    return {
        "kind": kind,
        "factor": factor,
        "diverged": len(runs) - len(stable),
        "warned": len(warned),
        "median_steps_before": median(warned) if warned else None,
        "median_rise_at_divergence": median(before) if before else None,
        "stable": len(stable),
        "warned_falsely": sum(bool(steps) for steps in stable),
    }


def draw(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draw the share of diverged runs, final losses, and the sharpness of bfloat16 beside a run that diverges."""
    left, middle, right = axes
    found = {(row["arithmetic"], row["lr"]): row for row in rows}
    places = range(BITS, 0, -1)
    for name, style in zip(ROUNDINGS, ("-", "--"), strict=True):
        for i, rate in enumerate(RATES):
            names = ["bf16" if bits == BITS else f"{name} {bits}" for bits in places]
            if any((key, rate) not in found for key in names):
                continue
            shares = [share_diverged(found[key, rate]) for key in names]
            final = [found[key, rate]["final_loss"] for key in names]
            left.plot(places, shares, f"C{i}{style}", label=f"{name}, lr {rate}")
            middle.plot(places, [float("nan") if loss is None else loss for loss in final], f"C{i}{style}")
    for i, rate in enumerate(RATES):
        if row := found.get(("fp8_e2e", rate)):
            left.plot([3], [share_diverged(row)], f"C{i}o", label=f"fp8_e2e, lr {rate}")
            middle.plot([3], [row["final_loss"] or float("nan")], f"C{i}o")
    for row in rows:
        for values, end in zip(row["sharpness"], row["diverged_at"], strict=True):
            healthy = row["arithmetic"] == "bf16" and end is None
            if healthy or end is not None:
                steps = range(0, PERIOD * len(values), PERIOD)
                right.plot(steps, values, color="0.6" if healthy else "C3", linewidth=0.7)
    left.set(xlabel="mantissa bits", title="share of runs that diverge")
    left.invert_xaxis()
    left.legend(fontsize="x-small")
    middle.set(xlabel="mantissa bits", title="final loss of the others, nats a byte")
    middle.invert_xaxis()
    right.set(xlabel="step", title="sharpness: healthy (grey), diverging (red)")


def share_diverged(row: dict[str, Any]) -> float:
    return fmean(end is not None for end in row["diverged_at"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("runs/stability"))
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/stability_cpu.json")
    arguments = parser.parse_args()
    steps, seeds, arithmetics, rates = arguments.steps, range(arguments.seeds), ARITHMETICS, RATES
    if arguments.dry_run:
        steps, seeds, arithmetics, rates = 12, range(1), ("bf16", "fp8_e2e", "cut 1"), RATES[:1]

    cases = {}
    for seed, rate, arithmetic in product(seeds, rates, arithmetics):
        course = Course(FAMILY, steps, lr=rate, warmup=steps // 2, length=LENGTH, rows=ROWS)
        make_model(arguments.folder, course, seed)
        cases[arithmetic, rate, seed] = (arguments.folder, arithmetic, course, seed)
    results = run_all(arguments.folder / "runs", train, cases, arguments.jobs)
    ordered = sorted(cases, key=lambda key: (ARITHMETICS.index(key[0]), key[1], key[2]))
    rows = summarize({key: results[key] for key in ordered})
    record = {
        "settings": {
            **{"family": FAMILY, "steps": steps, "seeds": len(seeds), "tokens_a_step": ROWS * (LENGTH - 1)},
            **{"window": WINDOW, "rise": RISE, "period": PERIOD},
        },
        "machine": machine(),
        "warnings": [judge(rows, kind, factor) for kind in KINDS for factor in FACTORS],
        "rows": rows,
    }
    arguments.json.write_text(json.dumps(record) + "\n")

    table = Table("arithmetic", *(f"diverged, lr {rate}" for rate in rates), *(f"loss, lr {rate}" for rate in rates))
    for arithmetic in arithmetics:
        of_rates = [row for row in rows if row["arithmetic"] == arithmetic]
        shares = (f"{share_diverged(row):.0%}" for row in of_rates)
        final = ("-" if row["final_loss"] is None else f"{row['final_loss']:.3f}" for row in of_rates)
        table.add_row(arithmetic, *shares, *final)
    console = Console(width=120)
    console.print(table)
    table = Table("warning at", "diverged", "warned", "steps before", "rise", "stable", "warned falsely")
    for found in record["warnings"]:
        numbers = ("-" if value is None else f"{value:g}" for value in list(found.values())[2:])
        table.add_row(f"{found['kind']} x {found['factor']:g}", *numbers)
    console.print(table)
    if arguments.dry_run:
        return
    with open_figure(ROOT / "docs/stability.svg", (12, 3.4), 3) as axes:
        if axes is not None:
            draw(axes, rows)


if __name__ == "__main__":
    main()
