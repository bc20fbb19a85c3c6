"""A KV cache that keeps the prompt and a window of an answer: blocks, mismatch by position, and what is learned.

    python benchmarks/kv_window.py [--steps 25] [--seeds 5] [--dry-run] [--folder F] [--json FILE]

GRPO on running sums (`make-tiny --task chain`: answers of about 30 tokens, every step written out), from one warm model
that was trained on whole sequences. A window of WINDOW tokens hides the first step of the sum from the last one, and
with 21 tokens or less this model answers nothing right. Each flow runs dense; with the window on both sides (unified);
and with the window in the engine alone (rollout), uncorrected and with the corrections tis and sparse-rl. Validation is
by the engine, so with its window. A seed has the same prompts in all of them; a difference is between runs of a seed.

Blocks, of 128 tokens, are those that a request has at a time at most, in answers of LONG tokens of a random model.

Runs are stored in --folder: an interrupted benchmark continues. A dry run is as short as can be, for the sake of the
tests: its figures say nothing.
"""

import argparse
import json
import os
import shutil
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
from mismatch import RECIPES, TASKS, make_warm
from rich.console import Console
from rich.table import Table
from stored_runs import run_all

from nemo_fp8rl.algorithms.metric_names import sort_by_number
from nemo_fp8rl.algorithms.mismatch import mismatch_metrics
from nemo_fp8rl.assemble import build_bridge
from nemo_fp8rl.batch import Prompt, collate
from nemo_fp8rl.commands.compare.statistics import interval
from nemo_fp8rl.commands.tiny_model import make_tiny
from nemo_fp8rl.common.machine import machine
from nemo_fp8rl.config.recipe import load
from nemo_fp8rl.data.tokenizer import PromptTokenizer
from nemo_fp8rl.generation.engine_pool import EnginePool
from nemo_fp8rl.generation.interface import Sampling
from nemo_fp8rl.policy.rank_group import MegatronPolicy
from nemo_fp8rl.train import train

FLOWS = ("bf16", "fp8_e2e")
WINDOW = 23
SIZES = (
    "grpo.num_prompts_per_step=16",
    "policy.train_global_batch_size=128",
    "policy.train_micro_batch_size=128",
    "policy.megatron_cfg.optimizer.lr=1.0e-4",
)
"""A quarter of tiny_cpu's samples a step, with a third of its learning rate: with all of it dense runs lose, too."""
KEY = "policy.generation.vllm_cfg.kv_window"
ROLLOUT = (f"{KEY}={WINDOW}", "nemo_fp8rl.kv=rollout")
ARMS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "unified": (f"{KEY}={WINDOW}",),
    **{f"rollout, {name}": (*ROLLOUT, f"nemo_fp8rl.correction.preset={name}") for name in ("none", "tis", "sparse-rl")},
}
TEXTS = [f"{a}+{b}=" for a in (12, 34, 56, 78) for b in (9, 90)]
LONG, LONG_WINDOWS = 1024, (None, 64, 256)
MEANS = {
    "token_mult_prob_error": "train/token_mult_prob_error",
    "exact_logprob_fraction": "train/exact_logprob_fraction",
    "gen_kl_error": "train/gen_kl_error",
    "ess": "train/ess",
    "is_oob_ratio": "train/is_oob_ratio",
}
POSITION = "train/gen_kl_error/position_"
BLOCKS = {"peak": "generation/kv_blocks_peak", "saved": "generation/kv_blocks_saved"}


def run_recipe(run: Path, *keys: str) -> list[dict[str, float]]:
    """Run GRPO and return its metrics, by step."""
    shutil.rmtree(run, ignore_errors=True)  # of an interrupted benchmark
    keys = (*keys, f"logger.log_dir={run}", "checkpointing.enabled=false", "logger.tensorboard_enabled=false")
    train(load(RECIPES / "tiny_cpu.yaml", list(keys)))
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def learn(folder: Path, flow: str, arm: str, steps: int, seed: int) -> dict[str, Any]:
    """Return means over the steps of a run, its mismatch by position, and its accuracies."""
    paths = f"policy.model_name={folder}/warm", f"data.train.data_path={folder}/data.jsonl"
    length = f"grpo.max_num_steps={steps}", f"grpo.seed={seed}", "grpo.val_period=0"
    name = f"{flow}_{arm.replace(', ', '_')}_{seed}"
    keys = *paths, *TASKS["chain"], *SIZES, *length, f"nemo_fp8rl.flow={flow}", *ARMS[arm]
    rows = run_recipe(folder / "logs" / name, *keys)
    trained = [row for row in rows if row["step"] > 0]
    accuracy = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
    ends = sort_by_number({name.removeprefix(POSITION) for row in trained for name in row if name.startswith(POSITION)})
    return {
        **{name: fmean(row[key] for row in trained) for name, key in MEANS.items()},
        "worst_step": max(row["train/token_mult_prob_error"] for row in trained),
        "by_position": {end: fmean(row[POSITION + end] for row in trained if POSITION + end in row) for end in ends},
        "tokens": fmean(row["train/mean_gen_tokens_per_sample"] for row in trained),
        "accuracy_start": accuracy[0],
        "accuracy_end": accuracy[-1],
    }


def count_blocks(folder: Path, window: int | None, tokens: int) -> dict[str, Any]:
    """Return blocks and mismatch of answers of so many tokens; vLLM counts blocks only with a window."""
    paths = f"policy.model_name={folder}/long/model", f"data.train.data_path={folder}/long/data.jsonl"
    sizes = f"policy.generation.max_new_tokens={tokens}", f"policy.max_total_sequence_length={tokens + 32}"
    keys = (*paths, *sizes, f"{KEY}={'null' if window is None else window}", "policy.logprob_batch_size=4")
    cfg = load(RECIPES / "tiny_cpu.yaml", keys)
    policy, generation = MegatronPolicy(cfg), EnginePool(cfg)
    try:
        build_bridge(cfg, policy, generation).refit()
        tokenizer = PromptTokenizer(cfg.policy).tokenizer
        prompts = [Prompt(i, text, "", tuple(tokenizer(text).input_ids)) for i, text in enumerate(TEXTS)]
        sampling = Sampling(num_generations=1, max_new_tokens=tokens, temperature=1.0, stop_token_ids=())
        groups = generation.generate([p.token_ids for p in prompts], [p.index for p in prompts], sampling)
        batch = collate(prompts, [completion for (completion,) in groups], 0)
        found = mismatch_metrics(policy.logprobs(batch), batch.generation_logprobs, batch.token_mask)
        blocks = generation.take_cache_metrics()
    finally:
        generation.shutdown()
        policy.shutdown()
    names = "token_mult_prob_error", "exact_logprob_fraction"
    return {
        **{name: blocks[key] for name, key in BLOCKS.items() if key in blocks},
        "tokens": float(batch.token_mask.sum()) / batch.num_rows,
        **{name: found[name] for name in names},
    }


def make_endless(folder: Path) -> None:
    """Make a random model whose answers end at the largest number of tokens."""
    make_tiny(folder, "add", max_position_embeddings=2 * LONG)
    path = folder / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": None}))


def summarize(runs: dict[tuple[str, str, int], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each flow and arm: means over seeds, and intervals of the accuracy."""
    rows = []
    for flow, arm in dict.fromkeys(key[:2] for key in runs):
        seeds = [key[2] for key in runs if key[:2] == (flow, arm)]
        of_seeds = [runs[flow, arm, seed] for seed in seeds]
        ends = [run["accuracy_end"] for run in of_seeds]
        less = [runs[flow, arm, s]["accuracy_end"] - runs[flow, "dense", s]["accuracy_end"] for s in seeds]
        positions = dict.fromkeys(name for run in of_seeds for name in run["by_position"])
        rows.append(
            {
                "flow": flow,
                "arm": arm,
                **{name: fmean(run[name] for run in of_seeds) for name in (*MEANS, "tokens", "accuracy_start")},
                "worst_step": max(run["worst_step"] for run in of_seeds),
                "gen_kl_error_by_position": {
                    name: fmean(run["by_position"][name] for run in of_seeds if name in run["by_position"])
                    for name in positions
                },
                "accuracy_end": spread(ends),
                "accuracy_less_dense": spread(less),
            }
        )
    return rows


def spread(values: list[float]) -> dict[str, float | None]:
    """Return the mean, and the half width of its 95 % interval."""
    found = interval(values)
    assert found is not None
    return {"mean": found.mean, "half": found.half}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("runs/kv_window"))
    parser.add_argument("--json", type=Path, default=RECIPES.parent / "benchmarks/results/kv_window_cpu.json")
    arguments = parser.parse_args()
    folder, steps, seeds = arguments.folder.resolve(), arguments.steps, range(arguments.seeds)
    flows, arms, tokens, windows = FLOWS, tuple(ARMS), LONG, LONG_WINDOWS
    if arguments.dry_run:
        steps, seeds, flows, arms, tokens, windows = 1, range(1), FLOWS[1:], ("dense", "unified"), 40, (None, 8)

    if not (folder / "warm").exists():
        make_warm(folder, "chain", 2 if arguments.dry_run else None)
    if not (folder / "long").exists():
        make_endless(folder / "long")
    long = run_all(folder / "runs", count_blocks, {("long", w): (folder, w, tokens) for w in windows}, 1)
    cases = {(f, a, s): (folder, f, a, steps, s) for s, f, a in product(seeds, flows, arms)}
    results = run_all(folder / "runs", learn, cases, 1)
    ordered = sorted(cases, key=lambda key: (flows.index(key[0]), arms.index(key[1]), key[2]))
    rows = summarize({key: results[key] for key in ordered})
    record = {
        "settings": {"window": WINDOW, "steps": steps, "seeds": len(seeds), "long_tokens": tokens},
        "machine": machine(),
        "long": [{"window": window, **of_window} for (_, window), of_window in long.items()],
        "rows": rows,
    }
    arguments.json.write_text(json.dumps(record) + "\n")

    console = Console(width=150)
    table = Table("window", f"blocks at most, {tokens} tokens", "saved", "token_mult_prob_error", "bit-equal")
    for row in record["long"]:
        counts = (str(row.get("peak", "-")), f"{row['saved']:.1%}" if "saved" in row else "-")
        exact = f"{row['exact_logprob_fraction']:.1%}"
        table.add_row(str(row["window"]), *counts, f"{row['token_mult_prob_error']:.6f}", exact)
    console.print(table)
    positions = list(dict.fromkeys(name for row in rows for name in row["gen_kl_error_by_position"]))
    table = Table(
        "flow", "window", "token_mult_prob_error", *(f"KL {name}" for name in positions), "accuracy", "less dense"
    )
    for row in rows:
        kl = (f"{row['gen_kl_error_by_position'][name]:.1e}" for name in positions)
        accuracies = (
            f"{s['mean']:.3f} ± {s['half'] or 0:.3f}" for s in (row["accuracy_end"], row["accuracy_less_dense"])
        )
        table.add_row(row["flow"], row["arm"], f"{row['token_mult_prob_error']:.6f}", *kl, *accuracies)
    console.print(table)


if __name__ == "__main__":
    main()
