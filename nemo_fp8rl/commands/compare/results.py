"""What the runs measured, as one record: results.json, from which every table is made."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from nemo_fp8rl.algorithms.metric_names import sort_by_number
from nemo_fp8rl.commands.compare.comparison import Comparison
from nemo_fp8rl.commands.compare.machine_support import Reasons, sentences
from nemo_fp8rl.commands.compare.run_files import read_environment
from nemo_fp8rl.commands.compare.run_list import Planned
from nemo_fp8rl.commands.compare.same_inputs import check_same_inputs
from nemo_fp8rl.run.step_log import Row

MEANS = {
    "token_mult_prob_error": "train/token_mult_prob_error",
    "k3_kl": "train/gen_kl_error",
    "exact_logprob_fraction": "train/exact_logprob_fraction",
    "reward": "train/reward",
    "tokens_per_answer": "train/mean_gen_tokens_per_sample",
    "refit_bytes": "refit/bytes",
}
"""Means over a run's steps."""
MEDIANS = {
    "generate_seconds": ("timing/generate",),
    "train_seconds": ("timing/logprob", "timing/train"),
    "refit_seconds": ("timing/refit",),
    "step_seconds": ("timing/total_step_time",),
}
"""Medians over a run's steps, of sums: the first steps take longer, and so do those that other work slows down."""
POSITION = "train/gen_kl_error/position_"

Numbers = dict[str, float]


def measure(rows: Sequence[Row]) -> Numbers:
    """The numbers of one run, from its metrics.jsonl. What no row has is left out."""
    trained = [row for row in rows if row["step"] > 0]
    accuracy = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
    numbers: Numbers = {"accuracy_end": accuracy[-1]} if accuracy else {}
    for name, metric in MEANS.items():
        if values := [row[metric] for row in trained if metric in row]:
            numbers[name] = fmean(values)
    for name, phases in MEDIANS.items():
        if values := [sum(row[p] for p in phases) for row in trained if all(p in row for p in phases)]:
            numbers[name] = median(values)
    return numbers


def by_position(rows: Sequence[Row]) -> Numbers:
    """Mean k3 of the steps by position in the answer: "0", "1", "2_3", ..."""
    names = dict.fromkeys(key for row in rows for key in row if key.startswith(POSITION))
    means = {n.removeprefix(POSITION): fmean(row[n] for row in rows if n in row) for n in names}
    return {bucket: means[bucket] for bucket in sort_by_number(means)}


def record(
    comparison: Comparison, overrides: Sequence[str], runs: Sequence[Planned], left_out: Reasons
) -> dict[str, Any]:
    """Finished runs only: one that is under way would be compared at another step. Those that this machine cannot have
    are not planned, but for what has finished elsewhere. Raises UserError where their inputs differ.
    """
    finished = [run for run in runs if run.finished]
    environments = [read_environment(run.folder) for run in finished]
    check_same_inputs(finished, environments)
    shown = {key: value for key, value in environments[0].items() if key != "choices"} if environments else {}
    return {
        **shown,
        "comparison": asdict(comparison),
        "overrides": list(overrides),
        "planned": sum(run.finished or (run.flow, run.length) not in left_out for run in runs),
        "left_out": sentences(left_out),
        "runs": [
            {
                "flow": run.flow,
                "seed": run.seed,
                "length": run.length,
                "steps": run.done(),
                "choices": environment["choices"],
                "numbers": measure(run.rows()),
                "k3_by_position": by_position(run.rows()),
            }
            for run, environment in zip(finished, environments, strict=True)
        ],
        "machines": sorted({_machine(environment) for environment in environments}),
    }


def _machine(environment: Mapping[str, Any]) -> str:
    versions = [f"{name} {version}" for name, version in environment["versions"].items()]
    return ", ".join([environment["machine"], f"Python {environment['python']}", *versions])


def values_of(
    results: Mapping[str, Any], flow: str, number: str, length: str | None = None, part: str = "numbers"
) -> dict[int, float]:
    """Values of a number by seed, of the runs of a flow that have it."""
    return {
        run["seed"]: run[part][number]
        for run in results["runs"]
        if run["flow"] == flow and run["length"] == length and number in run[part]
    }
