"""Every way to split the trainer over two ranks, side by side: mismatch with the engine, reward and loss by step.

    python benchmarks/layouts.py [--steps 20] [--family qwen3|qwen3_moe] [--folder runs/layouts]

The same warm model, data and seed; answers of up to 31 tokens; flows bf16 and fp8_e2e, aligned. Each run is
`nemo-fp8rl train` with Ray actors. Prints a table and writes it with machine and versions to
benchmarks/results/layouts_FAMILY.json.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean

from mismatch import RESULTS, TASKS, WARM_UP_STEPS, command, train
from rich.console import Console
from rich.table import Table

from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.hf.model_config import FAMILIES

TASK = "chain"
MIXTURES_WARM_UP = 200
"""A mixture takes longer: at 130 steps it answers none of the questions, at 200 nine of ten, at 350 nearly all, and
there is little left to learn.
"""
TENSOR = ("tensor_model_parallel_size=2",)
SEQUENCE = (*TENSOR, "sequence_parallel=true")
PIPELINE = ("pipeline_model_parallel_size=2",)
CONTEXT = ("context_parallel_size=2",)
EXPERT = ("expert_model_parallel_size=2",)
DENSE = {"one rank": (), "TP 2": TENSOR, "TP 2, SP": SEQUENCE, "PP 2": PIPELINE, "CP 2": CONTEXT, "DP 2": ()}
MIXTURE = {
    "one rank": (),
    "TP 2, SP, ETP 2": SEQUENCE,
    "PP 2": PIPELINE,
    "CP 2": CONTEXT,
    "EP 2": EXPERT,
    "TP 2, SP, EP 2": (*SEQUENCE, *EXPERT, "expert_tensor_parallel_size=1"),
}
SMALL = (
    "grpo.num_prompts_per_step=16",
    "grpo.num_generations_per_prompt=8",
    "grpo.val_period=0",
    "grpo.val_at_end=false",
    "policy.train_global_batch_size=128",
    "policy.train_micro_batch_size=64",
)


def measure(folder: Path, flow: str, name: str, layout: tuple[str, ...], steps: int) -> dict[str, object]:
    run = folder / f"{flow}_{name.replace(', ', '_').replace(' ', '')}"
    ranks = f"cluster.train_ranks={1 if name == 'one rank' else 2}"
    split = (f"policy.megatron_cfg.{key}" for key in layout)
    rows = train(folder, run, TASK, flow, steps, *SMALL, "cluster.backend=ray", ranks, *split)
    trained = [row for row in rows if row["step"] > 0]
    series = {n: [row[f"train/{n}"] for row in trained] for n in ("reward", "loss", "grad_norm")}
    return {
        "flow": flow,
        "layout": name,
        "token_mult_prob_error": fmean(row["train/token_mult_prob_error"] for row in trained),
        "worst_step": max(row["train/token_mult_prob_error"] for row in trained),
        "exact_logprob_fraction": fmean(row["train/exact_logprob_fraction"] for row in trained),
        **series,
        **{phase: fmean(row[f"timing/{phase}"] for row in trained) for phase in ("logprob", "train", "refit")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3")
    parser.add_argument("--folder", type=Path, default=Path("runs/layouts"))
    arguments = parser.parse_args()
    family, mixture = arguments.family, FAMILIES[arguments.family].experts
    folder = arguments.folder / family

    make_tiny(folder, TASK, family=family, **({"moe_intermediate_size": 256} if mixture else {}))  # ETP 2 needs 256
    command(
        "sft",
        "tiny_sft.yaml",
        f"policy.model_name={folder}/model",
        f"data.train.data_path={folder}/data.jsonl",
        f"sft.max_num_steps={MIXTURES_WARM_UP if mixture else WARM_UP_STEPS[TASK]}",
        *TASKS[TASK],
        f"logger.log_dir={folder}/sft",
        "--output",
        f"{folder}/warm",
    )
    layouts = (MIXTURE if mixture else DENSE).items()
    results = [measure(folder, flow, *layout, arguments.steps) for flow in ("bf16", "fp8_e2e") for layout in layouts]
    machine = json.loads((folder / "bf16_onerank/environment.json").read_text())
    del machine["choices"]
    record = {"task": TASK, "family": family, "steps": arguments.steps, **machine, "results": results}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"layouts_{family}.json").write_text(json.dumps(record, indent=1) + "\n")

    table = Table(
        "flow", "layout", "token_mult_prob_error", "worst step", "bit-equal", "reward", "loss of step 1", "norm"
    )
    for r in results:
        table.add_row(
            str(r["flow"]),
            str(r["layout"]),
            f"{r['token_mult_prob_error']:.6f}",
            f"{r['worst_step']:.6f}",
            f"{r['exact_logprob_fraction']:.1%}",
            f"{fmean(r['reward']):.3f}",  # type: ignore[arg-type]
            f"{r['loss'][0]:.6f}",  # type: ignore[index]
            f"{r['grad_norm'][0]:.5f}",  # type: ignore[index]
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
