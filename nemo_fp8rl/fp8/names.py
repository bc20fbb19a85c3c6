"""Types and constants of FP8 that recipes need; apart from the arithmetic, because a recipe is read without torch."""

from typing import Literal

Block = tuple[int, int]
"""Rows and columns that share a scale."""

BLOCK: Block = (128, 128)
"""The block of a weight."""

FP8_TOKENS = 16
"""FP8 GEMMs on a GPU take a multiple of this number of tokens (megatron/core/fp8_utils.py, get_fp8_align_size)."""

ScaleFormat = Literal["pow2", "fp32"]
"""`pow2` rounds multipliers down to a power of two, so every quantizer agrees; `fp32` keeps their mantissa.

It is the scale of a block in FP8, and the global scale in NVFP4."""

ScaleRule = Literal["pow2", "fp32", "e8m0"]
"""How a kernel of E4M3 chooses a block's scale: `ScaleFormat`, or the rule of MXFP8."""

Backward = Literal["native", "dequantized", "high_precision"]
"""The operands of the gradients' matmuls: quantized for them; the forward's, with gradients in high precision; or all
in high precision."""

Estimator = Literal["straight_through", "differentiable"]
"""The slope of a weight's rounding to FP4 in its gradient: 1, or that of arXiv 2501.17116."""

KernelName = Literal["auto", "reference", "cpu", "triton", "te"]
"""Implementations of the quantizer; `kernels` describes them."""
