"""What recipes say about FP8, apart from what computes it: a recipe is read without torch."""

from typing import Literal

Block = tuple[int, int]
"""Rows and columns that share a scale."""

BLOCK: Block = (128, 128)
"""The block of a weight."""

FP8_TOKENS = 16
"""FP8 GEMMs on a GPU take a multiple of these (megatron/core/fp8_utils.py, get_fp8_align_size)."""

ScaleFormat = Literal["pow2", "fp32"]
"""`pow2`: scales are rounded down to a power of two, so every quantizer agrees. `fp32`: scales keep their mantissa."""

KernelName = Literal["auto", "reference", "cpu", "triton", "te"]
"""Implementations of the quantizer, see `kernels`."""
