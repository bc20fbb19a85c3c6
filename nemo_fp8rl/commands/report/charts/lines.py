"""Charts with a line per run, or per part of one run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nemo_fp8rl.commands.report.charts.drawing import (
    COLOURS,
    MAX_POINTS,
    Axis,
    Chart,
    Frame,
    Series,
    Shape,
    draw_dots,
    draw_path,
    drop_overlaps,
    keep_inside,
    make_axis,
    make_hover_data,
    make_step_ticks,
    separate,
)
from nemo_fp8rl.commands.report.charts.scale import Range, Scale, fit_linear_scale, fit_log_scale
from nemo_fp8rl.commands.report.charts.thinning import Point, compute_running_mean, keep_extremes

MAX_DOTS, MIN_POINTS_FOR_MEAN = 60, 50
"""A line of at most MAX_DOTS points shows every point; from MIN_POINTS_FOR_MEAN on it also shows its running mean."""


@dataclass(frozen=True)
class Line:
    """The line of one run; run: its number."""

    name: str
    run: int
    points: Sequence[Point]

    @property
    def is_flat(self) -> bool:
        return len({y for _, y in self.points}) == 1


@dataclass(frozen=True)
class Style:
    """The way in which the values of a metric are drawn.

    unit:       of the y axis
    log:        the y axis is logarithmic in value - offset
    from_zero:  a linear y axis includes 0
    possible:   the values that the metric can have
    """

    unit: str = ""
    log: bool = False
    offset: float = 0.0
    from_zero: bool = False
    possible: Range = (None, None)

    def fit(self, values: Iterable[float]) -> Scale:
        values = list(values)
        scale = fit_log_scale(values, self.offset) if self.log else None
        return scale or fit_linear_scale(values, self.from_zero, self.possible)


def make_line_chart(
    name: str,
    about: str,
    lines: Sequence[Line],
    style: Style,
    *,
    x_title: str = "step",
    labels: Sequence[str] = (),
    means: bool = True,
    run: int | None = None,
    scale: Scale | None = None,
) -> Chart:
    """Return a chart with one line per run, in the colour of the run.

    labels:  names of x = 0, 1, ...; without labels x is the step
    means:   long lines also get a running mean
    run:     all lines are parts of this run; each has a colour of its own, and a legend names them
    scale:   the y axis, for charts that share it; by default it fits the lines
    """
    axis = make_axis(scale or style.fit(y for line in lines for _, y in line.points), style.unit)
    xs = [x for line in lines for x, _ in line.points]
    x_scale = Scale(-0.5, len(labels) - 0.5) if labels else fit_steps(xs)
    limit = max(50, min(MAX_POINTS, 4 * MAX_POINTS // len(lines)))
    raw = [keep_extremes(line.points, limit) for line in lines]
    smooth = [_smooth(line.points, limit // 2) if means else [] for line in lines]
    shapes, num_equal = _draw_lines(lines, raw, smooth, (x_scale, axis), run)
    colours = [(line.run if run is None else i) % COLOURS for i, line in enumerate(lines)]
    series: list[Series] = [
        (line.name, colour, line.run, points) for line, colour, points in zip(lines, colours, raw, strict=True)
    ]
    notes = [about] if about else []
    if axis.scale.log:
        notes.append(
            "logarithmic" if not axis.scale.offset else f"logarithmic in the distance to {axis.scale.offset:g}"
        )
    if num_equal:
        notes.append(f"{num_equal} lines with equal values lie side by side")
    longest = max(len(line.points) for line in lines)
    if longest > limit:
        notes.append(f"lowest and highest of every {-(-2 * longest // limit)} steps")
    return Chart(
        name,
        "; ".join(notes),
        axis.frame,
        x_title,
        axis.unit,
        _label_positions(labels, x_scale, axis.frame) if labels else make_step_ticks(x_scale, axis.frame),
        axis.labels,
        axis.shapes + shapes,
        axis.grid,
        [] if run is None else [(colour, line.name) for colour, line in zip(colours, lines, strict=True)],
        make_hover_data(x_scale, axis.frame, series, dict(enumerate(labels)), parts=run is not None),
        run,
    )


def fit_steps(steps: Sequence[float]) -> Scale:
    return Scale(min(steps), max(steps) if max(steps) > min(steps) else min(steps) + 1)


def _label_positions(labels: Sequence[str], x_scale: Scale, frame: Frame) -> list[tuple[float, str]]:
    return drop_overlaps(keep_inside([(frame.x(x_scale.position_of(i)), label) for i, label in enumerate(labels)]))


def _smooth(points: Sequence[Point], limit: int) -> list[Point]:
    if len(points) < MIN_POINTS_FOR_MEAN:
        return []
    return keep_extremes(compute_running_mean(points, len(points) // 25), limit)


def _draw_lines(
    lines: Sequence[Line],
    raw: Sequence[Sequence[Point]],
    smooth: Sequence[Sequence[Point]],
    scales: tuple[Scale, Axis],
    run: int | None,
) -> tuple[list[Shape], int]:
    """Return the shapes, and how many lines have equal values somewhere."""
    x_scale, axis = scales

    def place(points: Sequence[Point]) -> list[Point]:
        frame = axis.frame
        return [(frame.x(x_scale.position_of(x)), frame.y(axis.scale.position_of(y))) for x, y in points]

    raw_positions, num_equal = separate([place(points) for points in raw])
    mean_positions, _ = separate([place(points) for points in smooth])
    shapes = []
    for i, line in enumerate(lines):
        paths = {"raw" if smooth[i] else "line": draw_path(raw_positions[i])}
        if smooth[i]:
            paths["line"] = draw_path(mean_positions[i])
        if len(raw[i]) <= MAX_DOTS:
            paths["dots"] = draw_dots(raw_positions[i])
        colour, is_part = (line.run if run is None else i) % COLOURS, run is not None
        shapes += [Shape(kind, d, colour, line.run, is_part=is_part) for kind, d in paths.items()]
    return shapes, num_equal
