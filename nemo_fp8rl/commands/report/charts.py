"""Charts as shapes for chart.jinja: this module computes the positions, the stylesheet holds the colours."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from nemo_fp8rl.commands.report.scale import Scale, fit_linear_scale, fit_log_scale, format_number
from nemo_fp8rl.commands.report.thinning import Point, compute_running_mean, keep_extremes, split_evenly

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 62, 10, 8, 24
MAX_POINTS, MAX_COLUMNS = 1000, 100
"""Limits of the points of a line and of the columns of a stack or a heat map. The lines of many runs share 4 times as
many points.
"""
COLOURS = 8
MAX_DOTS, MIN_POINTS_FOR_MEAN = 60, 50
"""A line of at most MAX_DOTS points shows every point; from MIN_POINTS_FOR_MEAN on it also shows its running mean."""

Series = tuple[str, int, int | None, Sequence[Point]]
"""Name, colour, number of the run (a check box of the page hides both), points."""


@dataclass(frozen=True)
class Line:
    """The line of one run; run: its number."""

    name: str
    run: int
    points: Sequence[Point]


@dataclass(frozen=True)
class Shape:
    """An SVG path `d`; run: the number of the run that is hidden together with it."""

    kind: str
    d: str
    colour: int = 0
    run: int | None = None
    opacity: float = 1.0
    title: str = ""


@dataclass(frozen=True)
class Chart:
    """A chart of the page.

    x_ticks, y_ticks:  (position in the drawing, label)
    hover:             the data that the page's script shows at the pointer
    run:               the number of the run if the whole chart belongs to one run
    """

    title: str
    about: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    shapes: list[Shape]
    legend: list[tuple[int, str]] = field(default_factory=list)
    hover: dict[str, Any] | None = None
    run: int | None = None
    height: int = HEIGHT


def to_svg_x(position: float) -> float:
    return LEFT + position * (WIDTH - LEFT - RIGHT)


def to_svg_y(position: float) -> float:
    return HEIGHT - BOTTOM - position * (HEIGHT - TOP - BOTTOM)


def make_line_chart(
    title: str,
    about: str,
    lines: Sequence[Line],
    *,
    log: bool = False,
    offset: float = 0.0,
    from_zero: bool = False,
    labels: Sequence[str] = (),
    means: bool = True,
    run: int | None = None,
) -> Chart:
    """Return a chart with one line per run, in the colour of the run.

    log:        the y axis is logarithmic in value - offset
    from_zero:  a linear y axis includes 0
    labels:     names of x = 0, 1, ...; without labels x is the step
    means:      long lines also get a running mean
    run:        all lines belong to this run; each has a colour, and a legend names them
    """
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    scale = (fit_log_scale(ys, offset) if log else None) or fit_linear_scale(ys, from_zero)
    notes = [about] if about else []
    if scale.log and min(ys) < offset + 10**scale.low:
        notes.append("lower values are drawn at the bottom")
    x_scale = Scale(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1)
    if labels:
        x_scale = Scale(-0.5, len(labels) - 0.5)
    limit = max(50, min(MAX_POINTS, 4 * MAX_POINTS // len(lines)))
    shapes, series = [], []
    for i, line in enumerate(lines):
        points = keep_extremes(line.points, limit)
        window = len(line.points) // 25
        mean: list[Point] = []
        if means and len(line.points) >= MIN_POINTS_FOR_MEAN:
            mean = keep_extremes(compute_running_mean(line.points, window), limit // 2)
        colour = (line.run if run is None else i) % COLOURS
        shapes.append(Shape("raw" if mean else "line", draw_path(points, x_scale, scale), colour, line.run))
        if mean:
            shapes.append(Shape("line", draw_path(mean, x_scale, scale), colour, line.run))
        if len(points) <= MAX_DOTS:
            shapes.append(Shape("dots", _draw_dots(points, x_scale, scale), colour, line.run))
        series.append((line.name, colour, line.run, points))
    longest = max(len(line.points) for line in lines)
    if longest > limit:
        notes.append(f"lowest and highest of every {-(-2 * longest // limit)} steps")
    x_ticks = [(to_svg_x(x_scale.position_of(i)), label) for i, label in enumerate(labels)] or make_x_ticks(x_scale)
    return Chart(
        title,
        "; ".join(notes),
        drop_overlaps(x_ticks),
        make_y_ticks(scale),
        shapes,
        [] if run is None else [(colour, name) for name, colour, *_ in series],
        make_hover_data(x_scale, series, dict(enumerate(labels))),
        run,
    )


def make_stack_chart(
    title: str, about: str, run: int, steps: Sequence[float], layers: Mapping[str, Sequence[float]], unit: str
) -> Chart:
    """Return a chart of stacked layers, the first at the bottom, one value per step; means if there are many steps."""
    parts = split_evenly(range(len(steps)), MAX_COLUMNS)
    xs = [fmean(steps[i] for i in part) for part in parts]
    columns = {name: [fmean(values[i] for i in part) for part in parts] for name, values in layers.items()}
    tops = [sum(column[i] for column in columns.values()) for i in range(len(parts))]
    scale = fit_linear_scale(_drop_outliers(tops), from_zero=True)
    x_scale = Scale(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1)
    edges = xs if len(xs) > 1 else [xs[0], xs[0] + 1]  # a single step fills the width
    below = [0.0] * len(edges)
    shapes, series = [], []
    for colour, (name, column) in enumerate(columns.items()):
        above = [low + value for low, value in zip(below, column if len(xs) > 1 else column * 2, strict=True)]
        outline = [*zip(edges, above, strict=True), *reversed([*zip(edges, below, strict=True)])]
        shapes.append(Shape("area", draw_path(outline, x_scale, scale) + "Z", colour % COLOURS, run))
        series.append((name, colour % COLOURS, None, [*zip(xs, column, strict=True)]))
        below = above
    notes = [about]
    if len(steps) > MAX_COLUMNS:
        notes.append(f"means over {-(-len(steps) // MAX_COLUMNS)} steps")
    if max(tops) > scale.high:
        notes.append(f"the top is cut off; the highest is {format_number(max(tops))} {unit}")
    legend = [(colour % COLOURS, name) for colour, name in enumerate(columns)]
    return Chart(
        title,
        "; ".join(notes),
        make_x_ticks(x_scale),
        make_y_ticks(scale),
        shapes,
        legend,
        make_hover_data(x_scale, series),
        run,
    )


def make_heat_map(
    title: str,
    about: str,
    run: int,
    rows: Mapping[str, Sequence[float | None]],
    steps: Sequence[float],
    log: bool = False,
) -> Chart:
    """Return a chart with a cell per row and step, more opaque for larger values; every n-th step if there are many."""
    every = -(-len(steps) // MAX_COLUMNS)
    steps = steps[::every]
    rows = {name: values[::every] for name, values in rows.items()}
    values = [value for row in rows.values() for value in row if value is not None]
    highest = max(values) if len(set(values)) > 1 else math.inf  # all cells are pale if all values are equal
    shade = (fit_log_scale(values) if log else None) or Scale(min(values), highest)
    height = TOP + BOTTOM + max(14 * len(rows), 60)
    tall, wide = (height - TOP - BOTTOM) / len(rows), (WIDTH - LEFT - RIGHT) / len(steps)
    shapes, y_ticks = [], []
    for i, (name, row) in enumerate(rows.items()):
        top = TOP + (len(rows) - 1 - i) * tall
        y_ticks.append((top + tall / 2, name))
        for j, value in enumerate(row):
            if value is not None:
                d = f"M{LEFT + j * wide:.1f} {top:.1f}h{wide + 0.3:.1f}v{tall - 0.5:.1f}h-{wide + 0.3:.1f}Z"
                cell_title = f"{name}, step {steps[j]:g}: {format_number(value)}"
                shapes.append(Shape("cell", d, 0, run, round(0.08 + 0.92 * shade.position_of(value), 2), cell_title))
    marks = split_evenly([*enumerate(steps)], 5)
    x_ticks = [(LEFT + (part[0][0] + 0.5) * wide, f"{part[0][1]:g}") for part in marks]
    notes = [about, f"pale {format_number(min(values))}, full {format_number(max(values))}"]
    if every > 1:
        notes.append(f"one of {every} recorded steps")
    every_row = -(-len(y_ticks) // 32)
    return Chart(title, "; ".join(notes), x_ticks, y_ticks[::every_row], shapes, run=run, height=height)


def draw_path(points: Sequence[Point], x: Scale, y: Scale) -> str:
    positions = [f"{to_svg_x(x.position_of(a)):.1f} {to_svg_y(y.position_of(b)):.1f}" for a, b in points]
    return "M" + "L".join(positions)


def _draw_dots(points: Sequence[Point], x: Scale, y: Scale) -> str:
    """Return a path of lines of length 0; their round caps are the dots."""
    return "".join(f"M{to_svg_x(x.position_of(a)):.1f} {to_svg_y(y.position_of(b)):.1f}h0" for a, b in points)


def make_x_ticks(scale: Scale) -> list[tuple[float, str]]:
    return [(to_svg_x(position), label) for position, label in scale.make_ticks() if "." not in label]


def make_y_ticks(scale: Scale) -> list[tuple[float, str]]:
    return [(to_svg_y(position), label) for position, label in scale.make_ticks()]


def drop_overlaps(ticks: list[tuple[float, str]]) -> list[tuple[float, str]]:
    result: list[tuple[float, str]] = []
    for x, label in ticks:
        if label and (not result or x - result[-1][0] > 3.2 * (len(label) + len(result[-1][1])) + 4):
            result.append((x, label))
    return result


def make_hover_data(
    scale: Scale, series: Sequence[Series], labels: Mapping[float, str] | None = None
) -> dict[str, Any]:
    """Return the data for the page's script; labels: text to show instead of `step x`."""
    return {
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "low": scale.low,
        "high": scale.high,
        "labels": {_round_values([x])[0]: label for x, label in labels.items()} if labels else {},
        "series": [
            {
                "name": name,
                "colour": colour,
                "run": run,
                "x": _round_values(x for x, _ in p),
                "y": _round_values(y for _, y in p),
            }
            for name, colour, run, p in series
        ],
    }


def _round_values(values: Iterable[float]) -> list[float]:
    return [int(value) if value == int(value) else float(f"{value:.7g}") for value in values]


def _drop_outliers(values: Sequence[float]) -> list[float]:
    """Return the values up to four times the median: the first step compiles, and would flatten the others."""
    middle = sorted(values)[len(values) // 2]
    return [value for value in values if value <= 4 * middle] or list(values)
