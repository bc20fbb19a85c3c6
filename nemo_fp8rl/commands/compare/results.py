"""results.json: the measured numbers of all runs, from which every table is made."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from nemo_fp8rl.algorithms.metric_names import sort_by_number
from nemo_fp8rl.commands.compare.comparison import Comparison
from nemo_fp8rl.commands.compare.machine_support import Reasons, sentences
from nemo_fp8rl.commands.compare.run_files import read_environment
from nemo_fp8rl.commands.compare.run_list import PlannedRun
from nemo_fp8rl.commands.compare.same_inputs import check_same_inputs
from nemo_fp8rl.run import spikes
from nemo_fp8rl.run.step_log import Row

MEANS = {
    "token_mult_prob_error": "train/token_mult_prob_error",
    "k3_kl": "train/gen_kl_error",
    "exact_logprob_fraction": "train/exact_logprob_fraction",
    "reward": "train/reward",
    "tokens_per_answer": "train/mean_gen_tokens_per_sample",
    "refit_bytes": "refit/bytes",
}
"""Numbers that are means over the steps of a run."""
MEDIANS = {
    "generate_seconds": ("timing/generate",),
    "train_seconds": ("timing/logprob", "timing/train"),
    "refit_seconds": ("timing/refit",),
    "step_seconds": ("timing/total_step_time",),
}
"""Numbers that are medians over the steps of a run, of sums of phases: first steps and disturbed steps take longer."""
POSITION = "train/gen_kl_error/position_"

Numbers = dict[str, float]


def measure(rows: Sequence[Row]) -> Numbers:
    """Return the numbers of one run from the rows of metrics.jsonl, without numbers that no row has."""
    trained = [row for row in rows if row["step"] > 0]
    accuracy = [row["validation/accuracy"] for row in rows if "validation/accuracy" in row]
    numbers: Numbers = {"accuracy_end": accuracy[-1]} if accuracy else {}
    for name, metric in MEANS.items():
        if values := [row[metric] for row in trained if metric in row]:
            numbers[name] = fmean(values)
    for name, phases in MEDIANS.items():
        if values := [sum(row[p] for p in phases) for row in trained if all(p in row for p in phases)]:
            numbers[name] = median(values)
    found = {name: spikes.spikes_of_run(rows, metric) for name, metric in spikes.METRICS.items()}
    counts = {name: of_metric for name, of_metric in found.items() if of_metric is not None}
    numbers |= {f"{name}_spikes": float(of_metric.count) for name, of_metric in counts.items()}
    if counts:
        numbers["longest_spike"] = float(max(of_metric.longest for of_metric in counts.values()))
    return numbers


def by_position(rows: Sequence[Row]) -> Numbers:
    """Return the mean k3 of the steps by position in the answer: "0", "1", "2_3", ..."""
    names = dict.fromkeys(key for row in rows for key in row if key.startswith(POSITION))
    means = {n.removeprefix(POSITION): fmean(row[n] for row in rows if n in row) for n in names}
    return {bucket: means[bucket] for bucket in sort_by_number(means)}


def record(
    comparison: Comparison, overrides: Sequence[str], runs: Sequence[PlannedRun], unsupported: Reasons
) -> dict[str, Any]:
    """Return the record of all finished runs; an unfinished run would be compared at another step.

    unsupported:  runs that this machine does not support; "planned" counts them only if they finished elsewhere
    Raises:       UserError if the inputs of the runs differ
    """
    finished = [run for run in runs if run.is_finished]
    environments = [read_environment(run.folder) for run in finished]
    check_same_inputs(finished, environments)
    common = {key: value for key, value in environments[0].items() if key != "choices"} if environments else {}
    return {
        **common,
        "comparison": asdict(comparison),
        "overrides": list(overrides),
        "planned": sum(run.is_finished or (run.flow, run.length) not in unsupported for run in runs),
        "left_out": sentences(unsupported),
        "runs": [
            {
                "flow": run.flow,
                "seed": run.seed,
                "length": run.length,
                "steps": run.completed_steps(),
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
    """Return seed -> value of a number, for the runs of a flow that have the number."""
    return {
        run["seed"]: run[part][number]
        for run in results["runs"]
        if run["flow"] == flow and run["length"] == length and number in run[part]
    }
