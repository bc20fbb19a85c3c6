"""Measures ways to sum gradients over data-parallel ranks: bytes, signal-to-noise, and the loss of a training.

    python benchmarks/grad_reduce.py [--sections sums training] [--choices FP8] [--steps 500] [--seeds 5]

sums      gradients of a tiny model (next-byte prediction, as in training.py) at its start and after 100 steps, of 2 and
          of 8 batches at the same weights, summed in each of these ways; the noise is the distance from their float64
          sum:
              float32, bfloat16      a ring: a rank adds its values to what it gets, and rounds the sum
              ..., summed in float32 the ranks exchange their values, and a sum is rounded once
              FP8-LM                 per tensor one scale for all ranks, a power of two, times 1 / sqrt(ranks), and a
                                     ring in E4M3 (MS-AMP's code: msamp/nn/distributed.py)
              FP8-LM, mu             the same with a factor mu in place of 1 / sqrt(ranks): it is halved until at most
                                     0.001 % of the sums are E4M3's largest value (as the paper, arXiv 2310.18313,
                                     describes its automatic scaling; MS-AMP has none)
              ours                   `nemo_fp8rl.grad_reduce=fp8`
training  two ranks on gloo train that model, once for each way that a recipe can choose; gaps to float32 over seeds

Prints tables and writes the figures, with machine and versions, to benchmarks/results/grad_reduce_cpu.json.
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
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from training import LENGTH, ROOT, ROWS, STUDENT_T, batch, corpus

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.batch import LossTotals
from nemo_fp8rl.commands.tiny_model import write_model
from nemo_fp8rl.common.machine import machine
from nemo_fp8rl.config.recipe import load

RESULT = ROOT / "benchmarks/results/grad_reduce_cpu.json"
WARM_STEPS = 100
SIZES = (2, 8)
DDP = "policy.megatron_cfg.distributed_data_parallel_config"
BF16 = f"{DDP}.grad_reduce_in_fp32=false"
CHOICES = {
    "float32": (),
    "bfloat16": (BF16,),
    "bfloat16, summed in float32": (BF16, f"{DDP}.reduce_scatter_with_fp32_accumulation=true"),
    "FP8": ("nemo_fp8rl.grad_reduce=fp8",),
    "FP8, kept in bfloat16": ("nemo_fp8rl.grad_reduce=fp8", BF16),
}
"""Ways that a recipe can choose."""
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
    from nemo_fp8rl.policy.optimizer.grad_reduce import BLOCK, decode, encode

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


def overrides(model: Path, steps: int, count: int) -> tuple[str, ...]:
    return (
        f"policy.model_name={model}",
        "nemo_fp8rl.flow=bf16",
        f"policy.max_total_sequence_length={LENGTH}",
        "policy.generation.temperature=1.0",
        "policy.megatron_cfg.optimizer.lr=0.001",
        "policy.megatron_cfg.scheduler.lr_warmup_iters=50",
        "policy.megatron_cfg.scheduler.lr_decay_style=cosine",
        f"policy.megatron_cfg.scheduler.lr_decay_iters={max(steps, 51)}",
        f"policy.train_micro_batch_size={ROWS // count}",
        f"policy.train_global_batch_size={ROWS}",
        *(("cluster.backend=ray", f"cluster.train_ranks={count}") if count > 1 else ()),
    )


def make_model(folder: Path, seed: int) -> Path:
    if not (folder / f"model_{seed}").exists():
        write_model(folder / f"model_{seed}", seed, vocab_size=256, hidden_size=256)
    return folder / f"model_{seed}"


def new_worker(keys: tuple[str, ...], rank: int, count: int, rendezvous: tuple[str, int] | None) -> Any:
    with warnings.catch_warnings(action="ignore"):  # of Megatron about itself
        from nemo_fp8rl.policy.rank.worker import MegatronWorker

        worker = MegatronWorker()
        if rendezvous and rank == 0:
            worker.listener = LISTENERS.pop()
        cfg = load(ROOT / "conf/tiny_cpu.yaml", keys)
        worker.setup(cfg, rank, count, rendezvous)
    return worker


def totals() -> LossTotals:
    return LossTotals(torch.tensor(float(ROWS)), torch.tensor(float(ROWS * (LENGTH - 1))))


def windows_of(step: int, order: Tensor) -> Tensor:
    return order[torch.arange(step * ROWS, (step + 1) * ROWS) % len(order)]


def local_gradients(worker: Any, windows: Tensor) -> list[Tensor]:
    """Return the gradient of each parameter on one batch, flat float32."""
    from nemo_fp8rl.policy.on_cpu.megatron_on_cpu import megatron_on_cpu

    def compute_loss(logprobs: Tensor, unfiltered: Any, _rows: Tensor, part: Any) -> Any:
        return NllLoss()(logprobs, part, totals(), unfiltered)

    with megatron_on_cpu():
        worker.ddp.zero_grad_buffer()
        worker.pipeline.run(batch(windows), compute_loss, training=True)
    return [parameter.main_grad.flatten().clone() for parameter in worker.model.parameters()]


def measure_sums(folder: Path) -> list[dict[str, Any]]:
    worker, (train, _), rows = new_worker(overrides(make_model(folder, 0), 500, 1), 0, 1, None), corpus(), []
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    for steps in (0, WARM_STEPS):
        for step in range(steps):
            worker.train_step(batch(train[windows_of(step, order)]), NllLoss(), totals())
        batches = [train[windows_of(WARM_STEPS + number, order)] for number in range(max(SIZES))]
        by_rank = [local_gradients(worker, windows) for windows in batches]
        for size in SIZES:
            gradients = [torch.stack(parts) for parts in zip(*by_rank[:size], strict=True)]
            exact = [parts.double().sum(0) for parts in gradients]
            for name, (width, way) in WAYS.items():
                sums = [total.double() for total in way(gradients)]
                each = [decibels(*pair) for pair in zip(exact, sums, strict=True) if pair[0].any()]
                rows.append(
                    {
                        "steps": steps,
                        "ranks": size,
                        "way": name,
                        "bytes_of_a_value": width,
                        "decibels": decibels(torch.cat(exact), torch.cat(sums)),
                        "worst_parameter": min(each),
                    }
                )
    worker.shutdown()
    return rows


LISTENERS: list[socket.socket] = []
"""The socket at which rank 0 waits for the other, in its process."""


def listen() -> tuple[str, int]:
    LISTENERS.append(socket.create_server(("127.0.0.1", 0)))
    host, port = LISTENERS[-1].getsockname()[:2]
    return host, port


def learn(rank: int, rendezvous: tuple[str, int], model: Path, keys: tuple[str, ...], seed: int, steps: int) -> Any:
    """Train as one of two ranks; return this rank's part of the losses, the held-out loss, bytes and seconds a step."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("ignore")  # torch's about names that Megatron uses
    worker = new_worker((*overrides(model, steps, 2), *keys), rank, 2, rendezvous)
    train, held_out = corpus()
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    losses, seconds, metrics = [], [], {}
    for step in range(steps):
        start, windows = time.perf_counter(), windows_of(step, order).chunk(2)[rank]
        metrics = worker.train_step(batch(train[windows]), NllLoss(), totals())
        losses.append(metrics["loss"])
        seconds.append(time.perf_counter() - start)
    validation = -float(worker.logprobs(batch(held_out[:256]))[:, 1:].mean())
    return losses, validation, metrics["grad_bytes"], median(seconds)


def train_two(folder: Path, choice: str, seed: int, steps: int) -> dict[str, Any]:
    """Train in two new processes, because gloo's groups are for the life of a process."""
    pools = [ProcessPoolExecutor(1, mp_context=get_context("spawn")) for _ in range(2)]
    rendezvous, model = pools[0].submit(listen).result(), make_model(folder, seed)
    futures = [
        pool.submit(learn, rank, rendezvous, model, CHOICES[choice], seed, steps) for rank, pool in enumerate(pools)
    ]
    (first, validation, sent, seconds), (second, *_) = (future.result() for future in futures)
    for pool in pools:
        pool.shutdown()
    losses = [round(a + b, 5) for a, b in zip(first, second, strict=True)]
    print(
        f"{choice}, seed {seed}: held-out loss {validation:.4f}, {sent:,.0f} bytes, {seconds:.3f} s a step", flush=True
    )
    result = {"choice": choice, "seed": seed, "losses": losses, "validation": validation}
    return result | {"grad_bytes": sent, "seconds_a_step": round(seconds, 4)}


def show_sums(rows: list[dict[str, Any]]) -> None:
    table = Table("way", "bytes a value", *(f"{n} ranks, step {s}" for s in (0, WARM_STEPS) for n in SIZES))
    for name, (width, _) in WAYS.items():
        cells = [f"{r['decibels']:.1f} ({r['worst_parameter']:.1f})" for r in rows if r["way"] == name]
        table.add_row(name, f"{width:.3f}", *cells)
    Console(width=120).print("Signal-to-noise of the sum, dB (of the worst parameter)", table)


def show_training(results: list[dict[str, Any]], choices: list[str], seeds: int) -> None:
    held_out = {(r["choice"], r["seed"]): r["validation"] for r in results}
    table = Table("", "bytes a step", "held-out loss", "gap to float32", "95 % interval")
    for choice in choices:
        gaps = [held_out[choice, seed] - held_out["float32", seed] for seed in range(seeds)]
        half = STUDENT_T[seeds] * stdev(gaps) / seeds**0.5 if seeds in STUDENT_T else math.nan
        sent = next(r["grad_bytes"] for r in results if r["choice"] == choice)
        mean = fmean(held_out[choice, seed] for seed in range(seeds))
        interval = f"{fmean(gaps) - half:+.4f} to {fmean(gaps) + half:+.4f}"
        table.add_row(choice, f"{sent:,.0f}", f"{mean:.4f}", f"{fmean(gaps):+.4f}", interval)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=("sums", "training"), default=["sums", "training"])
    parser.add_argument(
        "--choices", nargs="+", choices=CHOICES, default=list(CHOICES), help="of training, with float32"
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("runs/grad_reduce"))
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args()

    versions = {name: metadata.version(name) for name in ("torch", "megatron-core")}
    record = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    record |= {"machine": machine(), "versions": versions}
    if "sums" in arguments.sections:
        record["sums"] = measure_sums(arguments.folder)
        show_sums(record["sums"])
    if "training" in arguments.sections:
        choices = [choice for choice in CHOICES if choice in ("float32", *arguments.choices)]
        runs = [(choice, seed) for seed in range(arguments.seeds) for choice in choices]
        results = [train_two(arguments.folder, *run, arguments.steps) for run in runs]
        record["training"] = {"steps": arguments.steps, "tokens_a_step": ROWS * (LENGTH - 1), "results": results}
        show_training(results, choices, arguments.seeds)
    arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
