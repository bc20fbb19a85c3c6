"""The contents of the page: its sections with their charts, the summary, and the differences between the runs."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from nemo_fp8rl.algorithms.metric_names import sort_by_number
from nemo_fp8rl.commands.report.charts import Chart, Line, make_heat_map, make_line_chart, make_stack_chart
from nemo_fp8rl.commands.report.importance_chart import make_weight_histogram
from nemo_fp8rl.commands.report.run_data import Run
from nemo_fp8rl.commands.report.scale import format_number

PHASES = ("generate", "reward", "logprob", "train", "kv_calibration", "refit")
"""Phases of a step in their order; the rest of timing/total_step_time is `other`."""


@dataclass(frozen=True)
class Section:
    """A section of the page; missing_data: sentences about charts for which some run has no data."""

    title: str
    intro: str
    charts: list[Chart]
    missing_data: list[str]


@dataclass(frozen=True)
class Plot:
    """A chart of one metric over the steps, with a line per run; for the options see `make_line_chart`."""

    title: str
    metric: str
    about: str = ""
    log: bool = False
    offset: float = 0.0
    from_zero: bool = False


OUTCOME = (
    Plot("Reward", "train/reward", "mean of the step's answers"),
    Plot("Validation accuracy", "validation/accuracy", "held-out prompts"),
    Plot("Loss", "train/loss"),
    Plot("Gradient norm", "train/grad_norm", "before clipping"),
    Plot("Entropy", "train/approx_entropy"),
    Plot("Tokens an answer", "train/mean_gen_tokens_per_sample"),
)
MISMATCH = (
    Plot("token_mult_prob_error", "train/token_mult_prob_error", "1 is agreement; distance to 1, logarithmic", True, 1),
    Plot("k3 KL (engine against trainer)", "train/gen_kl_error", "logarithmic", True),
    Plot("Tokens bit-equal in trainer and engine", "train/exact_logprob_fraction", "share"),
    Plot("Largest difference of a token's log-prob", "train/max_logprob_error", "logarithmic", True),
)
WEIGHTS = (
    Plot("Effective sample size, tokens", "train/ess", "share of tokens that count, by importance weights"),
    Plot("Effective sample size, answers", "train/ess_seq", "share of answers that count"),
    Plot("Rejected tokens", "train/correction/rejected_token_ratio", "share, by the correction", from_zero=True),
)
REFIT = (
    Plot("Refit, bytes", "refit/bytes", "on the wire to one engine", from_zero=True),
    Plot("Refit, seconds", "timing/refit", "logarithmic", True),
)
TIME = (
    Plot("Seconds a step", "timing/total_step_time", "logarithmic", True),
    Plot("Generated tokens a second", "performance/generation_tokens_per_sec", "all engines", from_zero=True),
)
ERROR = (Plot("Quantization error, FP8 weights", "weight_error/fp8", "relative; at every validation"),)


def make_sections(runs: Sequence[Run]) -> list[Section]:
    return [
        _make_section("Reward and accuracy", "", runs, OUTCOME),
        _make_section(
            "Mismatch of trainer and engine",
            "How much trainer and engine disagree on the tokens that the engine sampled.",
            runs,
            MISMATCH,
            make_position_charts,
            make_position_maps,
        ),
        _make_section("Importance weights", "", runs, WEIGHTS, make_histogram),
        _make_section("Refit", "", runs, REFIT, make_refit_charts),
        _make_section("Time", "", runs, TIME, make_phase_charts),
        _make_section(
            "Quantization error of the weights",
            "sqrt(sum (w' - w)^2 / sum w^2), where w' is the value of the engine's FP8 bytes.",
            runs,
            ERROR,
            make_layer_maps,
        ),
    ]


def make_summary(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Return a row of the table for each run; "-" means that the run has no such value."""
    return [
        {
            "run": run.name,
            "state": run.state,
            "flow": str(run.config.get("nemo_fp8rl.flow", "-")),
            "validation accuracy": _format_first_and_last(run.points_of("validation/accuracy")),
            "reward, last tenth": _format_mean(run, "train/reward", last=0.1),
            "token_mult_prob_error": _format_mean(run, "train/token_mult_prob_error", digits=7),
            "k3 KL": _format_mean(run, "train/gen_kl_error", digits=3),
            "bit-equal tokens": _format_mean(run, "train/exact_logprob_fraction", digits=4),
            "refit MB": _format_mean(run, "refit/bytes", unit=1e6),
            "s a step": _format_mean(run, "timing/total_step_time"),
        }
        for run in runs
    ]


def find_differences(runs: Sequence[Run], tree: Callable[[Run], dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return (key, values of all runs) for the keys whose values differ."""
    keys = sorted({key for run in runs for key in tree(run)})
    table = [(key, [_format_value(tree(run), key) for run in runs]) for key in keys]
    return [(key, values) for key, values in table if len(set(values)) > 1]


def make_position_charts(runs: Sequence[Run]) -> tuple[list[Chart], list[str]]:
    charts, missing = [], []
    for title, metric in (
        ("k3 KL by position", "gen_kl_error"),
        ("Mean |log-ratio| by position", "mean_logprob_error"),
    ):
        buckets = _find_buckets(runs, metric)
        lines = [
            Line(
                run.name,
                i,
                [(j, fmean(values)) for j, name in enumerate(buckets) if (values := _metric_values(run, name))],
            )
            for i, run in enumerate(runs)
        ]
        lines = [line for line in lines if line.points]
        if lines:
            about = "of a token in its answer, 0 the first; mean over steps, logarithmic"
            labels = [name.rpartition("position_")[2].replace("_on", "+").replace("_", "-") for name in buckets]
            charts.append(make_line_chart(title, about, lines, log=True, labels=labels, means=False))
        missing += _describe_missing(title, f"train/{metric}/position_0 and on", runs, [line.run for line in lines])
    return charts, missing


def make_position_maps(runs: Sequence[Run]) -> tuple[list[Chart], list[str]]:
    title, charts = "k3 KL by position and step", []
    for i, run in enumerate(runs):
        buckets = _find_buckets([run], "gen_kl_error")
        rows = [row for row in run.metrics if any(name in row for name in buckets)]
        if len(buckets) > 1:
            cells = {name.rpartition("position_")[2].replace("_", "-"): [r.get(name) for r in rows] for name in buckets}
            steps = [row["step"] for row in rows]
            about = "upward: later in the answer; logarithmic"
            charts.append(make_heat_map(_add_run_name(run, runs, title), about, i, cells, steps, log=True))
    return charts, _describe_missing(title, "train/gen_kl_error/position_1 and on", runs, _run_numbers(charts))


def make_histogram(runs: Sequence[Run]) -> tuple[list[Chart], list[str]]:
    chart = make_weight_histogram(runs)
    owners = [i for i, run in enumerate(runs) if any(run.log_weights.values())]
    return [chart] if chart else [], _describe_missing("Importance weights", "histograms.jsonl", runs, owners)


def make_refit_charts(runs: Sequence[Run]) -> tuple[list[Chart], list[str]]:
    title, charts = "Refit by stage", []
    about = "seconds, logarithmic; load overlaps with what the trainer does, and verify is part of it"
    for i, run in enumerate(runs):
        stages = {name: run.points_of(f"timing/refit_{name}") for name in run.find_metrics("timing/refit_")}
        later = {name: [point for point in points if point[0] > 0] for name, points in stages.items()}
        lines = [Line(name, i, points) for name, points in later.items() if points]
        if lines:
            charts.append(make_line_chart(_add_run_name(run, runs, title), about, lines, log=True, run=i))
    return charts, _describe_missing(title, "timing/refit_*", runs, _run_numbers(charts))


def make_phase_charts(runs: Sequence[Run]) -> tuple[list[Chart], list[str]]:
    title, charts = "Time by phase", []
    for i, run in enumerate(runs):
        rows = [row for row in run.metrics if "timing/total_step_time" in row]
        if rows:
            names = [name for name in PHASES if any(f"timing/{name}" in row for row in rows)]
            layers = {name: [row.get(f"timing/{name}", 0.0) for row in rows] for name in names}
            known = [sum(column[j] for column in layers.values()) for j in range(len(rows))]
            layers["other"] = [max(row["timing/total_step_time"] - k, 0.0) for row, k in zip(rows, known, strict=True)]
            steps = [row["step"] for row in rows]
            charts.append(make_stack_chart(_add_run_name(run, runs, title), "seconds a step", i, steps, layers, "s"))
    return charts, _describe_missing(title, "timing/total_step_time", runs, _run_numbers(charts))


def make_layer_maps(runs: Sequence[Run]) -> tuple[list[Chart], list[str]]:
    title, charts = "Quantization error by layer", []
    for i, run in enumerate(runs):
        layers = sort_by_number(run.find_metrics("weight_error/layer_"))
        rows = [row for row in run.metrics if any(f"weight_error/layer_{layer}" in row for layer in layers)]
        if rows:
            cells = {f"layer {layer}": [row.get(f"weight_error/layer_{layer}") for row in rows] for layer in layers}
            steps = [row["step"] for row in rows]
            charts.append(make_heat_map(_add_run_name(run, runs, title), "all weights of a layer", i, cells, steps))
    return charts, _describe_missing(title, "weight_error/layer_0 and on", runs, _run_numbers(charts))


def _make_section(
    title: str,
    intro: str,
    runs: Sequence[Run],
    plots: Sequence[Plot],
    *chart_makers: Callable[[Sequence[Run]], tuple[list[Chart], list[str]]],
) -> Section:
    charts, missing = [], []
    for plot in plots:
        lines = [Line(run.name, i, points) for i, run in enumerate(runs) if (points := run.points_of(plot.metric))]
        missing += _describe_missing(plot.title, plot.metric, runs, [line.run for line in lines])
        if lines:
            charts.append(
                make_line_chart(
                    plot.title, plot.about, lines, log=plot.log, offset=plot.offset, from_zero=plot.from_zero
                )
            )
    for make_charts in chart_makers:
        more_charts, sentences = make_charts(runs)
        charts += more_charts
        missing += sentences
    return Section(title, intro, charts, missing)


def _describe_missing(title: str, source: str, runs: Sequence[Run], owners: Collection[int | None]) -> list[str]:
    """Return a sentence if a run has no data for the chart; owners: numbers of the runs that have data."""
    names = [run.name for i, run in enumerate(runs) if i not in owners]
    if not names:
        return []
    return [f"{title}: not in {', '.join(names)}." if owners else f"{title}: no run has {source}."]


def _run_numbers(charts: Sequence[Chart]) -> list[int | None]:
    return [chart.run for chart in charts]


def _find_buckets(runs: Sequence[Run], metric: str) -> list[str]:
    """Return the full names of the position buckets of the metric, sorted by their first position."""
    prefix = f"train/{metric}/position_"
    ends = {end for run in runs for end in run.find_metrics(prefix)}
    return [prefix + end for end in sort_by_number(ends)]


def _metric_values(run: Run, metric: str) -> list[float]:
    return [value for _, value in run.points_of(metric)]


def _format_mean(run: Run, metric: str, last: float = 1.0, unit: float = 1.0, digits: int = 4) -> str:
    """Return the mean of the metric over the last steps, in `unit`; last: their share of all steps without step 0."""
    values = [value for step, value in run.points_of(metric) if step > 0]
    values = values[-max(1, round(len(values) * last)) :]
    return f"{fmean(values) / unit:.{digits}g}" if values else "-"


def _format_first_and_last(points: Sequence[tuple[float, float]]) -> str:
    if not points:
        return "-"
    (first, start), (last, end) = points[0], points[-1]
    if first == last:
        return f"{start:.3f} at step {format_number(first)}"
    return f"{start:.3f} at step {format_number(first)}, {end:.3f} at step {format_number(last)}"


def _add_run_name(run: Run, runs: Sequence[Run], title: str) -> str:
    return f"{title}, {run.name}" if len(runs) > 1 else title


def _format_value(tree: dict[str, Any], key: str) -> str:
    if key not in tree:
        return "-"
    value = tree[key]
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
