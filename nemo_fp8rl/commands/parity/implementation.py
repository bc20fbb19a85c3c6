"""One way to quantize in blocks: the interface of `formulas` and `libraries`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from nemo_fp8rl.fp8 import BLOCK, FP8, Block, Format, ScaleFormat
from nemo_fp8rl.fp8.block_scaled import ALONG_LAST, BlockScaled

FORMATS: tuple[ScaleFormat, ...] = get_args(ScaleFormat)
BOTH: tuple[Block, ...] = (BLOCK, ALONG_LAST)
"""Weights and activations."""

Quantize = Callable[[Tensor, Block, ScaleFormat], BlockScaled]
"""(x, bf16, fp16 or fp32 [N, K], block, scale_format) -> x quantized; may raise UnsupportedShapeError."""


class UnsupportedShapeError(ValueError):
    """The implementation does not accept a matrix of this shape."""


@dataclass(frozen=True)
class Implementation:
    """A published formula, or the function of a library.

    name:     as the table shows it
    source:   project and file
    quantize: the formula or function
    blocks:   the blocks that it supports
    formats:  the scale formats that it supports
    format:   the number format that it makes
    version:  version of the installed library; None for a formula
    formula:  name of the formula that the library implements
    device:   the device that it runs on
    """

    name: str
    source: str
    quantize: Quantize
    blocks: tuple[Block, ...] = BOTH
    formats: tuple[ScaleFormat, ...] = FORMATS
    version: str | None = None
    formula: str | None = None
    device: str = "cpu"
    format: Format = FP8
