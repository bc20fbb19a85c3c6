"""What the page shows of the runs, section by section."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from nemo_fp8rl.algorithms.metric_names import sort_by_number
from nemo_fp8rl.commands.report.charts import Chart, Line, heat_map, line_chart, stack_chart
from nemo_fp8rl.commands.report.importance_chart import weight_histogram
from nemo_fp8rl.commands.report.run_data import Run
from nemo_fp8rl.commands.report.scale import number

PHASES = ("generate", "reward", "logprob", "train", "kv_calibration", "refit")
"""Seconds of a step, in their order; what is left of timing/total_step_time is `other`."""


@dataclass(frozen=True)
class Section:
    """missing: sentences about charts that no run, or not every run, has data for."""

    title: str
    intro: str
    charts: list[Chart]
    missing: list[str]


@dataclass(frozen=True)
class Plot:
    """A metric over steps, all runs in one chart."""

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


def sections(runs: Sequence[Run]) -> list[Section]:
    return [
        _section("Reward and accuracy", "", runs, OUTCOME),
        _section(
            "Mismatch of trainer and engine",
            "How far both sides disagree on the tokens that the engine sampled.",
            runs,
            MISMATCH,
            by_position,
            position_map,
        ),
        _section("Importance weights", "", runs, WEIGHTS, histogram),
        _section("Refit", "", runs, REFIT, refit_stages),
        _section("Time", "", runs, TIME, phases),
        _section(
            "Quantization error of the weights",
            "sqrt(sum (w' - w)^2 / sum w^2), w' being what the engine's FP8 bytes stand for.",
            runs,
            ERROR,
            layer_map,
        ),
    ]


def summary(runs: Sequence[Run]) -> list[dict[str, str]]:
    """A row for each run; - where the run has no such thing."""
    return [
        {
            "run": run.name,
            "state": run.state,
            "flow": str(run.config.get("nemo_fp8rl.flow", "-")),
            "validation accuracy": _ends(run.series("validation/accuracy")),
            "reward, last tenth": _mean(run, "train/reward", last=0.1),
            "token_mult_prob_error": _mean(run, "train/token_mult_prob_error", digits=7),
            "k3 KL": _mean(run, "train/gen_kl_error", digits=3),
            "bit-equal tokens": _mean(run, "train/exact_logprob_fraction", digits=4),
            "refit MB": _mean(run, "refit/bytes", unit=1e6),
            "s a step": _mean(run, "timing/total_step_time"),
        }
        for run in runs
    ]


def differing(runs: Sequence[Run], tree: Callable[[Run], dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """(key, each run's value) of the keys that are not alike in all runs."""
    keys = sorted({key for run in runs for key in tree(run)})
    table = [(key, [_shown(tree(run), key) for run in runs]) for key in keys]
    return [(key, values) for key, values in table if len(set(values)) > 1]


def by_position(runs: Sequence[Run]) -> tuple[list[Chart], list[str]]:
    charts, missing = [], []
    for title, metric in (
        ("k3 KL by position", "gen_kl_error"),
        ("Mean |log-ratio| by position", "mean_logprob_error"),
    ):
        buckets = _positions(runs, metric)
        lines = [
            Line(run.name, i, [(j, fmean(values)) for j, name in enumerate(buckets) if (values := _values(run, name))])
            for i, run in enumerate(runs)
        ]
        lines = [line for line in lines if line.points]
        if lines:
            about = "of a token in its answer, 0 the first; mean over steps, logarithmic"
            labels = [name.rpartition("position_")[2].replace("_on", "+").replace("_", "-") for name in buckets]
            charts.append(line_chart(title, about, lines, log=True, labels=labels, means=False))
        missing += _lacking(title, f"train/{metric}/position_0 and on", runs, [line.run for line in lines])
    return charts, missing


def position_map(runs: Sequence[Run]) -> tuple[list[Chart], list[str]]:
    title, charts = "k3 KL by position and step", []
    for i, run in enumerate(runs):
        buckets = _positions([run], "gen_kl_error")
        rows = [row for row in run.metrics if any(name in row for name in buckets)]
        if len(buckets) > 1:
            cells = {name.rpartition("position_")[2].replace("_", "-"): [r.get(name) for r in rows] for name in buckets}
            steps = [row["step"] for row in rows]
            about = "upward: later in the answer; logarithmic"
            charts.append(heat_map(_titled(run, runs, title), about, i, cells, steps, log=True))
    return charts, _lacking(title, "train/gen_kl_error/position_1 and on", runs, _runs_of(charts))


def histogram(runs: Sequence[Run]) -> tuple[list[Chart], list[str]]:
    chart = weight_histogram(runs)
    there = [i for i, run in enumerate(runs) if any(run.log_weights.values())]
    return [chart] if chart else [], _lacking("Importance weights", "histograms.jsonl", runs, there)


def refit_stages(runs: Sequence[Run]) -> tuple[list[Chart], list[str]]:
    title, charts = "Refit by stage", []
    about = "seconds, logarithmic; load overlaps with what the trainer does, and verify is part of it"
    for i, run in enumerate(runs):
        stages = {name: run.series(f"timing/refit_{name}") for name in run.names("timing/refit_")}
        later = {name: [point for point in points if point[0] > 0] for name, points in stages.items()}
        lines = [Line(name, i, points) for name, points in later.items() if points]
        if lines:
            charts.append(line_chart(_titled(run, runs, title), about, lines, log=True, run=i))
    return charts, _lacking(title, "timing/refit_*", runs, _runs_of(charts))


def phases(runs: Sequence[Run]) -> tuple[list[Chart], list[str]]:
    title, charts = "Time by phase", []
    for i, run in enumerate(runs):
        rows = [row for row in run.metrics if "timing/total_step_time" in row]
        if rows:
            there = [name for name in PHASES if any(f"timing/{name}" in row for row in rows)]
            layers = {name: [row.get(f"timing/{name}", 0.0) for row in rows] for name in there}
            known = [sum(column[j] for column in layers.values()) for j in range(len(rows))]
            layers["other"] = [max(row["timing/total_step_time"] - k, 0.0) for row, k in zip(rows, known, strict=True)]
            steps = [row["step"] for row in rows]
            charts.append(stack_chart(_titled(run, runs, title), "seconds a step", i, steps, layers, "s"))
    return charts, _lacking(title, "timing/total_step_time", runs, _runs_of(charts))


def layer_map(runs: Sequence[Run]) -> tuple[list[Chart], list[str]]:
    title, charts = "Quantization error by layer", []
    for i, run in enumerate(runs):
        layers = sort_by_number(run.names("weight_error/layer_"))
        rows = [row for row in run.metrics if any(f"weight_error/layer_{layer}" in row for layer in layers)]
        if rows:
            cells = {f"layer {layer}": [row.get(f"weight_error/layer_{layer}") for row in rows] for layer in layers}
            steps = [row["step"] for row in rows]
            charts.append(heat_map(_titled(run, runs, title), "all weights of a layer", i, cells, steps))
    return charts, _lacking(title, "weight_error/layer_0 and on", runs, _runs_of(charts))


def _section(
    title: str,
    intro: str,
    runs: Sequence[Run],
    plots: Sequence[Plot],
    *others: Callable[[Sequence[Run]], tuple[list[Chart], list[str]]],
) -> Section:
    charts, missing = [], []
    for plot in plots:
        lines = [Line(run.name, i, points) for i, run in enumerate(runs) if (points := run.series(plot.metric))]
        missing += _lacking(plot.title, plot.metric, runs, [line.run for line in lines])
        if lines:
            charts.append(
                line_chart(plot.title, plot.about, lines, log=plot.log, offset=plot.offset, from_zero=plot.from_zero)
            )
    for other in others:
        more, lacks = other(runs)
        charts += more
        missing += lacks
    return Section(title, intro, charts, missing)


def _lacking(title: str, source: str, runs: Sequence[Run], there: Collection[int | None]) -> list[str]:
    """A sentence where a run lacks what its chart is made of. there: numbers of the runs that have it."""
    lacking = [run.name for i, run in enumerate(runs) if i not in there]
    if not lacking:
        return []
    return [f"{title}: not in {', '.join(lacking)}." if there else f"{title}: no run has {source}."]


def _runs_of(charts: Sequence[Chart]) -> list[int | None]:
    return [chart.run for chart in charts]


def _positions(runs: Sequence[Run], metric: str) -> list[str]:
    """Full names of the metric's buckets, by where they begin."""
    prefix = f"train/{metric}/position_"
    ends = {end for run in runs for end in run.names(prefix)}
    return [prefix + end for end in sort_by_number(ends)]


def _values(run: Run, metric: str) -> list[float]:
    return [value for _, value in run.series(metric)]


def _mean(run: Run, metric: str, last: float = 1.0, unit: float = 1.0, digits: int = 4) -> str:
    """The metric's mean over the `last` part of the steps, over `unit`; step 0 has no part in it."""
    values = [value for step, value in run.series(metric) if step > 0]
    values = values[-max(1, round(len(values) * last)) :]
    return f"{fmean(values) / unit:.{digits}g}" if values else "-"


def _ends(points: Sequence[tuple[float, float]]) -> str:
    if not points:
        return "-"
    (first, start), (last, end) = points[0], points[-1]
    if first == last:
        return f"{start:.3f} at step {number(first)}"
    return f"{start:.3f} at step {number(first)}, {end:.3f} at step {number(last)}"


def _titled(run: Run, runs: Sequence[Run], title: str) -> str:
    return f"{title}, {run.name}" if len(runs) > 1 else title


def _shown(tree: dict[str, Any], key: str) -> str:
    if key not in tree:
        return "-"
    value = tree[key]
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
