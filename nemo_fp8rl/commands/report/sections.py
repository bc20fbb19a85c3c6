"""The sections of the page with their charts; what never changes, or is not there, is a sentence instead of a chart."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TypeAlias

from nemo_fp8rl.algorithms.metric_names import sort_by_number
from nemo_fp8rl.commands.report.charts.areas import (
    fit_shades,
    fit_stacks,
    make_heat_map,
    make_stack_chart,
)
from nemo_fp8rl.commands.report.charts.drawing import Chart
from nemo_fp8rl.commands.report.charts.importance_weights import NAME as WEIGHTS_NAME
from nemo_fp8rl.commands.report.charts.importance_weights import make_weight_histogram
from nemo_fp8rl.commands.report.charts.lines import Line, Style, make_line_chart
from nemo_fp8rl.commands.report.run_data import Run
from nemo_fp8rl.commands.report.stability import describe_spikes
from nemo_fp8rl.common.format_numbers import format_exactly

PHASES = ("generate", "reward", "logprob", "train", "kv_calibration", "refit")
"""Phases of a step in their order; the rest of timing/total_step_time is `other`."""
NEMO_RL_PHASES = (
    *("prepare_for_generation/total", "generation", "exposed_generation", "reward_calculation"),
    *("logprob_inference_prep", "policy_and_reference_logprobs", "training_prep", "policy_training"),
    *("recompute_kv_scales", "weight_sync"),
)
"""The same of NeMo RL's loops, under timing/train/."""


PLAIN = Style()
SHARE = Style("share", possible=(0.0, 1.0))
SECONDS = Style("seconds", log=True)


@dataclass(frozen=True)
class Section:
    """A section of the page.

    anchor:        its id in the page
    facts:         sentences that no chart shows
    constants:     sentences about metrics that have one value
    missing_data:  sentences about metrics that some run does not have
    """

    anchor: str
    title: str
    intro: str
    facts: list[str]
    charts: list[Chart]
    constants: list[str]
    missing_data: list[str]


@dataclass(frozen=True)
class Plot:
    """A chart of one metric over the steps, with a line per run; alias: its name in NeMo RL's logs."""

    metric: str
    about: str
    style: Style = PLAIN
    alias: str = ""


@dataclass
class Contents:
    """The content of a section.

    missing:  numbers of runs -> the charts that these runs lack
    """

    facts: list[str] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    constants: list[str] = field(default_factory=list)
    missing: dict[tuple[int, ...], list[str]] = field(default_factory=dict)

    def note_missing(self, name: str, runs: Sequence[Run], owners: Iterable[int | None]) -> None:
        """Remember which runs lack a chart. A run without a step lacks all of them, which the page says once; one of
        `sft` has neither rewards nor engines.
        """
        lacking = tuple(
            i for i, run in enumerate(runs) if run.has_steps and not run.is_supervised and i not in {*owners}
        )
        if lacking:
            self.missing.setdefault(lacking, []).append(name)


Maker: TypeAlias = Callable[[Sequence[Run], Contents], None]

OUTCOME = (
    Plot("train/reward", "mean of the step's answers", Style(possible=(0.0, 1.0))),
    Plot("validation/accuracy", "held-out prompts", SHARE),
    Plot("train/loss", "around 0: no measure of progress"),
    Plot("train/grad_norm", "before clipping", Style(possible=(0.0, None))),
    Plot("train/approx_entropy", "near 0 the policy has collapsed", Style("nats per token", possible=(0.0, None))),
    Plot("train/mean_gen_tokens_per_sample", "length of an answer", Style("tokens", possible=(0.0, None))),
    Plot("train/frac_reward_zero_std", "share of groups whose rewards are all equal: no gradient from them", SHARE),
    Plot("train/truncation_rate", "share of answers that reached the maximum length", SHARE),
)
SHARPNESS = (
    Plot("train/sharpness", "of the logits of a token, mean of all answer tokens", Style(log=True)),
    Plot("train/sharpness_last_token", "the same of the last token of each answer", Style(log=True)),
)
SUPERVISED = (
    Plot("validation/loss", "held-out tokens", Style("nats per token")),
    Plot("train/loss", "of the step's tokens", Style("nats per token")),
    Plot("train/grad_norm", "before clipping", Style(possible=(0.0, None))),
    Plot("train/lr", "learning rate", Style(possible=(0.0, None))),
)
MISMATCH = (
    Plot("train/token_mult_prob_error", "1 is agreement", Style(log=True, offset=1.0)),
    Plot("train/gen_kl_error", "KL of engine and trainer by k3; 0 is agreement", Style("nats", log=True)),
    Plot("train/exact_logprob_fraction", "tokens with the same log-prob, to the bit, in trainer and engine", SHARE),
    Plot("train/max_logprob_error", "largest difference of a token's log-prob", Style("nats", log=True)),
)
WEIGHTS = (
    Plot("train/ess", "effective sample size: tokens that count, by their importance weights", SHARE),
    Plot("train/ess_seq", "the same of answers", SHARE),
    Plot(
        "train/correction/rejected_token_ratio",
        "tokens that the correction leaves out",
        Style("share", from_zero=True, possible=(0.0, 1.0)),
    ),
)
REFIT = (
    Plot("refit/bytes", "on the wire to one engine", Style("bytes", from_zero=True, possible=(0.0, None))),
    Plot("timing/refit", "time of a refit", SECONDS, alias="refit/timing/refit"),
)
TIME = (
    Plot("timing/total_step_time", "time of a step", SECONDS, alias="timing/train/total_step_time"),
    Plot(
        "performance/generation_tokens_per_sec",
        "of all engines",
        Style("tokens per second", from_zero=True, possible=(0.0, None)),
    ),
)
ERROR = (
    Plot("weight_error/fp8", "relative; at every validation", Style("share", from_zero=True, possible=(0.0, None))),
)


def make_sections(runs: Sequence[Run]) -> list[Section]:
    """Return the sections that have anything to show."""
    are_supervised = all(run.is_supervised for run in runs)
    plan: list[tuple[str, str, str, Sequence[Plot], Sequence[Maker]]] = [
        ("loss", "Loss", "", SUPERVISED, ()) if are_supervised else ("reward", "Reward and accuracy", "", OUTCOME, ()),
        ("stability", "Stability", "", (), (add_spikes, add_sharpness)),
        (
            "mismatch",
            "Mismatch of trainer and engine",
            "How much trainer and engine disagree on the tokens that the engine sampled.",
            MISMATCH,
            (add_position_charts, add_position_maps),
        ),
        ("weights", "Importance weights", "", WEIGHTS, (add_histogram,)),
        ("refit", "Refit", "", REFIT, (add_refit_charts,)),
        ("time", "Time", "", TIME, (add_phase_charts,)),
        (
            "quantization",
            "Quantization error of the weights",
            "sqrt(sum (w' - w)^2 / sum w^2), where w' is the value of the engine's FP8 bytes.",
            ERROR,
            (add_layer_maps,),
        ),
    ]
    sections = [
        _make_section(anchor, title, intro, runs, plots, makers) for anchor, title, intro, plots, makers in plan
    ]
    return [s for s in sections if s.facts or s.charts or s.constants or s.missing_data]


def points_of(run: Run, metric: str, alias: str = "") -> list[tuple[float, float]]:
    """Return (step, value) of the metric, or of its alias."""
    return run.points_of(metric) or (run.points_of(alias) if alias else [])


def add_plot(runs: Sequence[Run], plot: Plot, contents: Contents) -> None:
    lines = [
        Line(run.name, i, points) for i, run in enumerate(runs) if (points := points_of(run, plot.metric, plot.alias))
    ]
    name = plot.metric
    if lines and not any(runs[line.run].points_of(plot.metric) for line in lines):
        name = plot.alias
    contents.note_missing(name, runs, [line.run for line in lines])
    if lines and all(line.is_flat for line in lines):
        contents.constants.append(f"{name} {describe_values(lines, runs, plot.style.unit)}")
    elif lines:
        contents.charts.append(make_line_chart(name, plot.about, lines, plot.style))


def describe_values(lines: Sequence[Line], runs: Sequence[Run], unit: str = "") -> str:
    """Return the values of flat lines, such as `1` or `0.5 (one), 0.7 (two and three)`."""
    owners: dict[float, list[str]] = {}
    for line in lines:
        owners.setdefault(line.points[0][1], []).append(line.name)
    suffix = f" {unit}" if unit and unit != "share" else ""
    if len(owners) == 1 and (len(lines) == len(runs) or len(lines) > 3):
        return f"{format_exactly(next(iter(owners)))}{suffix}"
    return ", ".join(f"{format_exactly(value)}{suffix} ({join_words(names)})" for value, names in owners.items())


def join_words(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def add_spikes(runs: Sequence[Run], contents: Contents) -> None:
    contents.facts += describe_spikes(runs)


def add_sharpness(runs: Sequence[Run], contents: Contents) -> None:
    """Add the charts if a run measures sharpness, which is off by default."""
    for plot in SHARPNESS:
        if any(run.points_of(plot.metric) for run in runs):
            add_plot(runs, plot, contents)


def add_position_charts(runs: Sequence[Run], contents: Contents) -> None:
    for metric, about in (
        ("gen_kl_error", "k3 KL of a token by its position in the answer, 0 the first; mean over steps"),
        ("mean_logprob_error", "difference of a token's log-probs by its position in the answer; mean over steps"),
    ):
        name = f"train/{metric}/position_*"
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
        contents.note_missing(name, runs, [line.run for line in lines])
        if lines and all(line.is_flat for line in lines):
            contents.constants.append(f"{name} {describe_values(lines, runs)}")
        elif lines:
            labels = [name.rpartition("position_")[2].replace("_on", "+").replace("_", "-") for name in buckets]
            style = Style("nats", log=True)
            chart = make_line_chart(name, about, lines, style, x_title="position", labels=labels, means=False)
            contents.charts.append(chart)


def add_position_maps(runs: Sequence[Run], contents: Contents) -> None:
    name = "train/gen_kl_error/position_*"
    maps = {}
    for i, run in enumerate(runs):
        buckets = _find_buckets([run], "gen_kl_error")
        rows = [row for row in run.metrics if any(name in row for name in buckets)]
        values = [row[name] for row in rows for name in buckets if name in row]
        if len(buckets) > 1 and len(set(values)) > 1:
            cells = {name.rpartition("position_")[2].replace("_", "-"): [r.get(name) for r in rows] for name in buckets}
            maps[i] = (cells, [row["step"] for row in rows], values)
    if maps:
        shades = fit_shades([value for *_, values in maps.values() for value in values], log=True)
        for i, (cells, steps, _) in maps.items():
            about = "k3 KL by position and step; upward: later in the answer"
            contents.charts.append(make_heat_map(_add_run_name(runs[i], runs, name), about, i, cells, steps, shades))


def add_histogram(runs: Sequence[Run], contents: Contents) -> None:
    chart = make_weight_histogram(runs)
    if isinstance(chart, str):
        contents.constants.append(chart)
    elif chart:
        contents.charts.append(chart)
    owners = [i for i, run in enumerate(runs) if any(run.log_weights.values())]
    contents.note_missing(WEIGHTS_NAME, runs, owners)


def add_refit_charts(runs: Sequence[Run], contents: Contents) -> None:
    prefixes = {i: "timing/refit_" for i, run in enumerate(runs) if run.find_metrics("timing/refit_")}
    prefixes |= {i: "refit/timing/refit_" for i, run in enumerate(runs) if run.find_metrics("refit/timing/refit_")}
    contents.note_missing("timing/refit_*", runs, prefixes)
    of_runs = {}
    for i, prefix in prefixes.items():
        stages = {name: runs[i].points_of(prefix + name) for name in runs[i].find_metrics(prefix)}
        later = {name: [point for point in points if point[0] > 0] for name, points in stages.items()}
        of_runs[i] = [Line(name, i, points) for name, points in later.items() if points]
    values = [y for lines in of_runs.values() for line in lines for _, y in line.points]
    for i, lines in of_runs.items():
        if lines:
            name = _add_run_name(runs[i], runs, f"{prefixes[i]}*")
            about = "stages of a refit; load overlaps with what the trainer does, and verify is part of it"
            contents.charts.append(make_line_chart(name, about, lines, SECONDS, run=i, scale=SECONDS.fit(values)))


def add_phase_charts(runs: Sequence[Run], contents: Contents) -> None:
    stacks = {i: stack for i, run in enumerate(runs) if (stack := _stack_phases(run))}
    contents.note_missing("timing/*", runs, stacks)
    if stacks:
        scale = fit_stacks([layers for _, _, layers in stacks.values()])
        for i, (prefix, steps, layers) in stacks.items():
            name = _add_run_name(runs[i], runs, f"{prefix}*")
            chart = make_stack_chart(name, "time of a step by phase", i, steps, layers, "seconds", scale)
            contents.charts.append(chart)


def _stack_phases(run: Run) -> tuple[str, list[float], dict[str, list[float]]] | None:
    """Return the prefix of the metrics, the steps, and the seconds of each phase."""
    for prefix, phases in (("timing/", PHASES), ("timing/train/", NEMO_RL_PHASES)):
        total = f"{prefix}total_step_time"
        rows = [row for row in run.metrics if total in row]
        if rows:
            names = [name for name in phases if any(prefix + name in row for row in rows)]
            layers = {name: [row.get(prefix + name, 0.0) for row in rows] for name in names}
            known = [sum(column[j] for column in layers.values()) for j in range(len(rows))]
            layers["other"] = [max(row[total] - k, 0.0) for row, k in zip(rows, known, strict=True)]
            return prefix, [row["step"] for row in rows], layers
    return None


def add_layer_maps(runs: Sequence[Run], contents: Contents) -> None:
    name = "weight_error/layer_*"
    maps = {}
    for i, run in enumerate(runs):
        layers = sort_by_number(run.find_metrics("weight_error/layer_"))
        rows = [row for row in run.metrics if any(f"weight_error/layer_{layer}" in row for layer in layers)]
        if rows:
            cells = {f"layer {layer}": [row.get(f"weight_error/layer_{layer}") for row in rows] for layer in layers}
            maps[i] = (cells, [row["step"] for row in rows])
    contents.note_missing(name, runs, maps)
    if maps:
        values = [v for cells, _ in maps.values() for row in cells.values() for v in row if v is not None]
        shades = fit_shades(values, log=False)
        for i, (cells, steps) in maps.items():
            about = "of all weights of a layer"
            contents.charts.append(make_heat_map(_add_run_name(runs[i], runs, name), about, i, cells, steps, shades))


def _make_section(
    anchor: str, title: str, intro: str, runs: Sequence[Run], plots: Sequence[Plot], makers: Sequence[Maker]
) -> Section:
    contents = Contents()
    for plot in plots:
        add_plot(runs, plot, contents)
    for add in makers:
        add(runs, contents)
    missing = [
        f"Not in {join_words([runs[i].name for i in lacking]) if len(lacking) < len(runs) else 'any run'}: "
        f"{', '.join(names)}."
        for lacking, names in contents.missing.items()
    ]
    return Section(anchor, title, intro, contents.facts, contents.charts, contents.constants, missing)


def _find_buckets(runs: Sequence[Run], metric: str) -> list[str]:
    """Return the full names of the position buckets of the metric, sorted by their first position."""
    prefix = f"train/{metric}/position_"
    ends = {end for run in runs for end in run.find_metrics(prefix)}
    return [prefix + end for end in sort_by_number(ends)]


def _metric_values(run: Run, metric: str) -> list[float]:
    return [value for _, value in run.points_of(metric)]


def _add_run_name(run: Run, runs: Sequence[Run], name: str) -> str:
    return f"{name}, {run.name}" if len(runs) > 1 else name
