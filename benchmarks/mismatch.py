"""Trainer/engine mismatch of every precision flow, side by side: the same warm model, data, seed and number of steps.

    python benchmarks/mismatch.py [--steps 40] [--task add|chain] [--family qwen3] [--kv | --half-heads] [--folder F]

Each run is `nemo-fp8rl train` in a process of its own. Prints the table of docs/results.md, and writes it with
machine and versions to benchmarks/results/mismatch_TASK[_FAMILY][_VARIANT].json. With --kv the flows that are aligned
run with an FP8 KV cache, which the trainer reads too (unified) or does not (rollout). With --half-heads the model has
twice as many heads of 64, half of an FP8 block, as Llama-3.2-1B has.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.hf.model_config import FAMILIES

RECIPES = Path(__file__).resolve().parent.parent / "conf"
RESULTS = Path(__file__).resolve().parent / "results"
FLOWS = [(flow, align, "") for align in ("vllm", "none") for flow in ("bf16", "fp8_e2e", "fp8_rollout")]
KV_FLOWS = [(flow, "vllm", kv) for flow in ("bf16", "fp8_e2e") for kv in ("", "unified", "rollout")]
TASKS = {  # what a task needs beyond conf/tiny_*.yaml
    "add": [],
    "chain": ["policy.generation.max_new_tokens=31", "data.train.split_validation_size=0.0256"],
}
WARM_UP_STEPS = {"add": 130, "chain": 175}
HALF_HEADS = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
MIXTURES_WARM_UP = 2.0
"""How much longer a mixture of experts takes to learn as much."""


def command(verb: str, recipe: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nemo_fp8rl.cli", verb, "--config", str(RECIPES / recipe), *arguments],
        env={"OMP_NUM_THREADS": "1", **os.environ},  # so small a model loses by more threads
        check=False,
    )
    if done.returncode:
        sys.exit(done.returncode)


def train(folder: Path, run: Path, task: str, flow: str, steps: int, *arguments: str) -> list[dict[str, float]]:
    """What a run of the folder's warm model measured, by step."""
    command(
        "train",
        "tiny_cpu.yaml",
        f"policy.model_name={folder}/warm",
        f"data.train.data_path={folder}/data.jsonl",
        f"nemo_fp8rl.flow={flow}",
        f"grpo.max_num_steps={steps}",
        f"logger.log_dir={run}",
        "checkpointing.enabled=false",
        *TASKS[task],
        *arguments,
    )
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def make_warm(folder: Path, task: str, steps: int | None = None, **model: Any) -> None:
    """Make a tiny model and its data in the folder, and folder/warm of as many steps; None: those of the task.

    model:  keywords of `make_tiny`
    """
    make_tiny(folder, task, **model)
    paths = f"policy.model_name={folder}/model", f"data.train.data_path={folder}/data.jsonl"
    warm_up = f"sft.max_num_steps={steps or WARM_UP_STEPS[task]}"
    output = (f"logger.log_dir={folder}/sft", "--output", f"{folder}/warm")
    command("sft", "tiny_sft.yaml", *paths, warm_up, *TASKS[task], *output)


def measure(folder: Path, task: str, flow: str, align: str, kv: str, steps: int) -> dict[str, float | str]:
    more = [f"nemo_fp8rl.align={align}"]
    if kv:
        more += [f"nemo_fp8rl.kv={kv}", "policy.generation.vllm_cfg.kv_cache_dtype=fp8"]
    run = folder / "_".join(filter(None, (flow, align, kv)))
    rows = train(folder, run, task, flow, steps, *more)
    trained = [row for row in rows if row["step"] > 0]
    mean = {name: fmean(row[name] for row in trained) for name in set(trained[0]).intersection(*trained)}
    accuracy = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
    return {
        "flow": flow,
        "align": align,
        **({"kv": kv} if kv else {}),
        "token_mult_prob_error": mean["train/token_mult_prob_error"],
        "worst_step": max(row["train/token_mult_prob_error"] for row in trained),
        "gen_kl_error": mean["train/gen_kl_error"],
        "exact_logprob_fraction": mean["train/exact_logprob_fraction"],
        "accuracy_start": accuracy[0],
        "accuracy_end": accuracy[-1],
        "refit_bytes": mean["refit/bytes"],
        **{phase: mean[f"timing/{phase}"] for phase in ("generate", "logprob", "train", "refit")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--task", choices=TASKS, default="add")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--kv", action="store_true")
    only.add_argument("--half-heads", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("runs/mismatch"))
    arguments = parser.parse_args()
    task, family = arguments.task, arguments.family
    variant = "kv" if arguments.kv else "half_heads" if arguments.half_heads else ""
    name = "_".join(filter(None, (task, family if family != "qwen3" else "", variant)))
    folder = arguments.folder / name
    warm_up = int(WARM_UP_STEPS[task] * (MIXTURES_WARM_UP if FAMILIES[family].experts else 1))

    make_warm(folder, task, warm_up, family=family, **(HALF_HEADS if arguments.half_heads else {}))
    flows = KV_FLOWS if arguments.kv else FLOWS
    results = [measure(folder, task, *flow, arguments.steps) for flow in flows]
    machine = json.loads((folder / "bf16_vllm/environment.json").read_text())
    del machine["choices"]
    record = {"task": task, "family": family, "steps": arguments.steps, **machine, "results": results}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"mismatch_{name}.json").write_text(json.dumps(record, indent=1) + "\n")

    third = "FP8 KV cache" if arguments.kv else "align"
    table = Table("flow", third, "token_mult_prob_error", "worst step", "gen_kl_error", "bit-equal", "accuracy")
    for r in results:
        table.add_row(
            str(r["flow"]),
            str(r.get("kv", "no")) if arguments.kv else str(r["align"]),
            f"{r['token_mult_prob_error']:.6f}",
            f"{r['worst_step']:.6f}",
            f"{r['gen_kl_error']:.1e}",
            f"{r['exact_logprob_fraction']:.1%}",
            f"{r['accuracy_start']:.3f} -> {r['accuracy_end']:.3f}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
