"""results.json as tables for the terminal and as Markdown. A sentence on a flow states only what its interval shows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from nemo_fp8rl.algorithms.metric_names import sort_by_number
from nemo_fp8rl.commands.compare.results import values_of
from nemo_fp8rl.commands.compare.statistics import Interval, interval, paired_interval
from nemo_fp8rl.run import spikes

NOTHING = "-"

Format = Callable[[float], str]
ONE, TWO, THREE, SIX = "{:.1f}".format, "{:.2f}".format, "{:.3f}".format, "{:.6f}".format
SIGNED, POWER, SIGNED_POWER = "{:+.3f}".format, "{:.1e}".format, "{:+.1e}".format


@dataclass(frozen=True)
class Section:
    """A table with the sentences below it."""

    title: str
    headers: tuple[str, ...]
    rows: list[tuple[str, ...]]
    sentences: list[str]


def sections(results: Mapping[str, Any]) -> list[Section]:
    """Return the tables of all finished runs, without parts that have no finished run."""
    tables = [_flows(results), _stability(results)]
    if results["comparison"]["lengths"]:
        tables += [_lengths(results), _positions(results)]
    return [section for section in tables if section.rows]


def as_rich(section: Section) -> Table:
    table = Table(title=section.title, title_justify="left")
    for header in section.headers:
        table.add_column(header, overflow="fold")
    for row in section.rows:
        table.add_row(*row)
    return table


def as_markdown(results: Mapping[str, Any], command: str) -> str:
    """Return a page with the machines, the tables and their sentences."""
    lines = [
        "# Flows compared",
        "",
        f"Written by `{command}`. {len(results['runs'])} of {results['planned']} runs have finished.",
        "",
        *(f"- {machine}" for machine in results["machines"]),
        *(f"- {sentence}" for sentence in results["left_out"]),
    ]
    for section in sections(results):
        lines += ["", f"## {section.title}", "", _line(section.headers), _line(["---"] * len(section.headers))]
        lines += [_line(row) for row in section.rows]
        lines += [""] + [f"- {sentence}" for sentence in section.sentences]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _flows(results: Mapping[str, Any]) -> Section:
    reference = results["comparison"]["reference"]
    rows: list[tuple[str, ...]] = []
    sentences = []
    at_reference = values_of(results, reference, "accuracy_end")
    for flow in results["comparison"]["flows"]:
        steps = values_of(results, flow, "step_seconds")
        if not steps:
            continue
        accuracy = values_of(results, flow, "accuracy_end")
        difference = None if flow == reference else paired_interval(accuracy, at_reference)
        rows.append(
            (
                flow,
                str(len(steps)),
                _mean_of_seeds(accuracy, THREE),
                _plus_minus(difference, SIGNED),
                *_mismatch(results, flow, None),
                _mean_of_seeds(values_of(results, flow, "generate_seconds"), THREE),
                _mean_of_seeds(values_of(results, flow, "train_seconds"), THREE),
                _mean_of_seeds(steps, THREE),
                _mean_of_seeds(values_of(results, flow, "refit_bytes"), _megabytes),
            )
        )
        if flow != reference:
            sentences.append(_sentence(f"{flow}: accuracy less that of {reference}", difference))
    return Section(
        title="Flows",
        headers=(
            "flow", "seeds", "accuracy", f"less {reference}", "token_mult_prob_error", "k3 KL",
            "rollout s", "training s", "step s", "refit MB",
        ),
        rows=rows,
        sentences=[
            "Accuracy of the last validation, whose answers are those of the flow's own engine in its own precision. "
            "All columns: mean of the seeds ± 95 % interval (Student's t); differences are of runs of the same seed. "
            "Each interval holds by itself: one in twenty misses.",
            "Of a run: mismatch, the mean over its steps. Seconds, the median, with FP8 emulated on a CPU: rollout, "
            "training (log-probs and optimizer step), and the whole step, which also holds the refit and the "
            "calibration of an FP8 KV cache. Refit, the mean bytes on the wire to one engine.",
            *sentences,
        ],
    )  # fmt: skip


def _stability(results: Mapping[str, Any]) -> Section:
    """Return the spikes of each flow; without a run of enough steps it has no row."""
    reference = results["comparison"]["reference"]
    names = [f"{name}_spikes" for name in spikes.METRICS]
    rows: list[tuple[str, ...]] = []
    sentences = []
    for flow in results["comparison"]["flows"]:
        counts = [values_of(results, flow, name) for name in names]
        if not any(counts):
            continue
        longest = values_of(results, flow, "longest_spike")
        means = [_mean_of_seeds(values, ONE) for values in counts]
        rows.append((flow, str(len(longest)), *means, f"{max(longest.values()):.0f}"))
        if flow != reference:
            total, at_reference = (_sum_by_seed(results, name, names) for name in (flow, reference))
            sentences.append(
                _sentence(f"{flow}: spikes less those of {reference}", paired_interval(total, at_reference))
            )
    return Section(
        title="Stability",
        headers=("flow", "seeds", "loss spikes", "grad_norm spikes", "longest, steps"),
        rows=rows,
        sentences=[
            f"Spikes of `train/loss` and `train/grad_norm`, mean of the seeds ± 95 % interval; longest, that of any "
            f"seed. {spikes.DEFINITION}",
            *sentences,
        ],
    )


def _sum_by_seed(results: Mapping[str, Any], flow: str, names: Sequence[str]) -> dict[int, float]:
    """Return seed -> sum of these numbers, for the runs of a flow that have them all."""
    columns = [values_of(results, flow, name) for name in names]
    seeds = set.intersection(*(set(column) for column in columns))
    return {seed: sum(column[seed] for column in columns) for seed in sorted(seeds)}


def _lengths(results: Mapping[str, Any]) -> Section:
    lengths = results["comparison"]["lengths"]
    first = next(iter(lengths["terms"]))
    rows: list[tuple[str, ...]] = []
    sentences = []
    for flow in lengths["flows"]:
        at_first = values_of(results, flow, "token_mult_prob_error", first)
        for length in lengths["terms"]:
            errors = values_of(results, flow, "token_mult_prob_error", length)
            if not errors:
                continue
            difference = None if length == first else paired_interval(errors, at_first)
            rows.append(
                (
                    flow,
                    length,
                    str(len(errors)),
                    _mean_of_seeds(values_of(results, flow, "tokens_per_answer", length), ONE),
                    _mean_of_seeds(values_of(results, flow, "reward", length), TWO),
                    *_mismatch(results, flow, length),
                    _plus_minus(difference, SIGNED_POWER),
                )
            )
            if length != first:
                sentences.append(
                    _sentence(f"{flow}: token_mult_prob_error of {length} less that of {first} answers", difference)
                )
    return Section(
        title="Length of the answers",
        headers=(
            "flow", "answers", "seeds", "tokens", "reward", "token_mult_prob_error", "k3 KL", f"error less {first}",
        ),
        rows=rows,
        sentences=[
            "One warm model for all lengths. Longer answers are also another task: how sure the model is of a token "
            "differs, and both numbers are means over tokens.",
            *sentences,
        ],
    )  # fmt: skip


def _positions(results: Mapping[str, Any]) -> Section:
    """Return k3 by position in the longest answers, so that every column has the same task."""
    lengths = results["comparison"]["lengths"]
    longest = max(lengths["terms"], key=lambda name: lengths["terms"][name])
    runs = [run for run in results["runs"] if run["length"] == longest]
    buckets = sort_by_number({b for run in runs for b in run["k3_by_position"]})
    rows: list[tuple[str, ...]] = []
    for flow in lengths["flows"]:
        by_bucket = [values_of(results, flow, b, longest, "k3_by_position") for b in buckets]
        if any(by_bucket):
            rows.append((flow, *(_mean_of_seeds(values, POWER) for values in by_bucket)))
    return Section(
        title=f"k3 KL by position in {longest} answers",
        headers=("flow", *(b.replace("_", " to ") for b in buckets)),
        rows=rows,
        sentences=["Tokens counted from 0; mean of the seeds ± 95 % interval."],
    )


def _mismatch(results: Mapping[str, Any], flow: str, length: str | None) -> tuple[str, str]:
    error = values_of(results, flow, "token_mult_prob_error", length)
    return _mean_of_seeds(error, SIX), _mean_of_seeds(values_of(results, flow, "k3_kl", length), POWER)


def _megabytes(value: float) -> str:
    return f"{value / 1e6:.3f}"


def _mean_of_seeds(values: Mapping[int, float], form: Format) -> str:
    return _plus_minus(interval(list(values.values())), form)


def _plus_minus(interval: Interval | None, form: Format) -> str:
    if interval is None:
        return NOTHING
    return form(interval.mean) + ("" if interval.half is None else f" ± {form(interval.half).lstrip('+')}")


def _sentence(what: str, difference: Interval | None) -> str:
    if difference is None or difference.half is None:
        return f"{what}: too few seeds for an interval."
    bounds = f"{difference.low:+.3g} to {difference.high:+.3g}, {difference.n} seeds"
    if difference.contains_zero:
        return f"{what}: the interval ({bounds}) contains 0, so no difference is shown."
    side = "above" if difference.mean > 0 else "below"
    return f"{what}: the interval ({bounds}) lies {side} 0."
