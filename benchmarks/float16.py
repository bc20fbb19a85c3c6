"""Mismatch of trainer and engine with what is not FP8 in float16 and in bfloat16, over several seeds.

    python benchmarks/float16.py [--steps 3] [--seeds 3] [--family qwen3] [--folder runs/float16]

Every run is `nemo-fp8rl train` from the same warm model in a process of its own; a seed draws other prompts and other
answers. Without alignment (`nemo_fp8rl.align=none`) both precisions are measured, with alignment float16 alone: that of
bfloat16 is in `benchmarks/mismatch.py`. Prints the rows of docs/results.md, mean and 95 % interval of the runs' means,
and writes them to benchmarks/results/float16[_FAMILY].json.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from benchmarks.mismatch import MIXTURES_WARM_UP, RESULTS, WARM_UP_STEPS, make_warm, train
from nemo_fp8rl.commands.compare.statistics import interval
from nemo_fp8rl.hf.model_config import FAMILIES

CASES = [(flow, "none", dtype) for flow in ("bf16", "fp8_e2e", "fp8_rollout") for dtype in ("bfloat16", "float16")]
CASES += [(flow, "vllm", "float16") for flow in ("bf16", "fp8_e2e")]
METRICS = ("token_mult_prob_error", "gen_kl_error", "exact_logprob_fraction")
KEYS = (
    *("grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0"),
    *("grpo.num_prompts_per_step=16", "policy.train_global_batch_size=128", "policy.train_micro_batch_size=128"),
)
"""No validation, and small steps: float16 is slow on a CPU."""


def run_one(folder: Path, flow: str, align: str, dtype: str, steps: int, seed: int) -> list[dict[str, float]]:
    """Return what one run measured, by step."""
    keys = f"nemo_fp8rl.align={align}", f"policy.precision={dtype}", f"grpo.seed={seed}", *KEYS
    return train(folder, folder / f"{flow}_{align}_{dtype}_{seed}", "add", flow, steps, *keys)


def summarize(flow: str, align: str, dtype: str, runs: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Return mean and half of the 95 % interval of each metric over the runs."""
    result: dict[str, Any] = {"flow": flow, "align": align, "precision": dtype, "seeds": len(runs)}
    for metric in METRICS:
        means = interval([fmean(row[f"train/{metric}"] for row in rows) for rows in runs])
        assert means is not None
        result |= {metric: means.mean, f"{metric}_half": means.half}
    overflows = [row.get("train/overflow_ratio", 0.0) for rows in runs for row in rows]
    return result | {"overflow_ratio": fmean(overflows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3")
    parser.add_argument("--folder", type=Path, default=Path("runs/float16"))
    arguments = parser.parse_args()
    family, folder = arguments.family, arguments.folder / arguments.family

    warm_up = int(WARM_UP_STEPS["add"] * (MIXTURES_WARM_UP if FAMILIES[family].experts else 1))
    make_warm(folder, "add", warm_up, family=family)
    seeds = range(arguments.seeds)
    rows = {(case, seed): run_one(folder, *case, arguments.steps, seed) for seed in seeds for case in CASES}
    results = [summarize(*case, [rows[case, seed] for seed in seeds]) for case in CASES]
    machine = json.loads((folder / "bf16_none_float16_0/environment.json").read_text())
    del machine["choices"]
    sizes = {"family": family, "steps": arguments.steps}
    name = "float16" if family == "qwen3" else f"float16_{family}"
    (RESULTS / f"{name}.json").write_text(json.dumps({**sizes, **machine, "results": results}, indent=1) + "\n")

    table = Table(
        "flow", "align", "policy.precision", "token_mult_prob_error", "gen_kl_error", "bit-equal", "overflows"
    )
    for r in results:
        table.add_row(
            r["flow"],
            r["align"],
            r["precision"],
            f"{r['token_mult_prob_error']:.6f} ± {r['token_mult_prob_error_half'] or 0:.6f}",
            f"{r['gen_kl_error']:.1e}",
            f"{r['exact_logprob_fraction']:.1%}",
            f"{r['overflow_ratio']:.1%}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
