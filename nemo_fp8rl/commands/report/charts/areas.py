"""Charts of areas that belong to one run: stacks of parts over the steps, and heat maps."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from nemo_fp8rl.commands.report.charts.drawing import (
    BOTTOM,
    COLOURS,
    HEIGHT,
    MAX_COLUMNS,
    TOP,
    Chart,
    Shape,
    make_axis,
    make_frame,
    make_hover_data,
    make_step_ticks,
    mark_columns,
    shorten,
)
from nemo_fp8rl.commands.report.charts.lines import fit_steps
from nemo_fp8rl.commands.report.charts.scale import Scale, fit_linear_scale, fit_log_scale, format_number
from nemo_fp8rl.commands.report.charts.thinning import split_evenly

MIN_ROW = 14
"""Height of a row of a heat map; fewer rows than fill the drawing are higher."""
PALEST = 0.08


def fit_stacks(stacks: Sequence[Mapping[str, Sequence[float]]]) -> Scale:
    """Return the y axis of stacks; the highest columns may leave it, see `_drop_outliers`."""
    tops = [sum(column) for stack in stacks for column in zip(*stack.values(), strict=True)]
    return fit_linear_scale(_drop_outliers(tops), from_zero=True, possible=(0.0, None))


def make_stack_chart(
    name: str,
    about: str,
    run: int,
    steps: Sequence[float],
    layers: Mapping[str, Sequence[float]],
    unit: str,
    scale: Scale,
) -> Chart:
    """Return a chart of stacked layers, the first at the bottom, one value per step; means if there are many steps."""
    parts = split_evenly(range(len(steps)), MAX_COLUMNS)
    xs = [fmean(steps[i] for i in part) for part in parts]
    columns = {layer: [fmean(values[i] for i in part) for part in parts] for layer, values in layers.items()}
    axis = make_axis(scale, unit)
    x_scale = fit_steps(xs)
    edges = xs if len(xs) > 1 else [xs[0], xs[0] + 1]  # a single step fills the width
    below = [0.0] * len(edges)
    shapes, series = [], []
    for colour, (layer, column) in enumerate(columns.items()):
        above = [low + value for low, value in zip(below, column if len(xs) > 1 else column * 2, strict=True)]
        outline = [*zip(edges, above, strict=True), *reversed([*zip(edges, below, strict=True)])]
        d = axis.frame.path(outline, x_scale, scale) + "Z"
        shapes.append(Shape("area", d, colour % COLOURS, run, is_part=True))
        series.append((layer, colour % COLOURS, None, [*zip(xs, column, strict=True)]))
        below = above
    notes = [about]
    if len(steps) > MAX_COLUMNS:
        notes.append(f"means over {-(-len(steps) // MAX_COLUMNS)} steps")
    tops = [sum(values[i] for values in layers.values()) for i in range(len(steps))]
    if (highest := max(tops)) > scale.high:
        notes.append(f"step {steps[tops.index(highest)]:g} took {format_number(highest)} {unit}, above this axis")
    return Chart(
        name,
        "; ".join(notes),
        axis.frame,
        "step",
        axis.unit,
        make_step_ticks(x_scale, axis.frame),
        axis.labels,
        shapes,
        axis.grid,
        [(colour % COLOURS, layer) for colour, layer in enumerate(columns)],
        make_hover_data(x_scale, axis.frame, series, parts=True),
        run,
    )


def fit_shades(values: Sequence[float], log: bool) -> Scale:
    """Return the scale of the cells of heat maps: position 0 is palest. A linear one begins at 0, as an axis would."""
    low = min(0.0, *values)
    highest = max(values) if max(values) > low else math.inf  # all cells are pale if all values are 0
    return (fit_log_scale(values) if log else None) or Scale(low, highest)


def make_heat_map(
    name: str,
    about: str,
    run: int,
    rows: Mapping[str, Sequence[float | None]],
    steps: Sequence[float],
    shades: Scale,
) -> Chart:
    """Return a chart with a cell per row and step, more opaque for larger values; every n-th step if there are many.

    With a logarithmic scale, cells of 0 or less are outlined, and have no colour.
    """
    every = -(-len(steps) // MAX_COLUMNS)
    steps = steps[::every]
    rows = {row: values[::every] for row, values in rows.items()}
    values = [value for row in rows.values() for value in row if value is not None]
    height = max(HEIGHT, TOP + BOTTOM + MIN_ROW * len(rows))
    frame = make_frame(rows, height)
    tall, wide = (height - TOP - BOTTOM) / len(rows), frame.width / len(steps)
    shapes, y_ticks = [], []
    for i, (row, cells) in enumerate(rows.items()):
        top = TOP + (len(rows) - 1 - i) * tall
        y_ticks.append((top + tall / 2, shorten(row)))
        for j, value in enumerate(cells):
            if value is None:
                continue
            left = frame.left + j * wide
            title = f"{row}, step {steps[j]:g}: {format_number(value)}"
            if shades.log and value <= 0:
                d = f"M{left:.1f} {top:.1f}h{wide:.1f}v{tall - 0.5:.1f}h-{wide:.1f}Z"
                shapes.append(Shape("cell exact", d, run % COLOURS, run, title=title))
                continue
            d = f"M{left:.1f} {top:.1f}h{wide + 0.3:.1f}v{tall - 0.5:.1f}h-{wide + 0.3:.1f}Z"
            opacity = PALEST + (1 - PALEST) * shades.position_of(value)
            shapes.append(Shape("cell", d, run % COLOURS, run, round(opacity, 2), title))
    notes = [about, _explain_shades(values, shades)]
    if every > 1:
        notes.append(f"one of {every} recorded steps")
    every_row = -(-len(y_ticks) // 32)
    return Chart(
        name,
        "; ".join(notes),
        frame,
        "step",
        "",
        mark_columns([f"{step:g}" for step in steps], frame),
        y_ticks[::every_row],
        shapes,
        run=run,
    )


def _explain_shades(values: Sequence[float], shades: Scale) -> str:
    if not shades.log:
        return (
            f"{format_number(min(values))} to {format_number(max(values))}; the shade from "
            f"{format_number(shades.low)} (pale) to {format_number(max(values))}"
        )
    above = [value for value in values if value > 0]
    exact = ["outlined: 0 exactly"] if 0 in values else []
    exact += ["outlined: below 0"] if min(values) < 0 else []
    span = [f"from {format_number(min(above))} (pale) to {format_number(max(above))}"] if above else []
    return "; ".join(["logarithmic", *span, *exact])


def _drop_outliers(values: Sequence[float]) -> list[float]:
    """Return the values up to four times the median: the first step compiles, and would flatten the others."""
    middle = sorted(values)[len(values) // 2]
    return [value for value in values if value <= 4 * middle] or list(values)
