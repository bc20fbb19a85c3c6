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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from nemo_fp8rl.policy.rank.worker import MegatronWorker

ROOT = Path(__file__).resolve().parent.parent
FLOWS = ("bf16", "fp8_e2e")
WIDE = (("hidden_size", 256),)
HELD_OUT = 20
"""One window of this many is for validation."""
VALIDATION_ROWS = 256
STUDENT_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
"""The two-sided 95 % quantile by the number of seeds."""


@dataclass(frozen=True)
class Course:
    """What a tiny model learns, and how.

    sizes:   keys of the model's config.json with their values
    warmup:  steps of the learning rate's warm-up; then it falls to 0 as a cosine
    length:  bytes of a row
    rows:    rows of a step
    """

    family: str
    steps: int
    sizes: tuple[tuple[str, int], ...] = ()
    lr: float = 0.001
    warmup: int = 50
    length: int = 128
    rows: int = 16

    @property
    def tokens(self) -> int:
        """Predicted bytes of a step."""
        return self.rows * (self.length - 1)


def corpus(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the training and the validation windows, uint8 [windows, length]."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // length * length].view(-1, length)
    held_out = torch.arange(len(windows)) % HELD_OUT == 0
    return windows[~held_out], windows[held_out]


def batch(windows: torch.Tensor) -> RolloutBatch:
    ids = windows.long()
    return RolloutBatch(
        input_ids=ids,
        input_lengths=torch.full((len(ids),), ids.size(1)),
        token_mask=torch.ones(ids.shape),
        sample_mask=torch.ones(len(ids)),
        generation_logprobs=torch.zeros(ids.shape),
    )


def make_model(folder: Path, course: Course, seed: int) -> Path:
    """Return the folder of the first weights of a seed, which is written where it is missing."""
    model = folder / "_".join([course.family, *(str(size) for _, size in course.sizes), str(seed)])
    if not model.exists():
        with warnings.catch_warnings(action="ignore"):
            write_model(model, seed, course.family, vocab_size=256, **dict(course.sizes))
    return model


def recipe_keys(folder: Path, course: Course, seed: int) -> tuple[str, ...]:
    """Return keys of a recipe, with values, for a trainer that takes the course from the first weights of a seed."""
    return (
        f"policy.model_name={make_model(folder, course, seed)}",
        f"policy.max_total_sequence_length={course.length}",
        "policy.generation.temperature=1.0",
        f"policy.megatron_cfg.optimizer.lr={course.lr}",
        f"policy.megatron_cfg.scheduler.lr_warmup_iters={course.warmup}",
        "policy.megatron_cfg.scheduler.lr_decay_style=cosine",
        f"policy.megatron_cfg.scheduler.lr_decay_iters={course.steps}",
        "policy.train_micro_batch_size=64",
        "policy.train_global_batch_size=64",
    )


@contextmanager
def trainer(folder: Path, course: Course, seed: int, *keys: str) -> Iterator[MegatronWorker]:
    """Yield a trainer with the first weights of a seed.

    keys:  further keys of a recipe, with values
    """
    worker = MegatronWorker()
    with warnings.catch_warnings(action="ignore"):  # of Megatron about itself
        worker.setup(load(ROOT / "conf/tiny_cpu.yaml", (*recipe_keys(folder, course, seed), *keys)), 0, 1, None)
    try:
        yield worker
    finally:
        worker.shutdown()


def step_windows(course: Course, seed: int) -> Iterator[torch.Tensor]:
    """Yield the windows of each step, uint8 [rows, length]."""
    train, _ = corpus(course.length)
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    for step in range(course.steps):
        yield train[order[torch.arange(step * course.rows, (step + 1) * course.rows) % len(order)]]


def loss_totals(course: Course) -> LossTotals:
    return LossTotals(torch.tensor(float(course.rows)), torch.tensor(float(course.tokens)))


def losses(worker: MegatronWorker, course: Course, seed: int) -> Iterator[float]:
    """Train, and yield the loss of every step in nats per byte."""
    for windows in step_windows(course, seed):
        yield worker.train_step(batch(windows), NllLoss(), loss_totals(course))["loss"]


def held_out_loss(worker: MegatronWorker, course: Course) -> float:
    _, held_out = corpus(course.length)
    return -float(worker.logprobs(batch(held_out[:VALIDATION_ROWS]))[:, 1:].mean())


def learn(folder: Path, course: Course, flow: str, seed: int) -> dict[str, Any]:
    """Return the loss of every step and the final validation loss."""
    with trainer(folder, course, seed, f"nemo_fp8rl.flow={flow}") as worker:
        title = f"{course.family} {flow}, seed {seed}"
        found = [round(loss, 5) for loss in track(losses(worker, course, seed), title, course.steps)]
        return {"flow": flow, "seed": seed, "losses": found, "validation": held_out_loss(worker, course)}


@contextmanager
def open_figure(path: Path, size: tuple[float, float], columns: int) -> Iterator[Any]:
    """Yield the axes of a picture, which is written to the path behind the block; None without matplotlib.

    size:  in inches
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{path} is not drawn: pip install matplotlib==3.11.2")
        yield None
        return
    matplotlib.rcParams["svg.hashsalt"] = "nemo_fp8rl"  # the same file from the same figures
    figure = Figure(figsize=size, layout="constrained")
    yield figure.subplots(1, columns)
    figure.savefig(path, metadata={"Date": None})


def draw(axes: Any, results: list[dict[str, Any]], steps: int) -> None:
    """Draw the mean over the seeds of a running mean of 20 steps."""
    left, right = axes
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=5, choices=STUDENT_T)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3")
    parser.add_argument("--folder", type=Path, default=Path("runs/training"))
    arguments = parser.parse_args()
    family, steps, seeds = arguments.family, arguments.steps, arguments.seeds

    course = Course(family, steps, () if FAMILIES[family].experts else WIDE)
    results = [learn(arguments.folder, course, flow, seed) for seed in range(seeds) for flow in FLOWS]
    record = {
        "family": family,
        "steps": steps,
        "tokens_a_step": course.tokens,
        "corpus_bytes": sum(part.numel() for part in corpus(course.length)),
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
    with open_figure(ROOT / f"docs/training_{family}.svg", (9, 3.2), 2) as axes:
        if axes is not None:
            draw(axes, results, steps)


if __name__ == "__main__":
    main()
