"""One way to quantize in blocks: what `formulas` and `libraries` offer and `table` compares."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from nemo_fp8rl.fp8 import BLOCK, Block, ScaleFormat
from nemo_fp8rl.fp8.format import ALONG_LAST, BlockScaled

FORMATS: tuple[ScaleFormat, ...] = get_args(ScaleFormat)
BOTH: tuple[Block, ...] = (BLOCK, ALONG_LAST)
"""Weights and activations."""

Quantize = Callable[[Tensor, Block, ScaleFormat], BlockScaled]
"""(x, bf16, fp16 or fp32 [N, K], block, scale_format) -> its FP8 form; may raise NotTaken."""


class NotTaken(ValueError):
    """The implementation has no answer for a matrix of this shape."""


@dataclass(frozen=True)
class Implementation:
    """A published formula, or the function of a library."""

    name: str
    source: str
    """Project and file."""
    quantize: Quantize
    blocks: tuple[Block, ...] = BOTH
    formats: tuple[ScaleFormat, ...] = FORMATS
    version: str | None = None
    """Version of the installed library; None for a formula."""
    formula: str | None = None
    """Name of the formula that the library implements."""
    device: str = "cpu"
    """The device that it runs on."""
