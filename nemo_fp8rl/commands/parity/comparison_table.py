"""The difference between an implementation and our contract: fractions of bytes, scales and values.

bytes    bytes of data with another bit pattern; of NVFP4 a byte holds two values
scales   block scales with another bit pattern
values   data * block scale * global scale with another float32 value; 0 equals -0, NaN equals NaN

Two implementations that write the same values in another form (half the bytes with twice the scale) differ in bytes and
scales alone. A NaN or an overflow counts as a difference.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_fp8rl.commands.parity import formulas, libraries, mxfp8_formulas, nvfp4_formulas, sample_matrices
from nemo_fp8rl.commands.parity.implementation import Implementation, UnsupportedShapeError
from nemo_fp8rl.common.errors import UserError
from nemo_fp8rl.fp8 import BLOCK, FP8, MXFP8, NVFP4, Block, Format, ScaleFormat, encode_scale, kernels
from nemo_fp8rl.fp8.block_scaled import SCALE_FORMATS, BlockScaled
from nemo_fp8rl.fp8.quantize import quantize_blockwise

if TYPE_CHECKING:
    from rich.table import Table

FORMULAS = (*formulas.FORMULAS, *mxfp8_formulas.FORMULAS, *nvfp4_formulas.FORMULAS)


@dataclass(frozen=True)
class Section:
    """A table: all implementations of a format in one block."""

    format: Format
    block: Block

    @property
    def title(self) -> str:
        kind = "weights" if self.is_of_weights else "activations"
        return f"{self.format.name} {kind} {self.block[0]}x{self.block[1]}"

    @property
    def scale_formats(self) -> tuple[ScaleFormat, ...]:
        """E8M0 scales are powers of two, and there is no global scale to choose."""
        return SCALE_FORMATS[:1] if self.format.scale == "e8m0" else SCALE_FORMATS

    @property
    def is_of_weights(self) -> bool:
        return self.block == self.format.weight_block

    def matrices(self, size: int, seed: int) -> dict[str, Tensor]:
        return (sample_matrices.weights if self.is_of_weights else sample_matrices.activations)(size, seed)

    def contract(self, x: Tensor, scale_format: ScaleFormat) -> BlockScaled:
        """Return ours; small block scales are flushed in weights alone."""
        if not self.format.has_global or self.is_of_weights:
            return quantize_blockwise(x, format=self.format, block=self.block, scale_format=scale_format)
        encode = encode_scale(x.abs().amax(), scale_format)
        return quantize_blockwise(x, format=self.format, block=self.block, scale_format="fp32", encode=encode)

    def has(self, implementation: Implementation) -> bool:
        return implementation.format == self.format and self.block in implementation.blocks


SECTIONS = tuple(
    Section(format, block) for format in (FP8, MXFP8, NVFP4) for block in (format.weight_block, format.line_block)
)
"""Engines that quantize weights in MXFP8 and NVFP4 by themselves do it in the blocks of activations."""
STEP = 2 * BLOCK[1]
"""Sizes are multiples of it, so that the zero half of a matrix ends at a block border."""
MAX_SIZE = 16384
WIDTH = 112
"""Columns of the table if the output is not a terminal."""


@dataclass(frozen=True)
class Difference:
    """The fractions, 0 ... 1, that differ from our contract."""

    bytes: float
    scales: float
    values: float

    @property
    def is_zero(self) -> bool:
        return self == Difference(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Row:
    """One implementation in one scale format.

    installed: version of the library that ran; None for a formula
    inputs:    differences by kind of matrix; None if the implementation does not support it or failed
    """

    section: str
    format: str
    implementation: str
    source: str
    installed: str | None
    device: str
    scale_format: ScaleFormat
    inputs: dict[str, Difference | None]


@dataclass(frozen=True)
class Report:
    """All comparisons.

    kernel:  our kernel that computed the contract
    torch:   torch's version
    not_run: libraries that are not installed or failed, with the reason
    """

    size: int
    seed: int
    kernel: str
    torch: str
    rows: list[Row]
    not_run: dict[str, str]


def compare(other: BlockScaled, contract: BlockScaled) -> Difference:
    """Compare two tensors of the same shape and block, on the CPU."""
    a, b = other.dequantize(), contract.dequantize()
    return Difference(
        _fraction(other.data.view(torch.uint8) != contract.data.view(torch.uint8)),
        _fraction(_bits(other.scale_inv) != _bits(contract.scale_inv)),
        _fraction((a != b) & ~(a.isnan() & b.isnan())),
    )


def _bits(scales: Tensor) -> Tensor:
    return scales.view(torch.int32 if scales.dtype is torch.float32 else torch.uint8)


def report(size: int, seed: int) -> Report:
    """Compare every implementation that runs on this machine. Raises UserError for an invalid size or seed."""
    if size < STEP or size % STEP or size > MAX_SIZE:
        raise UserError(f"--size {size} is not a multiple of {STEP} up to {MAX_SIZE}")
    if not 0 <= seed < 2**63:
        raise UserError(f"--seed {seed} is not in 0 ... 2^63 - 1")
    installed, not_run = libraries.load_libraries()
    rows = []
    for section in SECTIONS:
        matrices = section.matrices(size, seed)
        contract = {
            (kind, scale_format): section.contract(x, scale_format)
            for kind, x in matrices.items()
            for scale_format in section.scale_formats
        }
        for implementation in _in_order(installed):
            if not section.has(implementation):
                continue
            for scale_format in section.scale_formats:
                inputs = {
                    kind: _difference(implementation, x, scale_format, contract[kind, scale_format], not_run)
                    for kind, x in matrices.items()
                }
                rows.append(_row(section, implementation, scale_format, inputs))
    kernel = kernels.describe(kernels.resolve("auto", "cpu"))
    return Report(size, seed, kernel, torch.__version__, rows, not_run)


def as_json(result: Report) -> str:
    """Return the report as JSON; its keys are the fields of Report, Row and Difference."""
    return json.dumps(asdict(result), indent=2)


def show(result: Report) -> None:
    """Print the report on stdout: first what it shows, then the tables."""
    from nemo_fp8rl.common.display import Screen

    console = Screen(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    settings = f"size {result.size}, seed {result.seed}; ours: kernel {result.kernel}, torch {result.torch}"
    console.print(settings, markup=False)
    console.print("Each beside ours, at the input where it differs most (docs/numerics.md says why):", soft_wrap=True)
    for sentence in verdicts(result):
        console.print(sentence, markup=False, soft_wrap=True)
    console.print()
    for section in SECTIONS:
        console.print(_table(section.title, [row for row in result.rows if row.section == section.title]))
    for name, reason in result.not_run.items():
        console.print(f"{name}: {reason}", markup=False, soft_wrap=True)


def verdicts(result: Report) -> list[str]:
    """Return one sentence per implementation: in which scale formats it has our bytes, and else how far it is off."""
    by_name: dict[str, list[Row]] = {}
    for row in result.rows:
        name = f"{row.implementation} {row.installed}" if row.installed else f"{row.implementation} (formula)"
        by_name.setdefault(f"{row.format}, {name}", []).append(row)
    return [f"{name}: {'; '.join(_verdicts_of_formats(rows))}" for name, rows in by_name.items()]


def _verdicts_of_formats(rows: list[Row]) -> Iterator[str]:
    """Yield what is true of each scale format; equal sentences become one."""
    texts: dict[str, list[str]] = {}
    for scale_format in sorted({row.scale_format for row in rows}, key=SCALE_FORMATS.index):
        differences = {
            (row.section, kind): difference
            for row in rows
            if row.scale_format == scale_format
            for kind, difference in row.inputs.items()
            if difference is not None
        }
        texts.setdefault(_verdict(differences), []).append(scale_format)
    for text, formats in texts.items():
        yield f"{' and '.join(formats)} {text}"


def _verdict(differences: dict[tuple[str, str], Difference]) -> str:
    if not differences:
        return "not offered"
    off = [difference for difference in differences.values() if not difference.is_zero]
    if not off:
        return f"identical in all {len(differences)} inputs"
    most = max(off, key=lambda difference: difference.values)
    return f"{_percent(most, 'values')} % of values differ" if most.values else "the same values in other bytes"


def _in_order(installed: list[Implementation]) -> Iterator[Implementation]:
    """Yield every formula, followed by the libraries that implement it."""
    for formula in FORMULAS:
        yield formula
        yield from (
            library for library in installed if (library.formula, library.format) == (formula.name, formula.format)
        )


def _row(
    section: Section, implementation: Implementation, scale_format: ScaleFormat, inputs: dict[str, Difference | None]
) -> Row:
    i = implementation
    return Row(section.title, section.format.name, i.name, i.source, i.version, i.device, scale_format, inputs)


def _difference(
    implementation: Implementation,
    x: Tensor,
    scale_format: ScaleFormat,
    contract: BlockScaled,
    not_run: dict[str, str],
) -> Difference | None:
    if scale_format not in implementation.formats:
        return None
    try:
        with libraries.silence_stdout():
            other = implementation.quantize(x, contract.block, scale_format)
    except UnsupportedShapeError:
        return None
    except Exception as error:
        if implementation.version is None:
            raise
        first_line = str(error).partition("\n")[0]
        not_run[f"{implementation.name}, {scale_format}"] = f"failed ({type(error).__name__}: {first_line})"
        return None
    global_scale = None if other.global_scale is None else other.global_scale.cpu()
    cpu = replace(other, data=other.data.cpu(), scale_inv=other.scale_inv.cpu(), global_scale=global_scale)
    return compare(cpu, contract)


def _fraction(differs: Tensor) -> float:
    return int(differs.sum()) / differs.numel()


def _table(title: str, rows: list[Row]) -> "Table":
    """Make a table with one line for a row without any difference, else one line per fraction."""
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
    """Return lines of scale format, metric and one cell per kind of input."""
    columns = list(row.inputs.values())
    if any(column is not None and not column.is_zero for column in columns):
        metrics = {"bytes": "bytes", "scales": "scales", "values": "values"}
    else:
        metrics = {"all" if any(columns) else "": "bytes"}
    first = itertools.chain([row.scale_format], itertools.repeat(""))
    return [
        [scales, label, *(_percent(column, metric) for column in columns)]
        for scales, (label, metric) in zip(first, metrics.items(), strict=False)
    ]


def _percent(difference: Difference | None, metric: str) -> str:
    """Format with two digits; only exactly 0 and exactly 100 are shown as 0 and 100."""
    if difference is None:
        return "-"
    percent = 100 * float(getattr(difference, metric))
    if percent in (0, 100) or 10 <= percent <= 99.5:
        return f"{percent:.0f}"
    return ">99" if percent > 99.5 else f"{percent:.2g}"
