"""Measures ways to sum gradients over data-parallel ranks: bytes, signal-to-noise, and the loss of a training.

    python benchmarks/grad_reduce.py [--steps 500] [--seeds 5] [--jobs 1] [--dry-run] [--folder F] [--json FILE]

sums      gradients of a tiny model (next-byte prediction, as in training.py) at its start and after 100 steps, of 2 and
          of 8 batches at the same weights, summed in each of these ways; the noise is the distance from their float64
          sum:
              float32, bfloat16      a ring: a rank adds its values to what it gets, and rounds the sum
              ..., summed in float32 the ranks exchange their values, and a sum is rounded once
              FP8-LM                 per tensor one scale for all ranks, a power of two, times 1 / sqrt(ranks), and a
                                     ring in E4M3 (MS-AMP's code: msamp/nn/distributed.py)
              FP8-LM, mu             the same with a factor mu in place of 1 / sqrt(ranks): it is halved until at most
                                     0.001 % of the sums are E4M3's largest value (as texts about the paper, arXiv
                                     2310.18313, describe its automatic scaling; MS-AMP has none)
              ours                   `nemo_fp8rl.grad_reduce=fp8`
training  two ranks on gloo train that model with float32 gradients and with FP8; gaps over seeds

Prints tables and writes the figures, with machine and versions. Trainings are stored in --folder: an interrupted
benchmark continues.
"""

import argparse
import json
import math
import os
import socket
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from itertools import islice, product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from rich.console import Console
from rich.table import Table
from stored_runs import run_all
from torch import Tensor
from training import ROOT, WIDE, Course, batch, held_out_loss, loss_totals, recipe_keys, step_windows, trainer

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.commands.compare.statistics import paired_interval
from nemo_fp8rl.common.machine import machine
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.policy.on_cpu.megatron_on_cpu import megatron_on_cpu
from nemo_fp8rl.policy.optimizer.grad_reduce import BLOCK, decode, encode
from nemo_fp8rl.policy.rank.worker import MegatronWorker

RESULT = ROOT / "benchmarks/results/grad_reduce_cpu.json"
WARM_STEPS = 100
SIZES = (2, 8)
LAST = 50
BF16 = "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32=false"
CHOICES = {
    "float32": (),
    "FP8": ("nemo_fp8rl.grad_reduce=fp8",),
    "FP8, kept in bfloat16": ("nemo_fp8rl.grad_reduce=fp8", BF16),
}
"""Ways of the training section, by keys of a recipe."""
E4M3_MAX, MOST_SATURATED = 448.0, 1e-5


def e4m3(values: Tensor) -> Tensor:
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def bfloat16(values: Tensor) -> Tensor:
    return values.bfloat16().float()


def ring(parts: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the sum of parts [ranks, values], rounded by each rank."""
    total = rounding(parts[0])
    for part in parts[1:]:
        total = rounding(total + rounding(part))
    return total


def tensor_scale(parts: Tensor) -> float:
    """Return the largest power of two by which no value of any rank leaves E4M3."""
    largest = float(parts.abs().max())
    return 2.0 ** math.floor(math.log2(E4M3_MAX / largest)) if largest else 1.0


def fp8_lm(gradients: list[Tensor]) -> list[Tensor]:
    factors = [tensor_scale(parts) / math.sqrt(len(parts)) for parts in gradients]
    return [ring(parts * factor, e4m3) / factor for parts, factor in zip(gradients, factors, strict=True)]


def fp8_lm_mu(gradients: list[Tensor]) -> list[Tensor]:
    mu, scales = 1.0, [tensor_scale(parts) for parts in gradients]
    while True:
        sums = [ring(parts * (mu * scale), e4m3) for parts, scale in zip(gradients, scales, strict=True)]
        saturated = sum(int((total.abs() == E4M3_MAX).sum()) for total in sums)
        if saturated <= MOST_SATURATED * sum(total.numel() for total in sums):
            return [total / (mu * scale) for total, scale in zip(sums, scales, strict=True)]
        mu /= 2


def ours(gradients: list[Tensor]) -> list[Tensor]:
    sums = []
    for parts in gradients:
        total, size = torch.zeros(()), parts.size(1)
        for part in parts:
            blocks = torch.nn.functional.pad(part, (0, -size % BLOCK)).view(-1, BLOCK)
            total = total + decode(encode(blocks)).view(-1)[:size]
        sums.append(total)
    return sums


WAYS: dict[str, tuple[float, Callable[[list[Tensor]], list[Tensor]]]] = {
    "float32": (4, lambda gradients: [ring(parts, lambda values: values) for parts in gradients]),
    "bfloat16": (2, lambda gradients: [ring(parts, bfloat16) for parts in gradients]),
    "bfloat16, summed in float32": (2, lambda gradients: [bfloat16(bfloat16(parts).sum(0)) for parts in gradients]),
    "FP8-LM": (1, fp8_lm),
    "FP8-LM, mu": (1, fp8_lm_mu),
    "ours": (1 + 4 / 128, ours),
}
"""Name -> bytes of a value, and the function from each parameter's gradients [ranks, values] to their sum."""


def decibels(signal: Tensor, value: Tensor) -> float:
    noise = (signal - value).square().sum()
    return float(10 * torch.log10(signal.square().sum() / noise)) if noise else math.inf


def local_gradients(worker: MegatronWorker, course: Course, windows: Tensor) -> list[Tensor]:
    """Return the gradient of each parameter on one batch, flat float32."""

    def compute_loss(values: Any, _rows: Tensor, part: Any) -> Any:
        return NllLoss()(values.logprobs, part, loss_totals(course), values.unfiltered)

    with megatron_on_cpu():
        worker.ddp.zero_grad_buffer()
        worker.pipeline.run(batch(windows), compute_loss, training=True)
    return [parameter.main_grad.flatten().clone() for parameter in worker.model.parameters()]


def measure_sums(folder: Path, warm_steps: int) -> list[dict[str, Any]]:
    course, rows = Course("qwen3", warm_steps + max(SIZES), WIDE, warmup=warm_steps // 2), list[dict[str, Any]]()
    with trainer(folder, course, 0, "nemo_fp8rl.flow=bf16") as worker:
        *warm, _ = all_windows = list(step_windows(course, 0))
        batches = all_windows[warm_steps:]
        for steps in (0, warm_steps):
            for windows in islice(warm, steps):
                worker.train_step(batch(windows), NllLoss(), loss_totals(course))
            by_rank = [local_gradients(worker, course, windows) for windows in batches]
            for size in SIZES:
                gradients = [torch.stack(parts) for parts in zip(*by_rank[:size], strict=True)]
                exact = [parts.double().sum(0) for parts in gradients]
                for name, (width, way) in WAYS.items():
                    sums = [total.double() for total in way(gradients)]
                    each = [decibels(*pair) for pair in zip(exact, sums, strict=True) if pair[0].any()]
                    whole = decibels(torch.cat(exact), torch.cat(sums))
                    row = {"steps": steps, "ranks": size, "way": name, "bytes_of_a_value": width}
                    rows.append(row | {"decibels": whole, "worst_parameter": min(each)})
    return rows


LISTENERS: list[socket.socket] = []
"""The socket at which rank 0 waits for the other, in its process."""


def listen() -> tuple[str, int]:
    LISTENERS.append(socket.create_server(("127.0.0.1", 0)))
    host, port = LISTENERS[-1].getsockname()[:2]
    return host, port


def learn(rank: int, rendezvous: tuple[str, int], course: Course, keys: tuple[str, ...], seed: int) -> Any:
    """Train as one of two ranks; return this rank's part of the losses, the held-out loss, bytes and seconds a step."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("ignore")  # torch's about names that Megatron uses
    worker = MegatronWorker()
    if rank == 0:
        worker.listener = LISTENERS.pop()
    worker.setup(load(ROOT / "conf/tiny_cpu.yaml", keys), rank, 2, rendezvous)
    losses, seconds, metrics = list[float](), list[float](), dict[str, float]()
    for windows in step_windows(course, seed):
        start = time.perf_counter()
        metrics = worker.train_step(batch(windows.chunk(2)[rank]), NllLoss(), loss_totals(course))
        losses.append(metrics["loss"])
        seconds.append(time.perf_counter() - start)
    return losses, held_out_loss(worker, course), metrics["grad_bytes"], median(seconds)


def train_two(folder: Path, course: Course, choice: str, seed: int) -> dict[str, Any]:
    """Train in two new processes, because gloo's groups are for the life of a process."""
    pools = [ProcessPoolExecutor(1, mp_context=get_context("spawn")) for _ in range(2)]
    keys = *recipe_keys(folder, course, seed), *CHOICES[choice], "nemo_fp8rl.flow=bf16"
    keys = *keys, "cluster.backend=ray", "cluster.train_ranks=2", "policy.train_micro_batch_size=32"
    rendezvous = pools[0].submit(listen).result()
    futures = [pool.submit(learn, rank, rendezvous, course, keys, seed) for rank, pool in enumerate(pools)]
    (first, validation, sent, seconds), (second, *_) = (future.result() for future in futures)
    for pool in pools:
        pool.shutdown()
    losses = [round(a + b, 5) for a, b in zip(first, second, strict=True)]
    result = {"choice": choice, "seed": seed, "losses": losses, "validation": validation}
    return result | {"grad_bytes": sent, "seconds_a_step": round(seconds, 4)}


def show_sums(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "way", "bytes a value", *(f"{r['ranks']} ranks, step {r['steps']}" for r in rows if r["way"] == "ours")
    )
    for name, (width, _) in WAYS.items():
        cells = [f"{r['decibels']:.1f} ({r['worst_parameter']:.1f})" for r in rows if r["way"] == name]
        table.add_row(name, f"{width:.3f}", *cells)
    Console(width=120).print("Signal-to-noise of the sum, dB (of the worst parameter)", table)


def show_training(results: list[dict[str, Any]]) -> None:
    table = Table("", "bytes a step", "last steps", "gap to float32", "held-out loss", "gap to float32")
    for choice in dict.fromkeys(result["choice"] for result in results):
        cells = [f"{next(r['grad_bytes'] for r in results if r['choice'] == choice):,.0f}"]
        for value in (lambda r: fmean(r["losses"][-LAST:]), lambda r: r["validation"]):
            by_choice = {
                name: {r["seed"]: value(r) for r in results if r["choice"] == name} for name in ("float32", choice)
            }
            gap = paired_interval(by_choice[choice], by_choice["float32"])
            known = choice != "float32" and gap is not None and gap.half is not None
            interval = f"{gap.mean:+.4f} ({gap.low:+.4f} to {gap.high:+.4f})" if known and gap else "-"
            cells += [f"{fmean(by_choice[choice].values()):.4f}", interval]
        table.add_row(choice, *cells)
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="pairs of ranks at a time")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("runs/grad_reduce"))
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args()
    steps, seeds, warm_steps = arguments.steps, arguments.seeds, WARM_STEPS
    if arguments.dry_run:
        steps, seeds, warm_steps = 6, 2, 2

    sums = measure_sums(arguments.folder, warm_steps)
    show_sums(sums)
    course = Course("qwen3", steps, warmup=steps // 10, rows=8, length=64)
    cases = {
        (choice, seed): (arguments.folder, course, choice, seed) for seed, choice in product(range(seeds), CHOICES)
    }
    results = list(run_all(arguments.folder / "runs", train_two, cases, arguments.jobs).values())
    show_training(results)
    record = {
        "machine": machine(),
        "versions": {name: metadata.version(name) for name in ("torch", "megatron-core")},
        "sums": sums,
        "training": {"steps": steps, "tokens_a_step": course.tokens, "results": results},
    }
    arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
