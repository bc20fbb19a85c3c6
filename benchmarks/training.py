"""Compares training in FP8 and in bfloat16: next-byte prediction on Python's source code, with several seeds.

    python benchmarks/training.py [--steps 500] [--seeds 5] [--family qwen3] [--folder runs/training]

The picture needs matplotlib (3.11.2), which is not in the lock; without it only the picture is missing.

The corpus is the standard library's source, which is more than such a small model can memorize. Both flows of a seed
start from the same weights and read the same batches. Prints the table of docs/results.md, and writes losses by step,
with machine and versions, to benchmarks/results/training_FAMILY.json and the curves to docs/training_FAMILY.svg.
"""

import argparse
import json
import os
import sysconfig
import warnings
from importlib import metadata
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.batch import LossTotals, RolloutBatch
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.common.machine import machine
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.hf.model_config import FAMILIES

ROOT = Path(__file__).resolve().parent.parent
FLOWS = ("bf16", "fp8_e2e")
LENGTH, ROWS = 128, 16
HELD_OUT = 20
"""One window of this many is for validation."""
STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""The two-sided 95 % quantile by the number of seeds."""


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the training and the validation windows, uint8 [windows, LENGTH]."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    held_out = torch.arange(len(windows)) % HELD_OUT == 0
    return windows[~held_out], windows[held_out]


def batch(windows: torch.Tensor) -> RolloutBatch:
    ids = windows.long()
    return RolloutBatch(
        input_ids=ids,
        input_lengths=torch.full((len(ids),), LENGTH),
        token_mask=torch.ones(ids.shape),
        sample_mask=torch.ones(len(ids)),
        generation_logprobs=torch.zeros(ids.shape),
    )


def learn(folder: Path, family: str, flow: str, seed: int, steps: int) -> dict[str, Any]:
    """Train, and return the loss of every step in nats per byte and the final validation loss."""
    with warnings.catch_warnings(action="ignore"):  # of Megatron about itself
        from nemo_fp8rl.policy.rank.worker import MegatronWorker

        model = folder / f"{family}_{seed}"
        if not model.exists():
            write_model(
                model, seed, family, vocab_size=256, **({} if FAMILIES[family].experts else {"hidden_size": 256})
            )
        overrides = (
            f"policy.model_name={model}",
            f"nemo_fp8rl.flow={flow}",
            f"policy.max_total_sequence_length={LENGTH}",
            "policy.generation.temperature=1.0",
            "policy.megatron_cfg.optimizer.lr=0.001",
            "policy.megatron_cfg.scheduler.lr_warmup_iters=50",
            "policy.megatron_cfg.scheduler.lr_decay_style=cosine",
            f"policy.megatron_cfg.scheduler.lr_decay_iters={steps}",
            "policy.train_micro_batch_size=64",
            "policy.train_global_batch_size=64",
        )
        worker = MegatronWorker()
        worker.setup(load(ROOT / "conf/tiny_cpu.yaml", overrides), 0, 1, None)
    train, held_out = corpus()
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    tokens = float(ROWS * (LENGTH - 1))
    totals = LossTotals(torch.tensor(float(ROWS)), torch.tensor(tokens))
    losses = []
    for step in track(range(steps), f"{family} {flow}, seed {seed}"):
        part = train[order[torch.arange(step * ROWS, (step + 1) * ROWS) % len(order)]]
        losses.append(worker.train_step(batch(part), NllLoss(), totals)["loss"])
    validation = -float(worker.logprobs(batch(held_out[:256]))[:, 1:].mean())
    worker.shutdown()
    return {"flow": flow, "seed": seed, "losses": [round(loss, 5) for loss in losses], "validation": validation}


def draw(path: Path, results: list[dict[str, Any]], steps: int) -> None:
    """Draw the mean over the seeds of a running mean of 20 steps, if matplotlib is installed."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{path} is not drawn: pip install matplotlib==3.11.2")
        return
    matplotlib.rcParams["svg.hashsalt"] = "nemo_fp8rl"  # the same file from the same figures
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    curves = {}
    for flow, style in zip(FLOWS, ("-", "--"), strict=True):
        losses = torch.tensor([r["losses"] for r in results if r["flow"] == flow])
        smooth = losses.unfold(1, 20, 1).mean(-1)
        curves[flow] = smooth
        left.plot(range(20, steps + 1), smooth.mean(0), style, label=flow)
    left.set(xlabel="step", ylabel="loss, nats a byte", title="training loss, mean of the seeds")
    left.legend()
    gap = curves["fp8_e2e"] - curves["bf16"]
    for row in gap:
        right.plot(range(20, steps + 1), row, color="0.75", linewidth=0.7)
    right.plot(range(20, steps + 1), gap.mean(0), color="C1")
    right.axhline(0, color="black", linewidth=0.6)
    right.set(xlabel="step", title="fp8_e2e less bf16: each seed, and their mean")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=5, choices=STUDENT_T)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3")
    parser.add_argument("--folder", type=Path, default=Path("runs/training"))
    arguments = parser.parse_args()
    family, steps, seeds = arguments.family, arguments.steps, arguments.seeds

    results = [learn(arguments.folder, family, flow, seed, steps) for seed in range(seeds) for flow in FLOWS]
    record = {
        "family": family,
        "steps": steps,
        "tokens_a_step": ROWS * (LENGTH - 1),
        "corpus_bytes": sum(part.numel() for part in corpus()),
        "machine": machine(),
        "python": sysconfig.get_python_version(),
        "versions": {name: metadata.version(name) for name in ("torch", "megatron-core")},
        "results": results,
    }
    (ROOT / f"benchmarks/results/training_{family}.json").write_text(json.dumps(record) + "\n")
    last = {(r["flow"], r["seed"]): fmean(r["losses"][-50:]) for r in results}
    held_out = {(r["flow"], r["seed"]): r["validation"] for r in results}
    table = Table("", *FLOWS, "gap", "95 % interval of the gap")
    for name, values in (("training loss, last 50 steps", last), ("held-out loss", held_out)):
        gaps = [values["fp8_e2e", seed] - values["bf16", seed] for seed in range(seeds)]
        half = STUDENT_T[seeds] * stdev(gaps) / seeds**0.5
        means = [fmean(values[flow, seed] for seed in range(seeds)) for flow in FLOWS]
        table.add_row(
            name,
            *(f"{mean:.4f}" for mean in means),
            f"{fmean(gaps):+.4f}",
            f"{fmean(gaps) - half:+.4f} to {fmean(gaps) + half:+.4f}",
        )
    Console(width=110).print(table)
    draw(ROOT / f"docs/training_{family}.svg", results, steps)


if __name__ == "__main__":
    main()
