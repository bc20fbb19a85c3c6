"""Charts as shapes for chart.jinja: places are computed here, and colours are the stylesheet's."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from nemo_fp8rl.commands.report.scale import Scale, linear, logarithmic, number
from nemo_fp8rl.commands.report.thinning import Point, extremes, running_mean, stretches

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 62, 10, 8, 24
MOST_POINTS, MOST_COLUMNS = 1000, 100
"""Points of a line, and columns of a stack or a heat map, at most. Lines of many runs share 4 times as many points."""
COLOURS = 8
DOTS_UP_TO, MEAN_FROM = 60, 50
"""A line of so few points shows each; one of so many its running mean."""

Series = tuple[str, int, int | None, Sequence[Point]]
"""Name, colour, the run that it is hidden with, points."""


@dataclass(frozen=True)
class Line:
    """One run's."""

    name: str
    run: int
    points: Sequence[Point]


@dataclass(frozen=True)
class Shape:
    """d: an SVG path. run: that it belongs to, to be hidden with it."""

    kind: str
    d: str
    colour: int = 0
    run: int | None = None
    opacity: float = 1.0
    title: str = ""


@dataclass(frozen=True)
class Chart:
    """x_ticks, y_ticks: (place in the drawing, label). hover: what the page's script shows at the pointer. run: where
    the whole chart is one run's.
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


def across(place: float) -> float:
    return LEFT + place * (WIDTH - LEFT - RIGHT)


def up(place: float) -> float:
    return HEIGHT - BOTTOM - place * (HEIGHT - TOP - BOTTOM)


def line_chart(
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
    """One line a run, in the run's colour. log: of value - offset. labels: names of the places 0, 1, ... on the x axis,
    else it is steps. run: all lines are this run's, in colours of their own, which a legend names.
    """
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    scale = (logarithmic(ys, offset) if log else None) or linear(ys, from_zero)
    notes = [about] if about else []
    if scale.log and min(ys) < offset + 10**scale.low:
        notes.append("what is lower is drawn at the bottom")
    x_scale = Scale(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1)
    if labels:
        x_scale = Scale(-0.5, len(labels) - 0.5)
    most = max(50, min(MOST_POINTS, 4 * MOST_POINTS // len(lines)))
    shapes, series = [], []
    for i, line in enumerate(lines):
        shown = extremes(line.points, most)
        over = len(line.points) // 25
        mean = extremes(running_mean(line.points, over), most // 2) if means and len(line.points) >= MEAN_FROM else []
        colour = (line.run if run is None else i) % COLOURS
        shapes.append(Shape("raw" if mean else "line", svg_path(shown, x_scale, scale), colour, line.run))
        if mean:
            shapes.append(Shape("line", svg_path(mean, x_scale, scale), colour, line.run))
        if len(shown) <= DOTS_UP_TO:
            shapes.append(Shape("dots", _dots(shown, x_scale, scale), colour, line.run))
        series.append((line.name, colour, line.run, shown))
    longest = max(len(line.points) for line in lines)
    if longest > most:
        notes.append(f"lowest and highest of every {-(-2 * longest // most)} steps")
    x_ticks = [(across(x_scale.place(i)), label) for i, label in enumerate(labels)] if labels else x_ticks_of(x_scale)
    return Chart(
        title,
        "; ".join(notes),
        without_overlap(x_ticks),
        y_ticks(scale),
        shapes,
        [] if run is None else [(colour, name) for name, colour, *_ in series],
        hover_data(x_scale, series, dict(enumerate(labels))),
        run,
    )


def stack_chart(
    title: str, about: str, run: int, steps: Sequence[float], layers: Mapping[str, Sequence[float]], unit: str
) -> Chart:
    """layers: a value a step each, drawn one upon the other, the first lowest; means where there are many steps."""
    parts = stretches(range(len(steps)), MOST_COLUMNS)
    xs = [fmean(steps[i] for i in part) for part in parts]
    columns = {name: [fmean(values[i] for i in part) for part in parts] for name, values in layers.items()}
    tops = [sum(column[i] for column in columns.values()) for i in range(len(parts))]
    scale = linear(_without_outliers(tops), from_zero=True)
    x_scale = Scale(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1)
    edges = xs if len(xs) > 1 else [xs[0], xs[0] + 1]  # one step is drawn all across
    below = [0.0] * len(edges)
    shapes, series = [], []
    for colour, (name, column) in enumerate(columns.items()):
        above = [low + value for low, value in zip(below, column if len(xs) > 1 else column * 2, strict=True)]
        outline = [*zip(edges, above, strict=True), *reversed([*zip(edges, below, strict=True)])]
        shapes.append(Shape("area", svg_path(outline, x_scale, scale) + "Z", colour % COLOURS, run))
        series.append((name, colour % COLOURS, None, [*zip(xs, column, strict=True)]))
        below = above
    notes = [about]
    if len(steps) > MOST_COLUMNS:
        notes.append(f"means over {-(-len(steps) // MOST_COLUMNS)} steps")
    if max(tops) > scale.high:
        notes.append(f"cut off above; the highest is {number(max(tops))} {unit}")
    legend = [(colour % COLOURS, name) for colour, name in enumerate(columns)]
    return Chart(
        title, "; ".join(notes), x_ticks_of(x_scale), y_ticks(scale), shapes, legend, hover_data(x_scale, series), run
    )


def heat_map(
    title: str,
    about: str,
    run: int,
    rows: Mapping[str, Sequence[float | None]],
    steps: Sequence[float],
    log: bool = False,
) -> Chart:
    """A cell for each row and step: the more opaque the larger. Every n-th step where there are many."""
    every = -(-len(steps) // MOST_COLUMNS)
    steps = steps[::every]
    rows = {name: values[::every] for name, values in rows.items()}
    values = [value for row in rows.values() for value in row if value is not None]
    highest = max(values) if len(set(values)) > 1 else math.inf  # alike, all are pale
    shade = (logarithmic(values) if log else None) or Scale(min(values), highest)
    height = TOP + BOTTOM + max(14 * len(rows), 60)
    tall, wide = (height - TOP - BOTTOM) / len(rows), (WIDTH - LEFT - RIGHT) / len(steps)
    shapes, y_ticks = [], []
    for i, (name, row) in enumerate(rows.items()):
        top = TOP + (len(rows) - 1 - i) * tall
        y_ticks.append((top + tall / 2, name))
        for j, value in enumerate(row):
            if value is not None:
                d = f"M{LEFT + j * wide:.1f} {top:.1f}h{wide + 0.3:.1f}v{tall - 0.5:.1f}h-{wide + 0.3:.1f}Z"
                shown = f"{name}, step {steps[j]:g}: {number(value)}"
                shapes.append(Shape("cell", d, 0, run, round(0.08 + 0.92 * shade.place(value), 2), shown))
    marks = stretches([*enumerate(steps)], 5)
    x_ticks = [(LEFT + (part[0][0] + 0.5) * wide, f"{part[0][1]:g}") for part in marks]
    notes = [about, f"pale {number(min(values))}, full {number(max(values))}"]
    if every > 1:
        notes.append(f"one of {every} recorded steps")
    every_row = -(-len(y_ticks) // 32)
    return Chart(title, "; ".join(notes), x_ticks, y_ticks[::every_row], shapes, run=run, height=height)


def svg_path(points: Sequence[Point], x: Scale, y: Scale) -> str:
    places = [f"{across(x.place(a)):.1f} {up(y.place(b)):.1f}" for a, b in points]
    return "M" + "L".join(places)


def _dots(points: Sequence[Point], x: Scale, y: Scale) -> str:
    """Lines of length 0, whose round ends are seen."""
    return "".join(f"M{across(x.place(a)):.1f} {up(y.place(b)):.1f}h0" for a, b in points)


def x_ticks_of(scale: Scale) -> list[tuple[float, str]]:
    return [(across(place), label) for place, label in scale.ticks() if "." not in label]


def y_ticks(scale: Scale) -> list[tuple[float, str]]:
    return [(up(place), label) for place, label in scale.ticks()]


def without_overlap(ticks: list[tuple[float, str]]) -> list[tuple[float, str]]:
    kept: list[tuple[float, str]] = []
    for x, label in ticks:
        if label and (not kept or x - kept[-1][0] > 3.2 * (len(label) + len(kept[-1][1])) + 4):
            kept.append((x, label))
    return kept


def hover_data(scale: Scale, series: Sequence[Series], labels: Mapping[float, str] | None = None) -> dict[str, Any]:
    """What the page's script needs. labels: what to say instead of `step x`."""
    return {
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "low": scale.low,
        "high": scale.high,
        "labels": {_short([x])[0]: label for x, label in labels.items()} if labels else {},
        "series": [
            {"name": name, "colour": colour, "run": run, "x": _short(x for x, _ in p), "y": _short(y for _, y in p)}
            for name, colour, run, p in series
        ],
    }


def _short(values: Iterable[float]) -> list[float]:
    return [int(value) if value == int(value) else float(f"{value:.7g}") for value in values]


def _without_outliers(values: Sequence[float]) -> list[float]:
    """The values up to four times the median: a first step compiles, and would flatten the rest."""
    middle = sorted(values)[len(values) // 2]
    return [value for value in values if value <= 4 * middle] or list(values)
