"""How much of what an implementation makes differs from our contract: fractions of bytes, scales and values.

bytes    FP8 bytes with another bit pattern
scales   scale_inv with another bit pattern, of float32
values   data * scale_inv with another float32 value; 0 equals -0, NaN equals NaN

So two that spell the same values differently (half the bytes under twice the scale) differ in the first two alone, and
a NaN or an overflow counts as a difference.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_fp8rl.commands.parity import libraries, sample_matrices
from nemo_fp8rl.commands.parity.formulas import FORMULAS
from nemo_fp8rl.commands.parity.implementation import FORMATS, Implementation, NotTaken
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.fp8 import BLOCK, Block, ScaleFormat, kernels
from nemo_fp8rl.fp8.format import ALONG_LAST, BlockScaled
from nemo_fp8rl.fp8.quantize import quantize_blockwise

if TYPE_CHECKING:
    from rich.table import Table

SECTIONS: dict[str, tuple[Block, Callable[[int, int], dict[str, Tensor]]]] = {
    "weights 128x128": (BLOCK, sample_matrices.weights),
    "activations 1x128": (ALONG_LAST, sample_matrices.activations),
}
STEP = 2 * BLOCK[1]
"""Sizes are multiples of it, so that the half of a matrix that is zero ends at a block."""
LARGEST = 16384
WIDTH = 100
"""Columns of the table where the output is not a terminal."""


@dataclass(frozen=True)
class Difference:
    """Fractions, 0 ... 1, of what differs from ours."""

    bytes: float
    scales: float
    values: float

    @property
    def none(self) -> bool:
        return self == Difference(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Row:
    """One implementation in one scale format; `inputs` by kind, None for what it does not take or failed on."""

    section: str
    implementation: str
    source: str
    installed: str | None
    """Version of the library that ran; None for a formula."""
    device: str
    scale_format: ScaleFormat
    inputs: dict[str, Difference | None]


@dataclass(frozen=True)
class Report:
    size: int
    seed: int
    kernel: str
    """Our kernel that the contract was computed with."""
    torch: str
    rows: list[Row]
    not_run: dict[str, str]
    """Libraries that are not installed or failed, with the reason."""


def compare(theirs: BlockScaled, ours: BlockScaled) -> Difference:
    """Both on the CPU, of the same shape and block."""
    a, b = theirs.dequantize(), ours.dequantize()
    return Difference(
        _fraction(theirs.data.view(torch.uint8) != ours.data.view(torch.uint8)),
        _fraction(theirs.scale_inv.view(torch.int32) != ours.scale_inv.view(torch.int32)),
        _fraction((a != b) & ~(a.isnan() & b.isnan())),
    )


def report(size: int, seed: int) -> Report:
    """Compare everything that runs here. Raises UserError on a size or seed that cannot be used."""
    if size < STEP or size % STEP or size > LARGEST:
        raise UserError(f"--size {size} is not a multiple of {STEP} up to {LARGEST}")
    if not 0 <= seed < 2**63:
        raise UserError(f"--seed {seed} is not in 0 ... 2^63 - 1")
    found, not_run = libraries.installed()
    rows = []
    for section, (block, draw) in SECTIONS.items():
        matrices = draw(size, seed)
        ours = {
            (kind, scale_format): quantize_blockwise(x, block=block, scale_format=scale_format)
            for kind, x in matrices.items()
            for scale_format in FORMATS
        }
        for made in _in_order(found):
            if block not in made.blocks:
                continue
            for scale_format in FORMATS:
                inputs = {
                    kind: _difference(made, x, scale_format, ours[kind, scale_format], not_run)
                    for kind, x in matrices.items()
                }
                rows.append(Row(section, made.name, made.source, made.version, made.device, scale_format, inputs))
    kernel = kernels.describe(kernels.resolve("auto", "cpu"))
    return Report(size, seed, kernel, torch.__version__, rows, not_run)


def as_json(result: Report) -> str:
    """Keys as the fields of Report, Row and Difference."""
    return json.dumps(asdict(result), indent=2)


def show(result: Report) -> None:
    """Print the report on stdout."""
    from nemo_fp8rl.common.display import Screen

    console = Screen(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    what = f"size {result.size}, seed {result.seed}; ours: kernel {result.kernel}, torch {result.torch}"
    console.print(what, markup=False)
    for section in SECTIONS:
        console.print(_table(section, [row for row in result.rows if row.section == section]))
    for name, why in result.not_run.items():
        console.print(f"{name}: {why}", markup=False, soft_wrap=True)


def _in_order(found: list[Implementation]) -> Iterator[Implementation]:
    """Every formula, each followed by the libraries that implement it."""
    for formula in FORMULAS:
        yield formula
        yield from (library for library in found if library.formula == formula.name)


def _difference(
    made: Implementation, x: Tensor, scale_format: ScaleFormat, ours: BlockScaled, not_run: dict[str, str]
) -> Difference | None:
    if scale_format not in made.formats:
        return None
    try:
        with libraries.quiet():
            theirs = made.quantize(x, ours.block, scale_format)
    except NotTaken:
        return None
    except Exception as error:
        if made.version is None:
            raise
        first_line = str(error).partition("\n")[0]
        not_run[f"{made.name}, {scale_format}"] = f"failed ({type(error).__name__}: {first_line})"
        return None
    return compare(replace(theirs, data=theirs.data.cpu(), scale_inv=theirs.scale_inv.cpu()), ours)


def _fraction(differs: Tensor) -> float:
    return int(differs.sum()) / differs.numel()


def _table(title: str, rows: list[Row]) -> "Table":
    """One line for a row without any difference, else a line for each of the three fractions."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"{title}: % that differs from ours", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for heading in ("implementation", "scales", "differing"):
        table.add_column(heading, no_wrap=True)
    for kind in sample_matrices.KINDS:
        table.add_column(kind.replace(" ", "\n").replace("-", "-\n"), justify="right", no_wrap=True)
    for (name, installed, device), group in itertools.groupby(
        rows, lambda row: (row.implementation, row.installed, row.device)
    ):
        where = "" if device == "cpu" else f", on {device}"
        labels = [name, f"(installed {installed}{where})"] if installed else [name]
        lines = [line for row in group for line in _lines(row)]
        for label, line in itertools.zip_longest(labels, lines, fillvalue=""):
            table.add_row(label, *line)
    return table


def _lines(row: Row) -> list[list[str]]:
    """Scale format, metric and a cell for each kind of input."""
    columns = list(row.inputs.values())
    if any(column is not None and not column.none for column in columns):
        metrics = {"bytes": "bytes", "scales": "scales", "values": "values"}
    else:
        metrics = {"all" if any(columns) else "": "bytes"}
    first = itertools.chain([row.scale_format], itertools.repeat(""))
    return [
        [scales, shown, *(_percent(column, metric) for column in columns)]
        for scales, (shown, metric) in zip(first, metrics.items(), strict=False)
    ]


def _percent(difference: Difference | None, metric: str) -> str:
    """Two digits; exactly 0 and exactly 100 are told from what only rounds to them."""
    if difference is None:
        return "-"
    percent = 100 * float(getattr(difference, metric))
    if percent in (0, 100) or 10 <= percent <= 99.5:
        return f"{percent:.0f}"
    return ">99" if percent > 99.5 else f"{percent:.2g}"
