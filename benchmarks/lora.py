"""Full-parameter training against low-rank adapters on frozen bases, without and with noise on the norms.

    python benchmarks/lora.py [--steps 20] [--seeds 5] [--dry-run] [--folder F] [--json FILE]

Every row trains the same warm tiny model on additions, `--seeds` times. The wire carries the base once: the first refit
and the mean of the later ones are over the bytes of the bfloat16 model. A trained parameter's bytes are those of
parameter, gradient, master and moments; they are counted from the trainer's tensors, as those of the base are.
A dry run is as short as can be, for the sake of the tests: its figures say nothing.
"""

import argparse
import json
import os
from itertools import product
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
from mismatch import RECIPES, make_warm, train
from rich.console import Console
from rich.table import Table

from nemo_fp8rl.commands.compare.statistics import interval
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.hf.checkpoint_reader import CheckpointReader
from nemo_fp8rl.policy.layers.linears import QuantizedMatmul
from nemo_fp8rl.policy.on_cpu.megatron_on_cpu import megatron_on_cpu
from nemo_fp8rl.policy.optimizer.builders import optimizer_parts
from nemo_fp8rl.policy.rank.worker import MegatronWorker
from nemo_fp8rl.policy.weights.optimizer_state import MOMENTS, state_slices

FLOWS = ("bf16", "fp8_e2e", "nvfp4_a16_e2e")
ADAPTERS = (
    "policy.megatron_cfg.peft.enabled=true",
    "policy.megatron_cfg.peft.dim=16",
    "policy.megatron_cfg.optimizer.lr=1e-3",
)
NOISE = "nemo_fp8rl.noise.enabled=true"
KINDS: dict[str, tuple[str, ...]] = {
    "full": (),
    "LoRA": ADAPTERS,
    "LoRA, noise in the engine": (*ADAPTERS, NOISE, "nemo_fp8rl.noise.where=engine"),
    "LoRA, noise in both": (*ADAPTERS, NOISE, "nemo_fp8rl.noise.where=both"),
}

ROWS = [*product(FLOWS, ("full", "LoRA")), *(("nvfp4_a16_e2e", kind) for kind in KINDS if "noise" in kind)]
"""(flow, what is trained). The noise is QeRL's, for a base in 4 bits."""


def count_bytes(folder: Path, *keys: str) -> dict[str, float]:
    """Return the bytes that a trainer has for a parameter: of the frozen base, and trained with all that it needs."""
    paths = f"policy.model_name={folder}/model", f"data.train.data_path={folder}/data.jsonl"
    worker = MegatronWorker()
    worker.setup(load(RECIPES / "tiny_cpu.yaml", [*paths, *keys]), 0, 1, None)
    try:
        with megatron_on_cpu():
            for part in optimizer_parts(worker.optimizer):
                part._init_optimizer_states_with_dummy_values()  # Adam has no moments before its first step
        parameters = list(worker.model.parameters())
        bases = [m.base for m in worker.model.modules() if isinstance(m, QuantizedMatmul) and m.base is not None]
        parts = [part for base in bases for part in (base.data, base.scale_inv, base.global_scale) if part is not None]
        parts += [parameter for parameter in parameters if not parameter.requires_grad]
        frozen = sum(prod(base.shape) for base in bases)
        frozen += sum(parameter.numel() for parameter in parameters if not parameter.requires_grad)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        kept = sum(parameter.nbytes for parameter in trained)
        kept += sum(buffer.grad_data.nbytes for buffer in worker.offload.buffers)
        for state in state_slices(worker.model, worker.optimizer).values():
            kept += state.master.nbytes + sum(state.values(kind).nbytes for kind in MOMENTS)
        count = sum(parameter.numel() for parameter in trained)
        return {
            "base_bytes": sum(part.nbytes for part in parts) / frozen if frozen else float("nan"),
            "trained_bytes": kept / count,
            "trained_parameters": count,
        }
    finally:
        worker.shutdown()


def measure(folder: Path, flow: str, kind: str, steps: int, seeds: int) -> dict[str, Any]:
    """Return what runs of a row measured; bytes of refits over those of the bfloat16 model."""
    first, later, errors, accuracies = list[float](), list[float](), list[float](), list[float]()
    for seed in range(seeds):
        run = folder / f"{flow}_{kind.replace(', ', '_').replace(' ', '_')}_{seed}"
        rows = train(folder, run, "add", flow, steps, f"grpo.seed={seed}", *KINDS[kind])
        refits = [row["refit/bytes"] for row in rows if "refit/bytes" in row]
        first.append(refits[0])
        later += refits[1:]
        errors += [row["train/token_mult_prob_error"] for row in rows if row["step"] > 0]
        accuracies.append([row["validation/accuracy"] for row in rows if "validation/accuracy" in row][-1])
    with CheckpointReader(folder / "warm") as reader:
        bf16_bytes = 2 * sum(prod(reader.shape(name)) for name in reader.names)
    spread = interval(accuracies)
    return {
        "flow": flow,
        "kind": kind,
        "accuracy": fmean(accuracies),
        "accuracy_interval": [spread.low, spread.high] if seeds > 1 and spread else None,
        "first_refit_over_bf16": fmean(first) / bf16_bytes,
        "later_refits_over_bf16": fmean(later) / bf16_bytes,
        "token_mult_prob_error": fmean(errors),
        "worst_step": max(errors),
        **count_bytes(folder, f"nemo_fp8rl.flow={flow}", *KINDS[kind]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("runs/lora"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder
    make_warm(folder, "add", 2 if arguments.dry_run else None)

    steps, seeds = (1, 1) if arguments.dry_run else (arguments.steps, arguments.seeds)
    pairs = [("nvfp4_a16_e2e", "LoRA")] if arguments.dry_run else ROWS
    results = []
    for flow, kind in pairs:
        results.append(measure(folder, flow, kind, steps, seeds))
        if arguments.json:  # after every row, because a whole run takes hours
            record = {"settings": {"steps": steps, "seeds": seeds}, "rows": results}
            arguments.json.write_text(json.dumps(record, indent=1) + "\n")

    columns = "flow", "trains", "accuracy", "first refit / bf16", "later", "token_mult_prob_error", "worst step"
    table = Table(*columns, "base bytes", "trained bytes")
    for r in results:
        low, high = r["accuracy_interval"] or (r["accuracy"], r["accuracy"])
        table.add_row(
            r["flow"],
            r["kind"],
            f"{r['accuracy']:.3f} ({low:.3f} to {high:.3f})",
            *(f"{r[name]:.4f}" for name in ("first_refit_over_bf16", "later_refits_over_bf16")),
            *(f"{r[name]:.6f}" for name in ("token_mult_prob_error", "worst_step")),
            *(f"{r[name]:.2f}" for name in ("base_bytes", "trained_bytes")),
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
