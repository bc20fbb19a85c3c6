"""The parts of all charts: the frame between the axes, shapes, ticks, and the values for the page's script."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_fp8rl.commands.report.charts.scale import Scale, Tick, choose_unit
from nemo_fp8rl.commands.report.charts.thinning import Point, split_evenly
from nemo_fp8rl.common.format_numbers import format_exactly

WIDTH, HEIGHT = 420, 240
RIGHT, TOP, BOTTOM = 14, 22, 36
LETTER = 7.1
"""Width of a letter of a label, of the widest fonts."""
LONGEST_LABEL = 14
COLOURS = 8
MAX_POINTS, MAX_COLUMNS = 1000, 100
"""Limits of the points of a line and of the columns of a stack or a heat map. The lines of many runs share 4 times as
many points.
"""

Series = tuple[str, int, int | None, Sequence[Point]]
"""Name, colour, number of the run (a check box of the page hides both), points."""


@dataclass(frozen=True)
class Shape:
    """An SVG path `d`.

    colour:  the number of a run's colour, or of a part's with `is_part`: phases and stages have colours of their own
    run:     the number of the run that is hidden together with it
    """

    kind: str
    d: str
    colour: int = 0
    run: int | None = None
    opacity: float = 1.0
    title: str = ""
    is_part: bool = False


@dataclass(frozen=True)
class Frame:
    """The place between the axes of a chart: `left` of the y labels, `height` of the whole drawing."""

    left: float
    height: int = HEIGHT

    @property
    def width(self) -> float:
        return WIDTH - RIGHT - self.left

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM

    def x(self, position: float) -> float:
        return self.left + position * self.width

    def y(self, position: float) -> float:
        return self.bottom - position * (self.bottom - TOP)

    def path(self, points: Sequence[Point], x: Scale, y: Scale) -> str:
        return draw_path([(self.x(x.position_of(a)), self.y(y.position_of(b))) for a, b in points])


@dataclass(frozen=True)
class Chart:
    """A chart of the page.

    name, about:       the metrics as in metrics.jsonl, and what they mean
    x_title, y_title:  what the axes count
    x_ticks, y_ticks:  (position in the drawing, label)
    grid:              positions of horizontal lines
    hover:             the data that the page's script shows at the pointer
    run:               the number of the run if the whole chart belongs to one run
    """

    name: str
    about: str
    frame: Frame
    x_title: str
    y_title: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    shapes: list[Shape]
    grid: list[float] = field(default_factory=list)
    legend: list[tuple[int, str]] = field(default_factory=list)
    hover: dict[str, Any] | None = None
    run: int | None = None


@dataclass(frozen=True)
class Axis:
    """A y axis in a frame that has room for its labels."""

    scale: Scale
    frame: Frame
    ticks: list[Tick]
    unit: str

    @property
    def labels(self) -> list[tuple[float, str]]:
        return [(self.frame.y(tick.position), tick.label) for tick in self.ticks]

    @property
    def grid(self) -> list[float]:
        return [self.frame.y(tick.position) for tick in self.ticks if not tick.is_place]

    @property
    def shapes(self) -> list[Shape]:
        """The band of the places below the decades."""
        if not self.scale.first_decade:
            return []
        top, left, right = self.frame.y(self.scale.first_decade), self.frame.left, WIDTH - RIGHT
        return [Shape("band", f"M{left:.1f} {top:.1f}H{right}V{self.frame.bottom}H{left:.1f}Z")]


def make_axis(scale: Scale, unit: str = "") -> Axis:
    divisor, unit = (1.0, unit) if scale.log else choose_unit(unit, scale.high)
    ticks = scale.make_ticks(divisor)
    return Axis(scale, make_frame([tick.label for tick in ticks]), ticks, unit)


def make_frame(labels: Iterable[str], height: int = HEIGHT) -> Frame:
    """Return a frame that has room for these y labels."""
    return Frame(round(12 + LETTER * max((min(len(label), LONGEST_LABEL) for label in labels), default=3), 1), height)


def shorten(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}\u2026"


def draw_path(positions: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in positions)


def draw_dots(positions: Sequence[Point]) -> str:
    """Return a path of lines of length 0; their round caps are the dots."""
    return "".join(f"M{x:.1f} {y:.1f}h0" for x, y in positions)


def separate(lines: Sequence[Sequence[Point]]) -> tuple[list[list[Point]], int]:
    """Return the positions of the lines, moved apart where lines have the same, and how many lines were moved.

    Lines at the same position lie side by side around it, so that none covers another.
    """
    owners: dict[Point, dict[int, None]] = {}
    for number, line in enumerate(lines):
        for x, y in line:
            owners.setdefault((round(x, 1), round(y, 1)), {})[number] = None
    shared = {place: [*numbers] for place, numbers in owners.items() if len(numbers) > 1}
    if not shared:
        return [list(line) for line in lines], 0
    result = []
    for number, line in enumerate(lines):
        moved = []
        for x, y in line:
            numbers = shared.get((round(x, 1), round(y, 1)), [number])
            gap = min(3.0, 12 / (len(numbers) - 1)) if len(numbers) > 1 else 0.0
            moved.append((x, y + (numbers.index(number) - (len(numbers) - 1) / 2) * gap))
        result.append(moved)
    return result, max(len(numbers) for numbers in shared.values())


def make_step_ticks(scale: Scale, frame: Frame) -> list[tuple[float, str]]:
    ticks = [(frame.x(tick.position), tick.label) for tick in scale.make_ticks() if "." not in tick.label]
    return drop_overlaps(keep_inside(ticks))


def mark_columns(names: Sequence[str], frame: Frame) -> list[tuple[float, str]]:
    """Return about five labels for columns that fill the frame."""
    parts = split_evenly([*enumerate(names)], 5)
    return keep_inside([(frame.x((part[0][0] + 0.5) / len(names)), part[0][1]) for part in parts])


def keep_inside(ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the labels of an x axis, moved where the drawing would cut them."""
    return [(min(x, WIDTH - 1 - LETTER * len(label) / 2), label) for x, label in ticks]


def drop_overlaps(ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    result: list[tuple[float, str]] = []
    for x, label in ticks:
        if label and (not result or x - result[-1][0] > LETTER / 2 * (len(label) + len(result[-1][1])) + 4):
            result.append((x, label))
    return result


def make_hover_data(
    scale: Scale, frame: Frame, series: Sequence[Series], labels: Mapping[float, str] | None = None, parts: bool = False
) -> dict[str, Any]:
    """Return the data for the page's script.

    labels:  text to show instead of `step x`
    parts:   the colours are those of parts
    """
    return {
        "left": frame.left,
        "right": WIDTH - RIGHT,
        "top": TOP,
        "bottom": frame.bottom,
        "low": scale.low,
        "high": scale.high,
        "key": "p" if parts else "c",
        "labels": {_round_values([x])[0]: label for x, label in labels.items()} if labels else {},
        "series": [
            {
                "name": name,
                "colour": colour,
                "run": run,
                "x": _round_values(x for x, _ in points),
                "y": _round_values(y for _, y in points),
            }
            for name, colour, run, points in series
        ],
    }


def _round_values(values: Iterable[float]) -> list[float]:
    return [int(value) if value == int(value) else float(format_exactly(value)) for value in values]
