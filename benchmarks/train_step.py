"""Measures a training step in bfloat16, in FP8, and with parameters only in FP8, each in its own process.

    python benchmarks/train_step.py [--layers 8] [--sequences 8] [--length 2048] [--rounds 5] [--json FILE]

On a GPU the model has layers of Qwen3-8B's shape with random weights, in Megatron Core with Transformer Engine's linear
layers, and takes one microbatch per step. Log-probs are only a forward pass; a step has forward, backward and
optimizer. Memory is the peak during a step, including the memory before it. On a CPU, where FP8 is emulated, a small
model shows only that the script runs.
"""

import argparse
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from measure import ON_GPU, QWEN3_8B, seconds, wait_for_gpu
from rich.console import Console
from rich.table import Table

from nemo_fp8rl.algorithms.loss import NllLoss
from nemo_fp8rl.batch import LossTotals, RolloutBatch
from nemo_fp8rl.commands.tiny_model import make_tiny, write_model
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.policy.rank.worker import MegatronWorker

RECIPE = Path(__file__).parent.parent / "conf" / "tiny_cpu.yaml"
FLOWS = {"bf16": ("bf16", False), "FP8": ("fp8_e2e", False), "FP8, fp8_param": ("fp8_e2e", True)}
SIZES: dict[str, Any] = {"hidden_size": 256, "vocab_size": 512, "max_position_embeddings": 4096}
if ON_GPU:
    SIZES |= QWEN3_8B | {"vocab_size": 32768}
else:
    del FLOWS["FP8, fp8_param"]


def timed(call: Callable[[], Any]) -> float:
    def waited() -> None:
        call()
        wait_for_gpu()

    wait_for_gpu()
    return seconds(waited)


def measure(
    folder: Path, flow: str, fp8_param: bool, batch: RolloutBatch, rounds: int, align: str = "none"
) -> dict[str, Any]:
    tokens = batch.input_ids.numel()
    totals = LossTotals(torch.tensor(float(batch.num_rows)), torch.tensor(float(tokens)))
    cfg = load(
        RECIPE,
        [
            f"policy.model_name={folder}/big",
            f"data.train.data_path={folder}/data.jsonl",
            f"nemo_fp8rl.flow={flow}",
            f"nemo_fp8rl.fp8_param={fp8_param}",
            f"nemo_fp8rl.align={align}",
            f"policy.max_total_sequence_length={batch.input_ids.size(1)}",
            f"policy.train_global_batch_size={batch.num_rows}",
            f"policy.train_micro_batch_size={batch.num_rows}",
            f"grpo.num_prompts_per_step={batch.num_rows // 2}",
            "grpo.num_generations_per_prompt=2",
            "policy.megatron_cfg.optimizer.lr=1.0e-6",
            "policy.megatron_cfg.optimizer.min_lr=1.0e-6",
        ],
    )
    worker = MegatronWorker()
    worker.setup(cfg, 0, 1, None)
    try:

        def step() -> None:
            worker.train_step(batch, NllLoss(), totals)

        step()
        worker.logprobs(batch)
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        steps = [timed(step) for _ in range(rounds)]
        peak = torch.cuda.max_memory_allocated() if ON_GPU else 0
        forwards = [timed(lambda: worker.logprobs(batch)) for _ in range(rounds)]
        return {
            "step_seconds": median(steps),
            "logprobs_seconds": median(forwards),
            "tokens_per_second": tokens / median(steps),
            "peak_bytes": peak,
            "kernels": sorted(worker.describe().kernels),
        }
    finally:
        worker.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8 if ON_GPU else 2)
    parser.add_argument("--sequences", type=int, default=8 if ON_GPU else 2)
    parser.add_argument("--length", type=int, default=2048 if ON_GPU else 64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.sequences % 2:
        parser.error("--sequences must be even: each prompt has two answers")

    shape = (arguments.sequences, arguments.length)
    batch = RolloutBatch(
        input_ids=torch.randint(2, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(0)),
        input_lengths=torch.full(shape[:1], arguments.length),
        token_mask=torch.ones(shape),
        sample_mask=torch.ones(shape[0]),
        generation_logprobs=torch.zeros(shape),
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "tiny"
        make_tiny(folder, "add")
        sizes = SIZES | {"num_hidden_layers": arguments.layers}
        write_model(folder / "big", 0, "qwen3", "cuda" if ON_GPU else "cpu", **sizes)
        found = {}
        for flow, how in FLOWS.items():  # of its own, so that what another leaves behind is not in its peak
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                found[flow] = process.submit(measure, folder, *how, batch, arguments.rounds).result()

    device = torch.cuda.get_device_name() if ON_GPU else "CPU, FP8 emulated"
    table = Table("", "step, s", "bf16 / it", "log-probs, s", "bf16 / it", "tokens/s", "peak GB")
    base = found["bf16"]
    for flow, row in found.items():
        faster = (base[key] / row[key] for key in ("step_seconds", "logprobs_seconds"))
        step, logprobs = (f"{ratio:.2f}" for ratio in faster)
        own = (f"{row[key]:.4f}" for key in ("step_seconds", "logprobs_seconds"))
        table.add_row(
            *(flow, next(own), step, next(own), logprobs),
            *(f"{row['tokens_per_second']:.0f}", f"{row['peak_bytes'] / 1e9:.1f}"),
        )
    console = Console(width=110)
    console.print(f"{device}, {arguments.layers} layers, {shape[0]} sequences of {shape[1]} tokens")
    console.print(table)
    if arguments.json:
        record = {
            "device": device,
            "versions": {n: metadata.version(n) for n in ("torch", "megatron-core")}
            | ({"transformer_engine": metadata.version("transformer_engine")} if ON_GPU else {}),
            "model": sizes,
            "sequences": shape[0],
            "length": shape[1],
            "flows": found,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
