"""The top of the page: the main facts of each run as sentences, a table of figures, and what differs between runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from nemo_fp8rl.commands.report.charts.scale import choose_unit, format_number
from nemo_fp8rl.commands.report.run_data import Run
from nemo_fp8rl.common.format_numbers import format_exactly, format_share
from nemo_fp8rl.run.learning_signal import count_without_signal, explain_no_signal

EXACT, ERROR = "train/exact_logprob_fraction", "train/token_mult_prob_error"
ACCURACY, HELD_OUT = "validation/accuracy", "validation/loss"


@dataclass(frozen=True)
class Headline:
    """The sentences about one run; warnings: those about what went wrong."""

    facts: list[str]
    warnings: list[str]


@dataclass(frozen=True)
class Figure:
    """A row of the table: a metric, what of it is shown, and its value in each run; "-" where there is none."""

    metric: str
    about: str
    values: list[str]


def make_headline(run: Run) -> Headline:
    facts = [f"{run.state[0].upper()}{run.state[1:]}."]
    warnings = [f"It ended with: {run.end_reason}"] if run.end_reason else []
    outcome = next((name for name in (ACCURACY, HELD_OUT) if run.points_of(name)), "train/reward")
    if points := run.points_of(outcome):
        facts.append(f"{outcome}: {_format_first_and_last(points)}.")
    facts += _describe_agreement(run)
    steps = [row for row in run.metrics if row["step"] > 0]
    reason = explain_no_signal(steps, run.config)
    if reason:
        warnings.append(f"{reason[0].upper()}{reason[1:]}.")
    elif count := count_without_signal(steps):
        warnings.append(f"In {count} of {len(steps)} steps all groups had equal rewards, which give no gradient.")
    if skipped := round(sum(value for _, value in run.points_of("train/optimizer_steps_skipped"))):
        warnings.append(f"{skipped} optimizer step{'s were' if skipped > 1 else ' was'} skipped.")
    if restarts := round(sum(value for _, value in run.points_of("generation/engine_restarts"))):
        warnings.append(f"Engines were started again {restarts} times.")
    return Headline(facts, warnings)


def make_figures(runs: Sequence[Run]) -> list[Figure]:
    """Return the table's rows; a row without any value is left out."""
    rows = [
        Figure("flow", "of trainer and engine", [str(run.config.get("nemo_fp8rl.flow", "-")) for run in runs]),
        Figure(ACCURACY, "first and last", [_format_first_and_last(run.points_of(ACCURACY)) for run in runs]),
        Figure(HELD_OUT, "first and last", [_format_first_and_last(run.points_of(HELD_OUT)) for run in runs]),
        _figure(runs, ("train/reward",), "mean of the last tenth of the steps", last=0.1),
        _figure(runs, (ERROR,), "mean; 1 is agreement", digits=7),
        _figure(runs, ("train/gen_kl_error",), "mean, nats; 0 is agreement", digits=3),
        Figure(EXACT, "mean share of tokens that are equal to the bit", [_format_share(run, EXACT) for run in runs]),
        _figure(runs, ("refit/bytes",), "mean of a refit", unit="bytes"),
        _figure(runs, ("timing/refit", "refit/timing/refit"), "mean, seconds", digits=3),
        _figure(runs, ("timing/total_step_time", "timing/train/total_step_time"), "mean, seconds", digits=3),
        _figure(runs, ("performance/generation_tokens_per_sec",), "mean, tokens per second", digits=5),
        _figure(runs, ("performance/train_tokens_per_sec",), "mean, tokens per second", digits=5),
    ]
    return [row for row in rows if {*row.values} != {"-"}]


def find_differences(runs: Sequence[Run], tree: Callable[[Run], dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return (key, values of all runs) for the keys whose values differ."""
    keys = sorted({key for run in runs for key in tree(run)})
    table = [(key, [_format_value(tree(run), key) for run in runs]) for key in keys]
    return [(key, values) for key, values in table if len(set(values)) > 1]


def _describe_agreement(run: Run) -> list[str]:
    errors, shares = _values(run, ERROR), _values(run, EXACT)
    if shares and min(shares) == 1 and all(error == 1 for error in errors):
        return [
            f"Trainer and engine gave every sampled token the same log-prob, to the bit, in all {len(shares)} steps: "
            f"{ERROR} is exactly 1, {EXACT} 100 %."
        ]
    facts = []
    if errors:
        highest = f", {format_exactly(max(errors), 5)} at most" if max(errors) > fmean(errors) else ""
        facts.append(f"{ERROR}: {format_exactly(fmean(errors), 5)} on average{highest} (1 is agreement).")
    if shares:
        facts.append(f"{_format_share(run, EXACT)} of the tokens have the same log-prob, to the bit, on both sides.")
    return facts


def _figure(
    runs: Sequence[Run], metrics: Sequence[str], about: str, *, last: float = 1.0, unit: str = "", digits: int = 4
) -> Figure:
    """Return the row of the mean of the first metric that a run has, over the last steps.

    last:  their share of all steps without step 0
    """
    names = [next((metric for metric in metrics if _values(run, metric)), metrics[0]) for run in runs]
    means = [_mean(run, name, last) for run, name in zip(runs, names, strict=True)]
    divisor, unit = choose_unit(unit, max((mean for mean in means if mean is not None), default=0.0))
    values = ["-" if mean is None else f"{format_exactly(mean / divisor, digits)} {unit}".strip() for mean in means]
    return Figure(" or ".join(dict.fromkeys(names)), about, values)


def _values(run: Run, metric: str) -> list[float]:
    return [value for step, value in run.points_of(metric) if step > 0]


def _mean(run: Run, metric: str, last: float) -> float | None:
    values = _values(run, metric)
    values = values[-max(1, round(len(values) * last)) :]
    return fmean(values) if values else None


def _format_share(run: Run, metric: str) -> str:
    values = _values(run, metric)
    if not values:
        return "-"
    return format_share(fmean(values))


def _format_first_and_last(points: Sequence[tuple[float, float]]) -> str:
    if not points:
        return "-"
    (first, start), (last, end) = points[0], points[-1]
    if first == last:
        return f"{start:.3f} at step {format_number(first)}"
    return f"{start:.3f} at step {format_number(first)}, {end:.3f} at step {format_number(last)}"


def _format_value(tree: dict[str, Any], key: str) -> str:
    if key not in tree:
        return "-"
    value = tree[key]
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
